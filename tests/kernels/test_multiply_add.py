import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import binding  # type: ignore[import-untyped]

from octavo.kernels.cpu.jit import kernel
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import load, store
from octavo.kernels.cpu.multiply_add import bfloat16_products, integer_products
from octavo.kernels.cpu.simd import zeros


def products_of(bits: int, features: dict[str, bool]) -> Any:
    """Return a kernel that writes the sums of products of a word of x, for two rows, with a vector of operands."""
    add, total = integer_products(bits, features)

    @kernel(cache=False)
    def run(x: np.ndarray, operands: np.ndarray, out: np.ndarray) -> None:
        sums = add(zeros(2), x, 0, 1, load(operands, 0))
        sums = total(add(sums, x, 0, 1, load(operands, 0)))
        store(out, 0, sums[0])
        store(out, LANES, sums[1])

    return run


@pytest.mark.parametrize("features", [{}, {"avx2": True}, {"avx512bw": True}, {"avx512vnni": True}, {"avxvnni": True}])
@pytest.mark.parametrize("bits", [8, 16])
def test_integer_products_are_exact(bits: int, features: dict[str, bool]) -> None:
    if missing := [name for name in features if not binding.get_host_cpu_features().get(name)]:
        pytest.skip(f"this machine has no {missing[0]}")
    generator = np.random.default_rng(0)
    kind = np.int8 if bits == 8 else np.int16
    x = generator.integers(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1), 64 // bits).astype(kind)
    operands = generator.integers(0, 16 if bits == 8 else 256, 512 // bits).astype(np.uint8 if bits == 8 else np.int16)
    out = np.zeros(2 * LANES, np.float32)
    products_of(bits, features)(x.view(np.float32), operands.view(np.float32), out)
    for row, inputs in enumerate(np.split(x, 2)):
        products = np.tile(inputs, LANES).astype(np.int32) * operands.astype(np.int32)
        np.testing.assert_array_equal(np.split(out.view(np.int32), 2)[row], 2 * products.reshape(LANES, -1).sum(-1))


def products_of_pairs(features: dict[str, bool]) -> Any:
    """Return a kernel that adds the products of a word of x with a vector of pairs to the vector `out`."""
    add = bfloat16_products(features)

    @kernel(cache=False)
    def run(x: np.ndarray, pairs: np.ndarray, out: np.ndarray) -> None:
        (total,) = add(zeros(1), x, 0, 0, load(pairs, 0))
        store(out, 0, load(out, 0) + total)

    return run


COMPILING = """
import sys
from tests.kernels.test_multiply_add import products_of, products_of_pairs
from numba import float32, void
feature = {sys.argv[1]: True}
for kernel in (products_of(8, feature), products_of(16, feature), products_of_pairs(feature)):
    kernel.compile(void(float32[::1], float32[::1], float32[::1]))
    print(*kernel.inspect_asm().values())
"""


@pytest.mark.parametrize(
    ("feature", "instructions"),
    [
        pytest.param("avx512vnni", r"vpdpbusd\s.*%zmm.*vpdpwssd\s.*%zmm", id="avx512vnni"),
        pytest.param("avxvnni", r"vpdpbusd\s.*%ymm.*vpdpwssd\s.*%ymm", id="avxvnni"),
        pytest.param("avx512bf16", r"vdpbf16ps\s.*%zmm", id="avx512bf16"),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86-64")
def test_products_are_one_instruction_where_there_is_one(feature: str, instructions: str, tmp_path: Path) -> None:
    """Compiled for another processor, whether or not this one could run it."""
    environ = os.environ | {
        "NUMBA_CPU_NAME": "sapphirerapids",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", COMPILING, feature]
    compiled = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert re.search(instructions, compiled.stdout.replace("\n", " "))
