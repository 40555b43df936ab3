"""One compilation serves every CPU of a kind, wherever it was made."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels.cpu.targets import TARGETS, Target, parse_flags, target_for

BF16, VNNI, AVX512, AVX_VNNI, AVX2 = TARGETS
OF_ONE_MODEL = ("adx", "rdseed", "clwb", "gfni", "vaes", "sha")  # code that used these would serve few others

# Says how many passes the compiler made, what came out, and which CPU the code is for.
NORM = """
from octavo.kernels import cpu
import numba
import torch
from numba.core import event

with event.install_recorder("numba:run_pass") as passes:
    largest = cpu.rms_norm(torch.full((1, 32), 3.0), torch.ones(32), 0.0).max().item()
print(len(passes.buffer), largest, numba.config.CPU_NAME, numba.config.CPU_FEATURES)
"""

SETS = """
import octavo.kernels.cpu
import numpy
from octavo.kernels.cpu.jit import kernel

@kernel()
def set_to_one(x):
    x[0] = 1.0
    return 0

x = numpy.zeros(1)
print(set_to_one(x), x[0])
"""

of_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have no kinds")


@pytest.mark.parametrize(
    ("processor", "features", "expected"),
    [
        ("Haswell, Zen 2", AVX2.features, AVX2),
        ("Alder Lake", (*AVX2.features, "avxvnni", "gfni"), AVX_VNNI),
        ("Skylake-SP", AVX512.features, AVX512),
        ("Ice Lake", (*AVX512.features, "avx512vnni", "avx512vbmi"), VNNI),
        ("Zen 4", (*AVX512.features, "avx512vnni", "avx512bf16", "avx512vbmi"), BF16),
        ("Sapphire Rapids", (*BF16.features, "avxvnni", "amx-tile", "avx512fp16"), BF16),
        ("Knights Landing", (*AVX2.features, "avx512f", "avx512cd"), AVX2),
        ("Sandy Bridge", ("sse4.2", "popcnt", "avx"), None),
        ("Graviton", ("neon", "bf16"), None),
    ],
)
def test_a_processor_has_the_best_target_all_of_whose_features_it_has(
    processor: str, features: tuple[str, ...], expected: Target | None
) -> None:
    assert target_for(dict.fromkeys((*features, *OF_ONE_MODEL), True)) == expected


def test_a_feature_that_the_system_turned_off_is_not_used() -> None:
    assert target_for(dict.fromkeys(BF16.features, True) | {"avx512bf16": False}) == VNNI


def test_flags_are_read_as_they_are_written() -> None:
    assert parse_flags(VNNI.flags) == dict.fromkeys(VNNI.features, True)
    assert parse_flags("") == {}
    assert parse_flags("+avx2,-avx512f") == {"avx2": True, "avx512f": False}


@of_x86_64
def test_kernels_are_compiled_for_the_kind_and_not_for_the_model(tmp_path: Path) -> None:
    *_, cpu, flags = _run(NORM, NUMBA_CACHE_DIR=str(tmp_path)).split()
    assert Target(cpu, tuple(parse_flags(flags))) in TARGETS


@of_x86_64
@pytest.mark.parametrize("target", [BF16, AVX2])
def test_kernels_for_another_kind_are_compiled_here(target: Target, tmp_path: Path) -> None:
    """Whether or not this machine can run them; then they would be of no kind that this machine looks for."""
    environ = {"NUMBA_CPU_NAME": target.cpu, "NUMBA_CPU_FEATURES": target.flags, "NUMBA_CACHE_DIR": str(tmp_path)}
    _run(NORM, **environ)
    assert len(list(tmp_path.rglob("pointwise.rms_norm-*.nbc"))) == 1


@of_x86_64
def test_what_this_cpu_cannot_run_is_compiled_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "sets.py").write_text(SETS)
    environ = {"NUMBA_CPU_NAME": AVX2.cpu, "NUMBA_CACHE_DIR": str(tmp_path)}
    run = [str(tmp_path / "sets.py")]
    assert _python(run, NUMBA_CPU_FEATURES="+sse2", **environ) == "0 1.0\n"
    assert _python(run, NUMBA_CPU_FEATURES="+sse2,+xop,+tbm", **environ) == "-1 0.0\n"  # of AMD's Bulldozer alone
    assert len(list(tmp_path.rglob("*set_to_one*.nbc"))) == 2


def test_shipped_kernels_are_found_where_nothing_may_be_written(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    num_passes, largest, *_ = _run(NORM, NUMBA_CACHE_DIR=str(shipped)).split()
    assert int(num_passes) > 0
    before = _contents(shipped)
    (tmp_path / "file").touch()
    environ = {"SHIPPED_KERNELS_DIR": str(shipped)}
    for cache in (tmp_path / "file" / "below", tmp_path / "cache"):
        assert _run(NORM, NUMBA_CACHE_DIR=str(cache), **environ).split()[:2] == ["0", largest]
    assert _contents(shipped) == before
    assert not list((tmp_path / "cache").rglob("*.nbc"))


def test_what_is_not_shipped_is_compiled_and_kept_in_the_cache(tmp_path: Path) -> None:
    environ = {"SHIPPED_KERNELS_DIR": str(tmp_path / "shipped"), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    passes = [int(_run(NORM, **environ).split()[0]) for _ in range(2)]
    assert passes[0] > 0 == passes[1]
    assert not (tmp_path / "shipped").exists()


def _contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _run(program: str, **environ: str) -> str:
    return _python(["-c", program], **environ)


def _python(arguments: list[str], **environ: str) -> str:
    root = Path(__file__).parents[2]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "SHIPPED_"))}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=kept | {"PYTHONPATH": str(root)} | environ, capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout
