"""The Triton kernels, each way in processes of its own: interpreted, a process cannot compile what it interprets."""

import faulthandler
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("triton") is None:
    pytest.skip("there is no Triton for this platform", allow_module_level=True)

from octavo.kernels.triton.compile import MODULES, TARGETS, Usage, configurations, misfits, shipped, table

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0  # both at once took nine minutes where five others worked for every processor


Finished = subprocess.CompletedProcess[str]


def run(*arguments: str, **environment: str) -> Finished:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def both_ways() -> Iterator[dict[str, Future[Finished]]]:
    """The two long ways at the same time: neither has work for two processors all along."""
    interpreted = ("pytest", "tests/kernels/triton", "-q", "-p", "no:cacheprovider")
    with ThreadPoolExecutor() as pool:
        yield {
            "compiled": pool.submit(run, "octavo.kernels.triton.compile", "--jobs", "2"),
            "interpreted": pool.submit(run, *interpreted, TRITON_INTERPRET="1"),
        }


def result(future: Future[Finished]) -> Finished:
    """Wait, with the time limit of `run` in the place of that for one test, which is less."""
    faulthandler.cancel_dump_traceback_later()
    return future.result()


def test_interpreted_kernels_equal_the_reference(both_ways: dict[str, Future[Finished]]) -> None:
    finished = result(both_ways["interpreted"])
    assert finished.returncode == 0, finished.stdout


def test_every_kernel_compiles_for_every_target_without_a_spill(both_ways: dict[str, Future[Finished]]) -> None:
    finished = result(both_ways["compiled"])
    assert finished.returncode == 0, finished.stdout
    rows = [line for line in finished.stdout.splitlines() if line.endswith(" 0")]
    assert len(rows) == len(shipped()) > 3 * len(list(configurations()))


def test_every_kernel_is_among_those_that_are_compiled() -> None:
    compiled = [configuration.kernel for configuration in configurations()]
    for module in MODULES:
        for name, kernel in vars(module).items():
            assert not name.endswith("_kernel") or kernel in compiled, name
    names = [configuration.name for configuration in configurations()]
    assert len(names) == len(set(names))


def test_what_spills_or_does_not_fit_is_named() -> None:
    fits = Usage(registers=255, shared_bytes=64 * 1024, spills=0)
    usages = {("norm", target): fits for target in TARGETS}
    assert misfits(usages) == []
    usages["norm", "sm_80"] = Usage(255, 163 * 1024 + 1, 0)
    usages["norm", "gfx942"] = Usage(512, 65 * 1024, 3)
    assert misfits(usages) == [
        "norm takes 166913 bytes of shared memory on sm_80",
        "norm spills 3 on gfx942",
        "norm takes 66560 bytes of shared memory on gfx942",
    ]
    assert table(usages).splitlines()[-1].split() == ["norm", "gfx942", "512", "65.0", "3"]


def test_what_is_interpreted_is_not_compiled() -> None:
    finished = run("octavo.kernels.triton.compile", TRITON_INTERPRET="1")
    assert finished.returncode == 2
    assert "unset it" in finished.stdout
