"""The ModelRunner: a Step in, its results out. It owns the KV cache and the soft state of sequences."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from executor import sampler
from executor.inputs import StepInputs
from executor.models.layers import ALONE, TensorParallel
from executor.packing import Share, pack
from executor.sequences import SequenceState
from kernels import Backend
from protocol.messages import BlockCopy, Logprobs, NeedInit, SequenceResult, Step, StepResult

# T tokens of this step, S sequences, E hidden size, V vocabulary, R rows at a time

PROMPT_LOGPROB_ROWS = 64  # positions whose logits exist at once: they are as wide as the vocabulary

KVCaches = list[tuple[Tensor, Tensor]]


class Model(Protocol):
    """What the runner runs; `executor.models.Decoder` is one."""

    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        """Store the step's keys and values; return hidden_TE."""

    def compute_logits(self, hidden_SE: Tensor) -> Tensor:
        """Return logits_SV, float32; with several ranks, only rank 0's are of the whole vocabulary."""


class ModelRunner:
    """Runs steps of one scheduler incarnation, in the order in which they come."""

    def __init__(
        self,
        model: Model,
        kv_caches: KVCaches,
        backend: Backend,
        *,
        block_size: int,
        num_blocks: int,
        parallel: TensorParallel = ALONE,
    ) -> None:
        """`kv_caches` holds each layer's k_cache_NKDP and v_cache_NKPD, of `num_blocks` blocks."""
        self.model = model
        self.kv_caches = kv_caches
        self.backend = backend
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.parallel = parallel
        self.device = kv_caches[0][0].device
        self._states: dict[int, SequenceState] = {}

    @property
    def num_sequences(self) -> int:
        """Return how many sequences have soft state."""
        return len(self._states)

    def reset(self) -> None:
        """Drop the soft state of all sequences."""
        self._states.clear()

    @torch.inference_mode()
    def run(self, step: Step) -> StepResult | NeedInit:
        """Do a step, or say for which sequences it cannot be done: then nothing was computed.

        Raises ValueError for a step that contradicts itself: a copy from a tier that is not there, blocks out of
        range, an `init` that the share does not continue.
        """
        for seq_id in step.forget:
            self._states.pop(seq_id, None)
        shares, missing = self._take_shares(step)
        if missing:
            return NeedInit(step.scheduler_incarnation, step.executor_incarnation, step.step_id, missing)
        self._copy_blocks(step.copies)
        hidden_TE = self.forward(shares)
        return StepResult(
            step.scheduler_incarnation,
            step.executor_incarnation,
            step.step_id,
            self.sample(hidden_TE, shares),
            completed_copies=list(range(len(step.copies))),
        )

    def forward(self, shares: Sequence[Share]) -> Tensor:
        """Compute the shares' tokens into the KV cache; return hidden_TE."""
        if not shares:
            return torch.empty(0, device=self.device)
        return self.model.forward(pack(shares, self.block_size, self.num_blocks, self.device), self.kv_caches)

    def sample(self, hidden_TE: Tensor, shares: Sequence[Share]) -> list[SequenceResult]:
        """Return each share's result, sampling where it asks for it, and advance the states."""
        ends = _ends(shares)
        prompt_logprobs = [
            self._prompt_logprobs(hidden_TE[end - share.num_tokens : end], share)
            for share, end in zip(shares, ends, strict=True)
        ]
        sampled = iter(self._sample_last(hidden_TE, shares, ends))
        results = []
        for share, of_prompt in zip(shares, prompt_logprobs, strict=True):
            share.state.num_computed_tokens += share.num_tokens
            token_ids, logprobs = [], None
            if share.sample:
                token_id, logprobs = next(sampled)
                share.state.append(token_id)
                token_ids = [token_id]
            results.append(SequenceResult(token_ids, logprobs, of_prompt))
        return results

    def _take_shares(self, step: Step) -> tuple[list[Share], list[int]]:
        """Return the step's shares, and the sequences whose state is unknown or does not fit."""
        shares, missing = [], []
        for part in step.sequences:
            if part.init is not None:
                self._states[part.seq_id] = SequenceState.from_init(part.init, part.num_computed_tokens)
            state = self._states.get(part.seq_id)
            share = Share.of(part, state) if state is not None else None
            if share is not None:
                shares.append(share)
            elif part.init is not None:
                raise ValueError(f"step {step.step_id}: the share of sequence {part.seq_id} does not fit its own init")
            else:
                missing.append(part.seq_id)
        return shares, missing

    def _copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            if copy.tier != "device":
                raise ValueError(f"this executor has no KV tier {copy.tier!r}; it has: device")
            if not (0 <= copy.source_block < self.num_blocks and 0 <= copy.destination_block < self.num_blocks):
                raise ValueError(f"{copy} is not within the {self.num_blocks} blocks of the pool")
            for cache in (cache for layer in self.kv_caches for cache in layer):
                cache[copy.destination_block] = cache[copy.source_block]

    def _sample_last(
        self, hidden_TE: Tensor, shares: Sequence[Share], ends: list[int]
    ) -> Iterable[tuple[int, Logprobs | None]]:
        """Return the next token of each share that samples, and its log probabilities where wanted."""
        last = [end - 1 for share, end in zip(shares, ends, strict=True) if share.sample]
        if not last:
            return []
        logits_SV = self.model.compute_logits(hidden_TE if len(last) == len(hidden_TE) else hidden_TE[last])
        return zip(*self._choose(logits_SV, [share.state for share in shares if share.sample]), strict=True)

    def _choose(
        self, logits_SV: Tensor, states: Sequence[SequenceState]
    ) -> tuple[list[int], Sequence[Logprobs | None]]:
        """Return the next token of each state, as rank 0 samples it, and (there alone) its log probabilities."""
        if self.parallel.world_size == 1:
            return sampler.sample(logits_SV, states, self.backend)
        token_ids = [0] * len(states)
        logprobs: list[Logprobs | None] = [None] * len(states)
        if self.parallel.rank == 0:
            token_ids, logprobs = sampler.sample(logits_SV, states, self.backend)
        token_ids_S = torch.tensor(token_ids, dtype=torch.int32, device=self.device)
        return self.parallel.broadcast(token_ids_S).tolist(), logprobs

    def _prompt_logprobs(self, hidden_TE: Tensor, share: Share) -> Logprobs | None:
        """Return the log probabilities of the prompt tokens that follow the share's own, if they are wanted.

        Position p foretells token p + 1: chunks [a, b) and [b, c) give tokens a + 1 to b and b + 1 to c.
        """
        state = share.state
        if not state.needs_prompt_logprobs:
            return None
        first = state.num_computed_tokens + 1
        targets = state.token_ids[first : min(first + share.num_tokens, state.num_prompt_tokens)]
        num_alternatives = state.sampling.num_prompt_logprobs or 0
        result: list[Logprobs] = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            rows = targets[start : start + PROMPT_LOGPROB_ROWS]
            logits_RV = self.model.compute_logits(hidden_TE[start : start + len(rows)])
            if self.parallel.rank > 0:
                continue
            logprobs_RV = sampler.log_probs(logits_RV)
            result += sampler.token_logprobs(logprobs_RV, rows, [num_alternatives] * len(rows))
        return sum(result, Logprobs(num_alternatives)) if result else None


def _ends(shares: Sequence[Share]) -> list[int]:
    """Return where each share ends among the step's tokens."""
    ends, end = [], 0
    for share in shares:
        end += share.num_tokens
        ends.append(end)
    return ends
