"""What a program adds to its operations: calls, threads, refusals. Whole models: executor/test_models_compiled.py."""

from itertools import pairwise

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu
from octavo.kernels.groupwise import GroupwiseWeight

NUM_ROWS, SIZE, BLOCK_SIZE, NUM_BLOCKS, NUM_POSITIONS, NUM_IDS = 300, 32, 4, 5, 12, 3


def gated(call_products: int = 0) -> tuple[cpu.Program, Tensor, Tensor]:
    """Return a program of 4 layers of which each halves what the one before gave."""
    program = cpu.Program(NUM_ROWS, torch.float32, call_products)
    tensors = [program.new(SIZE >> layer) for layer in range(5)]
    for wide, narrow in pairwise(tensors):
        program.silu_and_mul(wide, narrow)
        program.end_layer()
    tensors[0][:] = torch.randn(NUM_ROWS, SIZE, generator=torch.Generator().manual_seed(0))
    return program, tensors[0], tensors[-1]


def inputs(num_tokens: int = NUM_ROWS, **others: Tensor) -> dict[str, Tensor]:
    """Return those of one sequence without a cache, or with `others`."""
    zeros = torch.zeros(num_tokens, dtype=torch.int64)
    block_tables = torch.zeros(1, NUM_ROWS, dtype=torch.int32)
    given = {"token_ids_T": zeros, "positions_T": zeros, "slot_mapping_T": zeros, "block_tables_SM": block_tables}
    lengths = torch.tensor([0, num_tokens], dtype=torch.int32)
    return {**given, "cu_seqlens_q": lengths, "seq_lens_S": lengths[1:], **others}


def run(program: cpu.Program, **given: Tensor) -> list[int]:
    """Return how many layers each call did."""
    calls: list[int] = []
    program.run(**given, on_layers=calls.append)
    return calls


def halved(x_TE: Tensor) -> Tensor:
    for _ in range(4):
        x_TE = cpu.silu_and_mul(x_TE)
    return x_TE


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_results_do_not_depend_on_the_threads_there_are(num_threads: int) -> None:
    """Numba gives as many as it was told last; the program asks for two, and must not wait for one that never comes."""
    numba.set_num_threads(num_threads)
    for num_tokens in (1, 2, 299, NUM_ROWS):
        program, x_TE, out_TE = gated()
        out_TE[:] = 7
        run(program, **inputs(num_tokens))
        assert torch.equal(out_TE[:num_tokens], halved(x_TE[:num_tokens]))
        assert (out_TE[num_tokens:] == 7).all()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_program_begins_with_the_rows_that_its_tokens_name(bits: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(50, SIZE, generator=generator).to(dtype)
    codes = torch.randint(0, 256, (50, SIZE * bits // 8), generator=generator, dtype=torch.uint8)
    rounded = None if bits == 16 else GroupwiseWeight(codes, bits, SIZE, torch.rand(50, 1, generator=generator), None)
    weight = plain if rounded is None else panels(rounded)
    program = cpu.Program(5, dtype)
    x_TE, residual_TE = program.new(SIZE), program.new(SIZE, dtype=torch.float32)
    program.embedding(weight, x_TE)
    program.clear(residual_TE)
    for token_ids in ([49], [3, 0, 49, 3, 7]):
        x_TE[:], residual_TE[:] = 9, 9
        token_ids_T = torch.tensor(token_ids)
        num_tokens = len(token_ids)
        run(program, **inputs(num_tokens, token_ids_T=token_ids_T))
        expected_TE = (plain if rounded is None else rounded.dequantize().to(dtype))[token_ids_T]
        assert torch.equal(x_TE[:num_tokens], expected_TE)
        assert (residual_TE[:num_tokens] == 0).all()
        assert (x_TE[num_tokens:] == 9).all()
        assert (residual_TE[num_tokens:] == 9).all()


def test_layers_are_counted_call_by_call() -> None:
    layer = layer_of(SIZE)
    counts = {}
    for call_products in (1, 2 * SIZE * SIZE, 10**9):
        program = cpu.Program(2, torch.float32, call_products)
        x_TE = program.new(SIZE)
        for _ in range(5):
            program.linear(x_TE, [layer], x_TE)
            program.end_layer()
        counts[call_products] = [run(program, **inputs(num_tokens)) for num_tokens in (1, 2)]
        assert run(program, **inputs(0)) == []
    assert counts[1] == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert counts[2 * SIZE * SIZE] == [[2, 2, 1], [1, 1, 1, 1, 1]]
    assert counts[10**9] == [[5], [5]]


def layer_of(num_outputs: int) -> cpu.PanelLinear:
    codes = torch.full((num_outputs, SIZE), 9, dtype=torch.uint8)
    return panels(GroupwiseWeight(codes, 8, SIZE, torch.ones(num_outputs, 1), None))


def panels(weight: GroupwiseWeight) -> cpu.PanelLinear:
    layer = cpu.pack_linear(weight)
    assert isinstance(layer, cpu.PanelLinear)
    return layer


@pytest.mark.parametrize("call_products", [1, 10**9], ids=["many calls", "one call"])
def test_the_time_of_each_operation_is_added_to_its_place(call_products: int) -> None:
    program, layer = cpu.Program(2, torch.float32, call_products), layer_of(SIZE)
    x_TE = program.new(SIZE)
    for _ in range(3):
        program.linear(x_TE, [layer], x_TE)
        program.end_layer()
    times_ns = np.full(program.num_operations, -(2**62))
    program.run(**inputs(2), on_layers=lambda num_layers: None, times_ns=times_ns)
    assert len(times_ns) == 3
    assert (times_ns > -(2**62)).all()
    with pytest.raises(ValueError, match="places for 2 times, the program has 3 operations"):
        program.run(**inputs(2), on_layers=lambda num_layers: None, times_ns=times_ns[:2])


def attending() -> tuple[cpu.Program, Tensor]:
    program = cpu.Program(4, torch.float32)
    k_cache, v_cache = torch.full((2, NUM_BLOCKS, 1, 16 * BLOCK_SIZE), 5.0)
    k_cache, v_cache = k_cache.view(NUM_BLOCKS, 1, 16, BLOCK_SIZE), v_cache.view(NUM_BLOCKS, 1, BLOCK_SIZE, 16)
    q_THD, out_THD = program.new(1, 16), program.new(1, 16)
    program.embedding(torch.ones(NUM_IDS, 16), q_THD.flatten(1))
    program.rotate_and_store_kv(q_THD, q_THD, q_THD, torch.zeros(NUM_POSITIONS, 16), k_cache, v_cache)
    program.paged_attention(q_THD, k_cache, v_cache, 1.0, None, None, out_THD)
    return program, k_cache


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"token_ids_T": torch.tensor([0, NUM_IDS])}, "id 3 of token 1 is outside"),
        ({"token_ids_T": torch.tensor([0, -1])}, "id -1 of token 1 is outside"),
        ({"positions_T": torch.tensor([0, NUM_POSITIONS])}, "position 12 of token 1 is outside"),
        ({"slot_mapping_T": torch.tensor([0, NUM_BLOCKS * BLOCK_SIZE])}, "slot 20 of token 1 is outside"),
        ({"block_tables_SM": torch.full((1, 2), NUM_BLOCKS, dtype=torch.int32)}, "block table of sequence 0"),
        ({"seq_lens_S": torch.tensor([9], dtype=torch.int32), "block_tables_SM": torch.zeros(1, 2).int()}, "lengths"),
    ],
)
def test_indices_that_point_outside_are_refused_before_anything_is_done(
    changed: dict[str, Tensor], message: str
) -> None:
    program, k_cache = attending()
    with pytest.raises(IndexError, match=message):
        run(program, **inputs(2, **changed))
    assert (k_cache == 5).all()
    run(program, **inputs(2))
    assert not (k_cache == 5).all()


def test_what_does_not_fit_is_refused() -> None:
    program, x_TE, _ = gated()
    with pytest.raises(ValueError, match="301 tokens, the program has room for 300"):
        run(program, **inputs(NUM_ROWS + 1))
    with pytest.raises(ValueError, match="does not belong into this program"):
        program.silu_and_mul(x_TE.bfloat16(), program.new(16).bfloat16())
    with pytest.raises(ValueError, match="out has shape"):
        program.linear(x_TE, [layer_of(16)], program.new(17))
    with pytest.raises(ValueError, match="out has shape"):
        program.embedding(layer_of(16), program.new(SIZE + 1))
    with pytest.raises(ValueError, match=r"what is cleared is torch\.bfloat16"):
        program.clear(program.new(SIZE, dtype=torch.bfloat16))
