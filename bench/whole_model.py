"""One whole model through the executor's runner: steps as a scheduler plans them, each launched one ahead."""

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.bench.cases import Sizes
from octavo.executor.models import LoadedModel, LoadPlan, load_model, read_model_config
from octavo.executor.models.kv_caches import allocate_kv_caches
from octavo.executor.start.warm_up import capture_graphs
from octavo.executor.step.launched import Launched
from octavo.executor.step.packing import ShareInputs
from octavo.executor.step.runner import ModelRunner
from octavo.executor.step.sequences import SequenceState
from octavo.kernels.backend import Backend
from octavo.protocol.messages import SequenceInit, SequenceStep, Step, pack_ids
from octavo.protocol.sampling import Sampling

SAMPLING = Sampling(max_tokens=1 << 20, seed=0, temperature=0.0)


class Length(NamedTuple):
    """Of the sequences that decode."""

    prompt_tokens: int
    steps: int


class Timed(NamedTuple):
    """A step's time, and the least that it must move and compute."""

    name: str
    seconds: float
    num_bytes: int
    num_flops: int


class WholeModel:
    """A Llama of the given sizes with random weights, over a pool that just holds what is run."""

    def __init__(
        self,
        sizes: Sizes,
        num_layers: int,
        backend: Backend,
        device: torch.device,
        dtype: torch.dtype,
        length: Length,
    ) -> None:
        self._sizes, self._num_layers, self._dtype, self._length = sizes, num_layers, dtype, length
        self._num_seqs = sizes.batches[-1]
        self._max_model_len = max(sizes.prompt, sum(length)) + 1
        self._seq_blocks = -(-(sum(length) + 1) // sizes.block)
        num_blocks = max(self._num_seqs * self._seq_blocks, -(-self._max_model_len // sizes.block))
        model = _load(sizes, num_layers, backend, device, dtype, self._max_model_len)
        self.runner = _make_runner(model, backend, sizes.block, num_blocks, device, dtype)

    def capture(self) -> None:
        """Record the decode steps; from here on they are replayed."""
        capture_graphs(self.runner, self._num_seqs, self._max_model_len)

    def time_decode(self, num_seqs: int) -> Timed:
        """Return the time of one of the steps in which that many sequences decode."""
        prompt_tokens, num_steps = self._length
        self.runner.reset()
        self.runner.run(self._first_step(num_seqs, prompt_tokens))
        self._launch(num_seqs, prompt_tokens).wait()  # compiles what is left to be compiled
        started_s = time.perf_counter()
        previous = self._launch(num_seqs, prompt_tokens + 1)
        for position in range(prompt_tokens + 2, prompt_tokens + num_steps + 1):
            launched = self._launch(num_seqs, position)
            previous.wait()
            previous = launched
        previous.wait()
        seconds = (time.perf_counter() - started_s) / num_steps
        name = f"decode, {num_seqs} sequences" + (", graphs" if self.runner.graphs is not None else "")
        context = num_seqs * (prompt_tokens + num_steps // 2)
        return self._timed(name, seconds, num_seqs, num_seqs, context, context)

    def time_prefill(self, num_times: int = 5) -> Timed:
        """Return the least time that a prompt takes."""
        num_tokens, times_s = self._sizes.prompt, []
        for _ in range(num_times):
            self.runner.reset()
            step = self._first_step(1, num_tokens)
            started_s = time.perf_counter()
            self.runner.run(step)
            times_s.append(time.perf_counter() - started_s)
        num_pairs = num_tokens * num_tokens // 2
        return self._timed(f"prefill, {num_tokens} tokens", min(times_s), num_tokens, 1, num_tokens, num_pairs)

    def graph_error(self, num_seqs: int) -> float:
        """Return how far a replayed decode step is from the same step launched kernel by kernel."""
        graphs = self.runner.graphs
        assert graphs is not None
        assert graphs.find(num_seqs, self._seq_blocks)
        num_tokens = self._length.prompt_tokens
        self._hidden(num_seqs, 0, num_tokens)
        replayed_SE = self._hidden(num_seqs, num_tokens, num_tokens + 1)
        self.runner.graphs = None
        launched_SE = self._hidden(num_seqs, num_tokens, num_tokens + 1)
        self.runner.graphs = graphs
        return relative_error(replayed_SE, launched_SE)

    def _first_step(self, num_seqs: int, num_tokens: int) -> Step:
        prompt = pack_ids(self._token_id(i) for i in range(num_tokens))
        begin, tables = SequenceInit(SAMPLING, num_tokens), self._tables(num_seqs, num_tokens)
        return Step("", "", 1, [SequenceStep(i, 0, prompt, table, True, begin) for i, table in enumerate(tables)])

    def _launch(self, num_seqs: int, position: int) -> Launched:
        tables = self._tables(num_seqs, position + 1)
        parts = [SequenceStep(i, position, b"", table, True) for i, table in enumerate(tables)]
        launched = self.runner.launch(Step("", "", 1, parts))
        assert isinstance(launched, Launched)
        return launched

    def _hidden(self, num_seqs: int, start: int, stop: int) -> Tensor:
        """Return a copy of hidden_TE for tokens `start` to `stop` of each sequence."""
        token_ids = [self._token_id(position) for position in range(stop)]
        return forward(self.runner, token_ids, start, self._tables(num_seqs, stop))

    def _tables(self, num_seqs: int, num_tokens: int) -> list[bytes]:
        """Return block tables that do not overlap, unless one sequence alone is longer than those that decode."""
        num_blocks = max(self._seq_blocks, -(-num_tokens // self._sizes.block))
        return [pack_ids(range(i * self._seq_blocks, i * self._seq_blocks + num_blocks)) for i in range(num_seqs)]

    def _token_id(self, position: int) -> int:
        return position * 7919 % self._sizes.vocab

    def _timed(
        self, name: str, seconds: float, num_tokens: int, num_sampled: int, num_read: int, num_pairs: int
    ) -> Timed:
        """`num_read` tokens are read from the cache, in `num_pairs` of a query and a key."""
        s = self._sizes
        heads = s.hidden * (s.heads + 2 * s.kv_heads) * s.head + s.heads * s.head * s.hidden
        in_layers, in_head = self._num_layers * (heads + 3 * s.hidden * s.inner), s.vocab * s.hidden
        read = num_read * self._num_layers * s.kv_heads * s.head * 2
        num_flops = 2 * (num_tokens * in_layers + num_sampled * in_head)
        num_flops += 4 * num_pairs * self._num_layers * s.heads * s.head
        return Timed(name, seconds, (in_layers + in_head + read) * self._dtype.itemsize, num_flops)


def logits_error(sizes: Sizes, backend: Backend, reference: Backend, device: torch.device, dtype: torch.dtype) -> float:
    """Return how far the logits of a short prompt and two layers with these kernels are from the reference's."""
    num_tokens = min(sizes.prompt, 64)
    num_blocks = -(-num_tokens // sizes.block)
    logits = []
    for kernels in (backend, reference):
        model = _load(sizes, 2, kernels, device, dtype, sizes.prompt)
        runner = _make_runner(model, kernels, sizes.block, num_blocks, device, dtype)
        hidden_TE = forward(runner, list(range(num_tokens)), 0, [pack_ids(range(num_blocks))])
        logits.append(model.compute_logits(hidden_TE))
    return relative_error(*logits)


@torch.inference_mode()
def forward(runner: ModelRunner, token_ids: list[int], start: int, tables: list[bytes]) -> Tensor:
    """Return a copy of hidden_TE for the tokens from `start` on, of one sequence a block table."""
    begin = SequenceInit(SAMPLING, len(token_ids))
    part = pack_ids(token_ids[start:])
    shares = [ShareInputs(SequenceState.from_init(begin, start), part, table, sample=True) for table in tables]
    return runner.forward(shares).clone()


def relative_error(values: Tensor, expected: Tensor) -> float:
    return float((values.float() - expected.float()).norm() / expected.float().norm())


def _load(
    sizes: Sizes, num_layers: int, backend: Backend, device: torch.device, dtype: torch.dtype, max_model_len: int
) -> LoadedModel:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head,
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": True,
    }
    with TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(config))
        return load_model(
            LoadPlan(
                *(directory, read_model_config(directory), dtype),
                max_model_len=max_model_len,
                load_format="dummy",
                backend=backend,
                device=device,
                progress=False,
            )
        )


def _make_runner(
    model: LoadedModel, backend: Backend, block_size: int, num_blocks: int, device: torch.device, dtype: torch.dtype
) -> ModelRunner:
    kv_caches = allocate_kv_caches(model.kv_shapes, num_blocks, block_size, dtype, device)
    return ModelRunner(model, kv_caches, backend, block_size=block_size, num_blocks=num_blocks)
