"""Compile all kernels before the first request needs them.

Where nothing is in the cache yet, a second process takes part: this one does the list of calls from its front, the
other from its back, until they meet. Then this one loads what the other has left in the cache. (Threads would not do:
Numba compiles under a lock.)
"""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from kernels import cpu

# isort: split
import torch

from kernels.cpu import OPERATIONS, Program, operations, panel_linear
from kernels.cpu.jit import IS_KEPT, cache_directory
from kernels.groupwise import GroupwiseWeight

Call = tuple[str, Callable[[], object]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def warm_up(dtype: torch.dtype, has_panels: bool, has_program: bool = False) -> Iterator[tuple[str, float]]:
    """Compile each kernel for `dtype` (float32 or bfloat16), or load it from the cache; yield its name and seconds.

    Those of quantized layers only if the model has some; in the place of those of plain ones the operations of programs
    if there is a program that does the layers.
    """
    calls = _all_calls(dtype, has_panels, has_program)
    waiting = deque(range(len(calls)))
    with _helper(waiting, dtype, has_panels, has_program) if _is_helped() else nullcontext():
        while (index := _taken(waiting.popleft)) is not None:
            yield _timed(*calls[index])
            num_done = index + 1
    for name, call in calls[num_done:]:
        yield _timed(name, call)


def _all_calls(dtype: torch.dtype, has_panels: bool, has_program: bool) -> list[Call]:
    """Return what compiles the kernels. Of a program, what takes longest stands at the two ends."""
    panels = list(_panel_calls()) if has_panels else []
    if not has_program:
        return [*_calls(dtype), *_sampling_calls(), *panels]
    first, last = operations.paged_attention, operations.product
    others = [operation for operation in OPERATIONS if operation not in (first, last)]
    compiled = [(each.name, partial(each.compiled, dtype)) for each in (first, *others, last)]
    return [*compiled[:-1], ("program", partial(_run_program, dtype)), *_sampling_calls(), *panels, compiled[-1]]


def _timed(name: str, call: Callable[[], object]) -> tuple[str, float]:
    start = time.perf_counter()
    call()
    return name, time.perf_counter() - start


def _is_helped() -> bool:
    return IS_KEPT and len(os.sched_getaffinity(0)) > 1 and not any(cache_directory().rglob("*.nbc"))


def _taken(take: Callable[[], int]) -> int | None:
    try:
        return take()
    except IndexError:
        return None


@contextmanager
def _helper(waiting: deque[int], dtype: torch.dtype, has_panels: bool, has_program: bool) -> Iterator[None]:
    """Let another process compile what waits, from its end on. What it fails at is only not in the cache."""
    name = str(dtype).removeprefix("torch.")
    command = [sys.executable, "-m", "kernels.cpu.warm_up", name, str(int(has_panels)), str(int(has_program))]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        thread = threading.Thread(target=_feed, args=(process, waiting), name="compiling elsewhere")
        thread.start()
        try:
            yield
        finally:
            waiting.clear()
            thread.join()


def _feed(process: subprocess.Popen[str], waiting: deque[int]) -> None:
    """Name one call after another to the process, each when it has said that it is ready; then let it end."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin:
        while process.stdout.readline() and (index := _taken(waiting.pop)) is not None:
            try:
                process.stdin.write(f"{index}\n")
                process.stdin.flush()
            except BrokenPipeError:
                return


def _serve(dtype: str, has_panels: str, has_program: str) -> None:
    """Do the calls whose numbers come in, until no more can come."""
    calls = _all_calls(DTYPES[dtype], has_panels == "1", has_program == "1")
    print("ready", flush=True)
    for line in sys.stdin:
        calls[int(line)][1]()
        print("ready", flush=True)


def _calls(dtype: torch.dtype) -> Iterator[Call]:
    size = 16
    k_cache, v_cache = torch.zeros(1, 1, size, size, dtype=dtype), torch.zeros(1, 1, size, size, dtype=dtype)
    weight_E = torch.ones(size, dtype=dtype)
    cos_sin = torch.zeros(1, size)
    for suffix, num_tokens in (("", 1), (" in parallel", cpu.LEAST_PARALLEL_ELEMENTS // size)):
        x_TE = torch.zeros(num_tokens, size, dtype=dtype)
        x_T1E = x_TE.unsqueeze(1)
        zeros_T = torch.zeros(num_tokens, dtype=torch.int64)
        yield "rms_norm" + suffix, partial(cpu.rms_norm, x_TE, weight_E, 1e-6)
        yield "add_rms_norm" + suffix, partial(cpu.add_rms_norm, x_TE, x_TE.float(), weight_E, 1e-6)
        yield "silu_and_mul" + suffix, partial(cpu.silu_and_mul, x_TE)
        yield "rotary_embedding" + suffix, partial(cpu.rotary_embedding, x_T1E, x_T1E, cos_sin, zeros_T)
        yield "store_kv" + suffix, partial(cpu.store_kv, x_T1E, x_T1E, k_cache, v_cache, zeros_T - 1)
    one = torch.ones(1, dtype=torch.int32)
    query, table, starts = weight_E.view(1, 1, size), torch.zeros(1, 1, dtype=torch.int32), torch.arange(2).int()
    yield "paged_attention", partial(cpu.paged_attention, query, k_cache, v_cache, table, starts, one, 1.0)


def _sampling_calls() -> Iterator[Call]:
    nothing, half = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0.5, dtype=torch.float64)
    yield "draw", partial(cpu.draw, torch.ones(1, 16), nothing, half, half, half)


def _run_program(dtype: torch.dtype) -> None:
    program = Program(1, dtype)
    program.silu_and_mul(program.new(32), program.new(16))
    zeros = torch.zeros(2, dtype=torch.int32)
    inputs = (zeros.long()[:1], zeros.long()[:1], zeros.view(1, 2), zeros, zeros[:1])
    program.run(*inputs, on_layers=lambda num_layers: None)


def _panel_calls() -> Iterator[Call]:
    """They take every dtype: one call each will do."""
    weight = GroupwiseWeight(torch.zeros(1, 16, dtype=torch.uint8), 8, 16, torch.zeros(1, 1), None)
    layer = panel_linear.pack(weight, None)
    yield "groupwise linear", partial(panel_linear.linear, torch.zeros(1, 16), layer, None)
    yield (
        "groupwise embedding",
        partial(panel_linear.embedding, torch.zeros(1, dtype=torch.int64), layer, torch.float32),
    )


if __name__ == "__main__":
    _serve(*sys.argv[1:])
