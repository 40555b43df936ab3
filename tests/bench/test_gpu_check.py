"""The script that checks kernels on a GPU, with the reference's kernels in the place of Triton's."""

import subprocess
import sys
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo.bench.gpu_check import Row, format_row, largest_error, main, make_bench, report, rows
from octavo.bench.timing import Roofline
from octavo.kernels import reference

ROOT = Path(__file__).parents[2]
OF_THE_START = {"kv_dtypes", "can_be_recorded", "program_of", "compilation_for"}  # what they say needs no time


def broken(**functions):
    """Return the reference's kernels, some of them replaced."""
    return SimpleNamespace(**(vars(reference) | functions))


def test_right_kernels_pass_every_check(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as main sets it; it is unset after this test
    assert main(["--interpret", "--backend", "reference"]) == 0
    table = capsys.readouterr().out
    assert "0 failed" in table
    functions = {name for name, value in vars(reference).items() if isfunction(value) and not name.startswith("_")}
    functions -= {"pack_linear", "paged_attention", "rotary_embedding"}  # measured under other names
    functions -= OF_THE_START
    for kernel in functions | {"decode attention", "prefill attention", "model, graph"}:
        assert f"| {kernel} |" in table, kernel


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this platform")
def test_interpreted_kernels_pass_every_check():
    command = [sys.executable, "-m", "octavo.bench.gpu_check", "--interpret"]
    finished = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stdout
    assert " checks, 0 failed" in finished.stdout


def test_a_wrong_kernel_and_one_that_raises_fail_and_are_named(capsys):
    def raises(*inputs):
        raise RuntimeError("out of registers\nand more")

    bench = make_bench("reference", is_timed=False)
    backend = broken(rms_norm=lambda x_TE, *rest: 1.1 * reference.rms_norm(x_TE, *rest), silu_and_mul=raises)
    chosen = bench._replace(backend=backend)
    assert report([*rows(chosen, "rms_norm"), *rows(chosen, "silu")], None) == 1
    table = capsys.readouterr().out
    assert "failed: rms_norm T=3 E=64" in table
    assert "add_rms_norm" in table
    assert "failed: add_rms_norm" not in table
    assert "| silu_and_mul | T=21 I=96 | RuntimeError: out of registers |" in table


def test_a_kernel_that_leaves_the_cache_alone_is_wrong():
    bench = make_bench("reference", is_timed=False)._replace(backend=broken(store_kv=lambda *inputs: None))
    errors = [row.error for row in rows(bench, "store_kv") if row.name == "store_kv"]
    assert all(error > 0.1 for error in errors)
    assert len(errors) == 2


def test_errors_are_relative_and_tokens_are_right_or_wrong():
    floats, tokens = torch.tensor([1.0, -4.0]), torch.tensor([7, 9, 9, 1])
    assert largest_error([floats + 1], [floats]) == 0.25
    assert largest_error([floats, torch.tensor([7, 9, 9, 2])], [floats, tokens]) == 0.25
    assert not Row("k", "", largest_error([floats * torch.nan], [floats]), 0.5).is_right
    with pytest.raises(ValueError, match="float64"):
        largest_error([floats.double()], [floats])


def test_a_time_is_shown_as_a_share_of_what_the_slower_of_memory_and_arithmetic_allows():
    row = Row("linear", "T=1", 1e-3, 1e-2, seconds=1e-3, num_bytes=10**9, num_flops=10**9)
    line = format_row(row, Roofline(bytes_per_s=2e12, flops_per_s=1e15))
    assert line == "| linear | T=1 | 1.0e-03 | 1.0e-02 | 1000.0 | 1000 | 1.0 | 50% |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == ("gpu_check: torch sees no GPU on this machine; --interpret checks without one\n")
