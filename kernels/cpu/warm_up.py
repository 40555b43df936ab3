"""Compile all kernels before the first request needs them."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch

from octavo.kernels import cpu
from octavo.kernels.cpu import panel_linear
from octavo.kernels.cpu.operations import OPERATIONS
from octavo.kernels.cpu.program import Program
from octavo.kernels.groupwise import GroupwiseWeight


def compiling_calls(
    dtype: torch.dtype, has_panels: bool, has_program: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each kernel for `dtype` (float32 or bfloat16), and a call that compiles the kernel or loads it.

    The kernels of panels are among them if `has_panels`. A program needs its operations instead of the kernels of plain
    layers.
    """
    of_layers = _operations(dtype) if has_program else _calls(dtype)
    return chain(of_layers, _sampling_calls(), _panel_calls() if has_panels else ())


def _calls(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
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


def _sampling_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    nothing, half = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0.5, dtype=torch.float64)
    yield "largest", partial(cpu.largest, torch.zeros(1, 16))
    rows = torch.zeros(2, cpu.LEAST_PARALLEL_ELEMENTS // 2)
    yield "largest in parallel", partial(cpu.largest, rows)
    yield "edit_logits", partial(cpu.edit_logits, *_edits(1, 1))
    yield "edit_logits in parallel", partial(cpu.edit_logits, *_edits(2, cpu.LEAST_PARALLEL_ELEMENTS))
    yield "allow_tokens", partial(cpu.allow_tokens, torch.zeros(1, 32), nothing, -torch.ones(1, 1, dtype=torch.int32))
    words = -torch.ones(2, -(-rows.shape[1] // 32), dtype=torch.int32)
    yield "allow_tokens in parallel", partial(cpu.allow_tokens, rows.clone(), torch.arange(2), words)
    yield "rank", partial(cpu.rank, torch.zeros(1, 16), nothing)
    yield "rank in parallel", partial(cpu.rank, rows, nothing.expand(2))
    yield "top_k", partial(cpu.top_k, torch.zeros(1, 16), 1)
    yield "top_k in parallel", partial(cpu.top_k, rows, 1)
    yield "scale_to_probs", partial(cpu.scale_to_probs, torch.zeros(1, 16), half)
    yield "scale_to_probs in parallel", partial(cpu.scale_to_probs, rows.clone(), half.expand(2))
    yield "draw", partial(cpu.draw, torch.ones(1, 16), nothing, half, half, half)
    limits = [column.expand(2) for column in (nothing, half, half, half)]
    yield "draw in parallel", partial(cpu.draw, rows + 1, *limits)


def _edits(num_rows: int, num_entries: int) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `edit_logits` for rows without entries, among so many."""
    bounds_R4, penalties_R3 = torch.zeros(num_rows, 4, dtype=torch.int64), torch.ones(num_rows, 3)
    entries = torch.zeros(num_entries, dtype=torch.int32), torch.zeros(num_entries)
    return torch.zeros(num_rows, 16), torch.arange(num_rows), bounds_R4, penalties_R3, *entries


def _operations(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    for operation in OPERATIONS:
        yield operation.name, partial(operation.compiled, dtype)
    yield "program", partial(_run_program, dtype)


def _run_program(dtype: torch.dtype) -> None:
    program = Program(1, dtype)
    program.silu_and_mul(program.new(32), program.new(16))
    zeros = torch.zeros(2, dtype=torch.int32)
    first = zeros.long()[:1]
    program.run(first, first, first, zeros.view(1, 2), zeros, zeros[:1], on_layers=lambda num_layers: None)


def _panel_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """They take every dtype: one call each will do."""
    weight = GroupwiseWeight(torch.zeros(1, 16, dtype=torch.uint8), 8, 16, torch.zeros(1, 1), None)
    layer = panel_linear.pack(weight, None)
    yield "panel linear", partial(panel_linear.linear, torch.zeros(1, 16), layer, None)
    yield (
        "panel embedding",
        partial(panel_linear.embedding, torch.zeros(1, dtype=torch.int64), layer, torch.float32),
    )
