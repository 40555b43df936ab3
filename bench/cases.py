"""Each kernel of a backend on inputs as a model has them: what to call, and the least it must move and compute.

The letters of shapes are those of `kernels.backend`.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.backend import Backend
from octavo.kernels.groupwise import GroupwiseWeight, pack_codes

ROUNDED = 1e-2  # one step of bfloat16 in the largest value, and a little more
SUMMED = 1e-4  # float32, added up in another order
MISMATCHES = 1 / 16  # share of drawn tokens that may be others: a sum in another order crosses a border
EXACT = 0.0
FP8 = torch.float8_e4m3fn


class Sizes(NamedTuple):
    """A model's shape, and how much there is to do."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    block: int
    prompt: int  # tokens
    batches: tuple[int, ...]  # sequences of a decode step
    context: int  # tokens of each of them
    long_context: int  # of one alone


LLAMA_1B = Sizes(2048, 8192, 32, 8, 64, 128_256, 16, 2048, (1, 8, 64, 256), 1024, 32_768)
TINY = Sizes(64, 96, 4, 2, 16, 512, 4, 21, (1, 3), 19, 70)


class Case(NamedTuple):
    """`bind(backend)` is called with copies of `inputs`; what it returns, and the `changed` inputs, are its results."""

    kernel: str
    shape: str
    bind: Callable[[Backend], Callable[..., Any]]
    inputs: tuple[Tensor, ...]
    num_bytes: int
    num_flops: int = 0
    changed: tuple[int, ...] = ()
    tolerance: float = ROUNDED  # of the largest difference, relative to the largest value; or the share of mismatches


class Maker:
    """Makes inputs, the same in every run."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self._source: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device}

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, **self._source) * scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.rand(shape, **self._source).to(dtype)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, **self._source).to(dtype)

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, **self._source)

    def caches(self, num_blocks: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        s = self.sizes
        keys = self.normal(num_blocks, s.kv_heads, s.head, s.block, dtype=dtype)
        return keys, self.normal(num_blocks, s.kv_heads, s.block, s.head, dtype=dtype)


def make_cases(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the cases one by one: their inputs need not fit into the memory together."""
    make = Maker(sizes, device, dtype)
    yield from _stores(make)
    yield from _decodes(make)
    yield from _prefills(make)
    yield from _pointwise(make)
    yield from _products(make)
    yield from _sampling(make)


def _stores(make: Maker) -> Iterator[Case]:
    s = make.sizes
    for num_tokens in (s.batches[-1], s.prompt):
        num_blocks = -(-num_tokens // s.block)
        slots_T = make.permutation(num_blocks * s.block)[:num_tokens]
        q_THD = make.normal(num_tokens, s.heads, s.head)
        k_TKD, v_TKD = (make.normal(num_tokens, s.kv_heads, s.head) for _ in range(2))
        caches, stored = make.caches(num_blocks), (k_TKD.nbytes + v_TKD.nbytes) * 2
        shape = f"T={num_tokens}"
        inputs: tuple[Tensor, ...] = (k_TKD, v_TKD, *caches, slots_T)
        yield Case("store_kv", shape, lambda b: b.store_kv, inputs, stored, changed=(2, 3))
        cos_sin_PR = make.normal(num_tokens, s.head, dtype=torch.float32).tanh()
        inputs = (q_THD, k_TKD, v_TKD, cos_sin_PR, make.permutation(num_tokens), *caches, slots_T)
        num_bytes = stored + 2 * q_THD.nbytes + cos_sin_PR.nbytes
        yield Case("rotate_and_store_kv", shape, lambda b: b.rotate_and_store_kv, inputs, num_bytes, changed=(0, 5, 6))


def _attention(
    make: Maker, kernel: str, seqs: int, queries: int, context: int, *, is_fp8: bool = False, **options: Any
) -> Case:
    s = make.sizes
    table_blocks = -(-context // s.block)
    caches = make.caches(seqs * table_blocks, FP8 if is_fp8 else None)
    tables_SM = make.permutation(seqs * table_blocks).to(torch.int32).view(seqs, table_blocks)
    cu_seqlens_q = torch.arange(0, seqs * queries + 1, queries, dtype=torch.int32, device=make.device)
    seq_lens_S = torch.full((seqs,), context, dtype=torch.int32, device=make.device)
    q_THD = make.normal(seqs * queries, s.heads, s.head)
    visible = options.get("sliding_window", context)  # tokens that one query sees, about
    num_pairs = seqs * queries * (min(visible, context) if queries == 1 else context - queries // 2)
    read = min(context, visible + queries) * seqs * s.kv_heads * s.head * 2 * caches[0].itemsize

    def bind(backend: Backend) -> Callable[..., Tensor]:
        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, *tables: Tensor) -> Tensor:
            block_tables, starts, seq_lens = tables
            return backend.paged_attention(q, k_cache, v_cache, block_tables, starts, seq_lens, s.head**-0.5, **options)

        return attend

    named = "".join(f" {name}" for name in options) + (" fp8" if is_fp8 else "")
    return Case(
        kernel,
        f"S={seqs} Q={queries} C={context}{named}",
        bind,
        (q_THD, *caches, tables_SM, cu_seqlens_q, seq_lens_S),
        read + 2 * q_THD.nbytes,
        4 * num_pairs * s.heads * s.head,
    )


def _decodes(make: Maker) -> Iterator[Case]:
    s = make.sizes
    for num_seqs in s.batches:
        yield _attention(make, "decode attention", num_seqs, 1, s.context)
    yield _attention(make, "decode attention", 1, 1, s.long_context)
    num_seqs, context = s.batches[-1], s.context
    yield _attention(make, "decode attention", num_seqs, 1, context, is_fp8=True)
    yield _attention(make, "decode attention", num_seqs, 1, context, sliding_window=context // 4)
    yield _attention(make, "decode attention", num_seqs, 1, context, soft_cap=30.0)
    yield _attention(make, "decode attention", num_seqs, 1, context, sinks_H=make.normal(s.heads, dtype=torch.float32))
    slopes_H = make.uniform(s.heads, dtype=torch.float32)
    yield _attention(make, "decode attention", num_seqs, 1, context, alibi_slopes_H=slopes_H)


def _prefills(make: Maker) -> Iterator[Case]:
    s = make.sizes
    yield _attention(make, "prefill attention", 1, s.prompt, s.prompt)
    yield _attention(make, "prefill attention", 1, s.prompt // 4, 2 * s.prompt)
    yield _attention(make, "prefill attention", 4, s.prompt // 4, s.prompt // 4)
    yield _attention(make, "prefill attention", 1, s.prompt, s.prompt, is_fp8=True)
    yield _attention(make, "prefill attention", 1, s.prompt, s.prompt, soft_cap=30.0)


def _pointwise(make: Maker) -> Iterator[Case]:
    s = make.sizes
    weight_E = make.normal(s.hidden)

    def norm(backend: Backend) -> Callable[..., Tensor]:
        return lambda x_TE, weight_E: backend.rms_norm(x_TE, weight_E, 1e-5)

    def add_norm(backend: Backend) -> Callable[..., Tensor]:
        return lambda x_TE, residual_TE, weight_E: backend.add_rms_norm(x_TE, residual_TE, weight_E, 1e-5)

    for num_tokens in (s.batches[-1], s.prompt):
        x_TE, residual_TE = make.normal(num_tokens, s.hidden), make.normal(num_tokens, s.hidden, dtype=torch.float32)
        shape = f"T={num_tokens} E={s.hidden}"
        yield Case("rms_norm", shape, norm, (x_TE, weight_E), 2 * x_TE.nbytes)
        num_bytes = 2 * (x_TE.nbytes + residual_TE.nbytes)
        yield Case("add_rms_norm", shape, add_norm, (x_TE, residual_TE, weight_E), num_bytes, changed=(1,))
        gate_up = make.normal(num_tokens, 2 * s.inner)
        shape = f"T={num_tokens} I={s.inner}"
        yield Case("silu_and_mul", shape, lambda b: b.silu_and_mul, (gate_up,), gate_up.nbytes * 3 // 2)


def _products(make: Maker) -> Iterator[Case]:
    s = make.sizes
    plain = make.normal(2 * s.inner, s.hidden, scale=s.hidden**-0.5)
    weights = {"plain": plain} | {f"int{bits}": _groupwise(make, bits, with_offsets=bits == 4) for bits in (4, 8)}
    for name, weight in weights.items():

        def bind(backend: Backend, weight: Tensor | GroupwiseWeight = weight) -> Callable[[Tensor], Tensor]:
            layer = backend.pack_linear(weight)
            return lambda rows_TE: backend.linear(rows_TE, layer)

        for num_rows in (*s.batches, s.prompt):
            x_TE = make.normal(num_rows, s.hidden)
            num_bytes = weight.nbytes + x_TE.nbytes + num_rows * len(plain) * x_TE.itemsize
            shape = f"T={num_rows} {s.hidden} to {len(plain)} {name}"
            yield Case("linear", shape, bind, (x_TE,), num_bytes, 2 * num_rows * plain.numel())

    def rows(backend: Backend) -> Callable[[Tensor], Tensor]:
        layer = backend.pack_linear(weights["int4"])
        return lambda token_ids_T: backend.embedding(token_ids_T, layer, make.dtype)

    token_ids_T = make.integers(len(plain), s.prompt)
    num_bytes = s.prompt * s.hidden * plain.itemsize
    yield Case("embedding", f"T={s.prompt} E={s.hidden} int4", rows, (token_ids_T,), num_bytes)


def _groupwise(make: Maker, bits: int, *, with_offsets: bool) -> GroupwiseWeight:
    num_outputs, num_inputs, group_size = 2 * make.sizes.inner, make.sizes.hidden, 32
    codes_NK = make.integers(2**bits, num_outputs, num_inputs, dtype=torch.uint8)
    scales_NG = make.uniform(num_outputs, num_inputs // group_size, dtype=torch.float16) * 2.0**-bits
    offsets_NG = -7 * scales_NG if with_offsets else None
    return GroupwiseWeight(pack_codes(codes_NK, bits), bits, group_size, scales_NG, offsets_NG)


def _sampling(make: Maker) -> Iterator[Case]:
    vocab = make.sizes.vocab
    for rows in make.sizes.batches:
        logits_RV = make.normal(rows, vocab, dtype=torch.float32, scale=3.0)
        shape = f"R={rows} V={vocab}"
        temperature_R = make.uniform(rows) + 0.5
        yield Case("largest", shape, lambda b: b.largest, (logits_RV,), logits_RV.nbytes, tolerance=EXACT)
        inputs: tuple[Tensor, ...] = (logits_RV, temperature_R)
        yield _edits(make, logits_RV)
        yield _masks(make, logits_RV)
        yield Case("scale_to_probs", shape, lambda b: b.scale_to_probs, inputs, 2 * logits_RV.nbytes, tolerance=SUMMED)
        inputs = (logits_RV, make.integers(vocab, rows))
        yield Case("rank", shape, lambda b: b.rank, inputs, logits_RV.nbytes, tolerance=EXACT)
        yield Case("top_k", shape, _top_20, (logits_RV,), logits_RV.nbytes, tolerance=EXACT)
        top_k_R = make.integers(100, rows)
        inputs = (
            logits_RV.softmax(-1),
            top_k_R,
            1 - make.uniform(rows) / 4,
            make.uniform(rows) / 10,
            make.uniform(rows),
        )
        yield Case("draw", shape, lambda b: b.draw, inputs, logits_RV.nbytes, tolerance=MISMATCHES)
        seeds_R, positions_R = make.integers(2**62, rows), make.integers(1000, rows)
        inputs = (seeds_R, positions_R)
        yield Case("uniform", f"R={rows}", _uniform, inputs, 24 * rows, tolerance=EXACT)


def _edits(make: Maker, logits_RV: Tensor) -> Case:
    """Return the case in which every row has as many biases as counted tokens, which are those of a long text.

    Nothing is forbidden: beside such logits no error of the others would show.
    """
    rows, vocab = logits_RV.shape
    size = min(vocab // 2, 4_000)
    first_R1 = torch.arange(0, 2 * rows, 2, device=make.device)[:, None]
    bounds_R4 = (first_R1 + torch.tensor([0, 0, 1, 2], device=make.device)) * size
    token_id_N = torch.cat([make.permutation(vocab)[: 2 * size] for _ in range(rows)]).to(torch.int32)
    count_N = make.integers(5, 2 * size * rows, dtype=torch.float32)
    penalties_R3 = make.uniform(rows, 3, dtype=torch.float32) + 0.5
    inputs = (logits_RV, make.permutation(rows), bounds_R4, penalties_R3, token_id_N, count_N)
    num_bytes = 16 * len(token_id_N)
    shape = f"R={rows} V={vocab} N={len(token_id_N)}"
    return Case("edit_logits", shape, lambda b: b.edit_logits, inputs, num_bytes, changed=(0,), tolerance=SUMMED)


def _masks(make: Maker, logits_RV: Tensor) -> Case:
    """Return the case in which a grammar allows half of each row's tokens."""
    rows, vocab = logits_RV.shape
    allowed_RW = make.integers(2**31, rows, -(-vocab // 32), dtype=torch.int32)
    inputs = (logits_RV, make.permutation(rows), allowed_RW)
    shape = f"R={rows} V={vocab}"
    return Case(
        "allow_tokens", shape, lambda b: b.allow_tokens, inputs, logits_RV.nbytes, changed=(0,), tolerance=EXACT
    )


def _top_20(backend: Backend) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda scores_RV: backend.top_k(scores_RV, 20)


def _uniform(backend: Backend) -> Callable[..., Tensor]:
    return lambda seed_R, position_R: backend.uniform(seed_R, position_R, 0)
