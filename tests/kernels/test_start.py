"""What holds in a fresh process: one OpenMP runtime, a cache that may be missing."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest
import torch

from octavo.kernels import cpu
from octavo.kernels.cpu import panel_products, program_kernels
from octavo.kernels.cpu.checks import LIKE
from octavo.kernels.cpu.jit import cache_directory
from octavo.kernels.cpu.warm_up import compiling_calls

COMPUTE = """
import {module}
import torch
from octavo.kernels import cpu
x = torch.ones(4096, 32)
cpu.set_num_threads(2)
cpu.rms_norm(x, torch.ones(32), 1e-5)
(x.T @ x).sum()
print(len(cpu.jit.openmp_libraries()))
"""

NORM = """
from octavo.kernels import cpu
import torch
print(cpu.rms_norm(torch.ones(1, 32), torch.ones(32), 0.0).max().item())
"""

# The routine is compiled in one life of the process, what calls it in another.
CALLS_IN_PARALLEL = """
import sys
import octavo.kernels.choice
import numba
import numpy
from octavo.kernels.cpu.jit import kernel, routine

@routine(parallel=True)
def double(x):
    for i in numba.prange(len(x)):
        x[i] *= 2

@kernel()
def quadruple(x):
    double(x)
    double(x)

x = numpy.ones(4)
if sys.argv[1] == "routine":
    double.compile((numba.float64[::1],))
else:
    quadruple(x)
    print(*x)
"""


@pytest.mark.parametrize(
    "module",
    [
        "octavo.kernels.choice",
        "octavo.executor.start.dry_run",
        "octavo.executor.start.precompile",
        "octavo.bench.gpu_check",
    ],
)
def test_numba_and_torch_share_one_openmp_runtime(module: str) -> None:
    finished = _run(COMPUTE.format(module=module))
    assert finished.stdout.split() == ["1"]


def test_kernels_work_without_a_cache_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finished = _run(NORM, NUMBA_CACHE_DIR=str(tmp_path / "file" / "below"))
    assert finished.stdout.split() == ["1.0"]
    assert finished.stderr.count("compiled kernels cannot be kept") == 1


def test_a_first_compilation_that_was_broken_off_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS_IN_PARALLEL)
    for part, said in (("routine", ""), ("kernel", "4.0 4.0 4.0 4.0\n"), ("kernel", "4.0 4.0 4.0 4.0\n")):
        command = [sys.executable, str(tmp_path / "calls.py"), part]
        environ = os.environ | {
            "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        finished = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert (finished.returncode, finished.stdout) == (0, said), finished.stderr
    assert len(list((tmp_path / "cache").rglob("*quadruple*.nbc"))) == 1


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory().parent == Path("/somewhere/octavo/numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/elsewhere")
    assert cache_directory().parent == Path("/elsewhere")


SAMPLERS = ("largest", "edit_logits", "allow_tokens", "rank", "top_k", "scale_to_probs", "draw")
SAMPLING = [name + suffix for name in SAMPLERS for suffix in ("", " in parallel")]


def called_from_python(module: ModuleType) -> dict[str, Any]:
    """Return a module's kernels by name."""
    return {
        name: kernel
        for name, kernel in vars(module).items()
        if not name.startswith("_") and getattr(kernel, "__module__", "") == module.__name__
        if hasattr(kernel, "signatures") and "no_cpython_wrapper" not in kernel.targetoptions
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warm_up_leaves_nothing_to_compile(dtype: torch.dtype) -> None:
    plain_names = compile_all(dtype, has_panels=False)
    assert len(plain_names) == len(set(plain_names)) == 25
    names = compile_all(dtype, has_panels=True)
    assert names == [*plain_names, "panel linear", "panel embedding"]
    kernels = called_from_python(cpu.pointwise) | called_from_python(cpu.attention)
    like = numba.typeof(LIKE[dtype])
    compiled = {name for name, kernel in kernels.items() if like in {kind for (kind, *_) in kernel.signatures}}
    assert compiled == kernels.keys() - {"first_outside"}
    assert len(panel_products.linear.signatures) == len(panel_products.embedding.signatures) == 1
    assert len(cpu.pointwise.first_outside.signatures) == 1
    # Other tests of this process may have called these with other layouts, which are signatures of their own.
    of_sampling = called_from_python(cpu.sampling) | called_from_python(cpu.edits) | called_from_python(cpu.masks)
    before = {name: len(kernel.signatures) for name, kernel in of_sampling.items()}
    assert all(before.values()), before
    compile_all(dtype, has_panels=True)
    assert {name: len(kernel.signatures) for name, kernel in of_sampling.items()} == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warm_up_of_a_program_leaves_nothing_to_compile(dtype: torch.dtype) -> None:
    names = compile_all(dtype, has_panels=True, has_program=True)
    operations = [operation.name for operation in cpu.OPERATIONS]
    assert names == [*operations, "program", *SAMPLING, "panel linear", "panel embedding"]
    assert len(program_kernels.run.signatures) == 1


def compile_all(dtype: torch.dtype, *, has_panels: bool, has_program: bool = False) -> list[str]:
    """Compile what a start compiles; return the names."""
    names = []
    for name, compile_kernel in compiling_calls(dtype, has_panels, has_program):
        compile_kernel()
        names.append(name)
    return names


@pytest.mark.parametrize("num_threads", [0, 1_000_000])
def test_an_impossible_number_of_threads_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match="this process may use"):
        cpu.set_num_threads(num_threads)


def _run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
