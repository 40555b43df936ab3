"""The ModelRunner: a Step in, its results out. It owns the KV cache and the soft state of sequences.

A step is launched, then waited for. On a GPU the next step can be launched in between: the last sampled tokens pass
from one step to the next on the device, and the host learns them meanwhile.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from octavo.executor.models import Model
from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.kv_caches import KVCaches
from octavo.executor.models.pooling import TAKES_LAST, Pooling
from octavo.executor.parallel import ALONE, TensorParallel
from octavo.executor.step import sampler
from octavo.executor.step.columns import make_columns, to_device
from octavo.executor.step.device import Device, device_of
from octavo.executor.step.edits import JoinedEdits
from octavo.executor.step.grammars import GRACE_S, IDLE_S, Grammars, Matcher
from octavo.executor.step.graphs import DecodeGraphs
from octavo.executor.step.launched import Launched, PromptSlice, StepOutputs
from octavo.executor.step.packing import ShareInputs, StepArrays, pack, pending_rows
from octavo.executor.step.sampler import Sampled
from octavo.executor.step.sequences import SequenceState
from octavo.kernels.backend import Backend
from octavo.protocol.messages import NeedInit, SequenceInit, Step, StepResult

# T tokens of this step, S sequences, E hidden size, V vocabulary, R rows at a time

NO_TOKEN = -1  # what rank 0 tells the others of a row that sat out
PROMPT_LOGPROB_ROWS = 64  # positions whose logits exist at once; each row is as wide as the vocabulary


class ModelRunner:
    """Runs the steps of one scheduler incarnation, in the order of their arrival."""

    def __init__(
        self,
        model: Model,
        kv_caches: KVCaches,
        backend: Backend,
        *,
        block_size: int,
        num_blocks: int,
        device: Device | None = None,
        parallel: TensorParallel = ALONE,
        pooling: Pooling = TAKES_LAST,
        grammars: Grammars | None = None,
    ) -> None:
        """`kv_caches` holds each layer's k_cache_NKDP and v_cache_NKPD, of `num_blocks` blocks.

        `device` replaces the Device that `device_of` finds for them. Rank 0 alone follows `grammars`.
        """
        self.model = model
        self.kv_caches = kv_caches
        self.backend = backend
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.parallel = parallel
        self.pooling = pooling
        self.grammars = grammars
        self.device = device or device_of(kv_caches[0][0].device)
        self.graphs: DecodeGraphs | None = None  # of decode steps; None: steps are launched kernel by kernel
        self._states: dict[int, SequenceState] = {}
        self._edits = JoinedEdits(self.device.upload)
        self._last: Launched | None = None

    @property
    def num_sequences(self) -> int:
        """Return how many sequences have soft state."""
        return len(self._states)

    def reset(self) -> None:
        """Drop the soft state of all sequences, and the results of the steps in flight."""
        for seq_id in list(self._states):
            self._forget(seq_id)
        self._last = None

    def run(self, step: Step) -> StepResult | NeedInit:
        """Launch a step and wait for it."""
        launched = self.launch(step)
        return launched if isinstance(launched, NeedInit) else launched.wait()

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched | NeedInit:
        """Begin a step. Or return, having computed nothing, the sequences whose state is missing.

        Raises ValueError for a step that contradicts itself: a block is out of range, or a share does not continue its
        own `init`.
        """
        self._settle_for(step)
        for seq_id in step.forget:
            self._forget(seq_id)
        shares, missing = self._take_shares(step)
        if missing:
            return NeedInit(step.scheduler_incarnation, step.executor_incarnation, step.step_id, missing)
        absent = self._absent(shares)
        present = [share for index, share in enumerate(shares) if share is not None and index not in absent]
        outputs = self.sample(self.forward(present), present)
        previous = None if self._last is None or self._last.is_settled else self._last
        self._last = Launched(step, present, outputs, self.device, previous, absent)
        return self._last

    def forward(self, shares: Sequence[ShareInputs]) -> Tensor:
        """Compute the shares' tokens into the KV cache; return hidden_TE."""
        if not shares:
            return torch.empty(0, device=self.device.torch_device)
        arrays = pack(shares, self.block_size, self.num_blocks)
        if self.graphs is not None and (key := _graph_key(self.graphs, arrays)):
            self._fill_in_pending(self.graphs.load(key, arrays), shares)
            return self.graphs.replay(key, len(shares))
        inputs = StepInputs(*self.device.upload(arrays))
        self._fill_in_pending(inputs, shares)
        return self.model.forward(inputs, self.kv_caches)

    def sample(self, hidden_TE: Tensor, shares: Sequence[ShareInputs]) -> StepOutputs:
        """Sample for the shares that ask for it, and advance the states. A sampled token is pending from here on.

        A share whose mask is late is to be computed again: its state stays where it is.
        """
        ends = list(accumulate(share.num_tokens for share in shares))
        prompt_slices = [
            self._prompt_logprobs(hidden_TE[end - share.num_tokens : end], share)
            if share.state.prompt_token_ids
            else []
            for share, end in zip(shares, ends, strict=True)
        ]
        sampled, unsampled_rows = self._sample_last(hidden_TE, shares, ends)
        embeddings = self._embed(hidden_TE, shares, ends)
        unsampled = {}
        row = 0
        for index, share in enumerate(shares):
            if share.sample and row in unsampled_rows:
                unsampled[index] = unsampled_rows[row]
                share.state.sat_out = True
            else:
                share.state.num_computed_tokens += share.num_tokens
                if share.sample:
                    share.state.sampled(row)
            row += share.sample
        return StepOutputs(sampled, prompt_slices, embeddings, unsampled)

    def _settle_for(self, step: Step) -> None:
        """Wait for the results that the launch of `step` needs on the host.

        The step before the last must be done: pending tokens are always the last step's. The last step must be done
        only if penalties count its tokens or the scheduler names one of them.
        """
        if self._last is None:
            return
        if self._last.previous is not None:
            self._last.previous.wait()
        states = ((self._states.get(part.seq_id), part) for part in step.sequences if part.init is None)
        if any(state is not None and state.needs_pending(part) for state, part in states):
            self._last.wait()

    def _fill_in_pending(self, inputs: StepInputs, shares: Sequence[ShareInputs]) -> None:
        """Replace PENDING by the tokens that the last step sampled."""
        tokens, rows = pending_rows(shares)
        if len(tokens):
            assert self._last is not None
            assert self._last.token_ids_S is not None
            tokens_N, rows_N = self.device.upload([tokens, rows])
            inputs.token_ids_T.index_copy_(0, tokens_N, self._last.token_ids_S.index_select(0, rows_N))

    def _forget(self, seq_id: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None and state.matcher is not None:
            state.matcher.close()

    def _begin(self, seq_id: int, init: SequenceInit, num_computed_tokens: int) -> SequenceState:
        """Return the state that `init` brings. A matcher stays, if it has read a beginning of the same output."""
        before, matcher = self._states.get(seq_id), None
        if init.grammar and self.grammars is not None:
            matcher = self.grammars.matcher(init, before.matcher if before else None)
        state = self._states[seq_id] = SequenceState.from_init(init, num_computed_tokens, matcher)
        return state

    def _take_shares(self, step: Step) -> tuple[list[ShareInputs | None], list[int]]:
        """Return the step's shares, and the sequences whose state is missing or does not fit.

        A share is None if it was planned on top of one that sat out.
        """
        shares: list[ShareInputs | None] = []
        missing = []
        for part in step.sequences:
            if part.init is not None:
                self._begin(part.seq_id, part.init, part.num_computed_tokens)
            state = self._states.get(part.seq_id)
            share = ShareInputs.of(part, state) if state is not None else None
            if share is not None:
                shares.append(share)
            elif part.init is None and state is not None and state.sat_out:
                state.sat_out = False
                shares.append(None)
            elif part.init is not None:
                raise ValueError(f"step {step.step_id}: the share of sequence {part.seq_id} does not fit its own init")
            else:
                missing.append(part.seq_id)
        return shares, missing

    def _absent(self, shares: Sequence[ShareInputs | None]) -> dict[int, str]:
        """Return which sequences sit the step out, as all ranks do, and why they cannot go on (empty: they can).

        Their grammars are not compiled yet, or do not compile. Sampling finds out which masks are late.
        """
        following = {i: share.state for i, share in enumerate(shares) if share and share.sample and share.has_grammar}
        found = {index: "" for index, share in enumerate(shares) if share is None}
        for index, matcher in ((index, state.matcher) for index, state in following.items()):
            if matcher is not None and (matcher.error or not matcher.is_built):
                found[index] = matcher.error
        if len(found) == len(shares):
            waiting = [state.matcher for index, state in following.items() if index in found and state.matcher]
            Matcher.wait_for(waiting, IDLE_S, first=True)
        if self.parallel.world_size > 1 and following:
            sits_out = torch.tensor([index in found for index in following], dtype=torch.int32)
            agreed = self.parallel.broadcast(sits_out.to(self.device.torch_device)).tolist()
            found |= {index: found.get(index, "") for index, sits in zip(following, agreed, strict=True) if sits}
        for index, state in following.items():
            state.sat_out = index in found
        return found

    def _sample_last(
        self, hidden_TE: Tensor, shares: Sequence[ShareInputs], ends: list[int]
    ) -> tuple[Sampled | None, dict[int, str]]:
        """Return the next token of each share that samples, and the rows that have none, as `_masks` does."""
        last = [end - 1 for share, end in zip(shares, ends, strict=True) if share.sample]
        if not last:
            return None, {}
        if len(last) < ends[-1]:
            [last_S] = self.device.upload([np.array(last)])
            hidden_TE = hidden_TE.index_select(0, last_S)
        logits_SV = self.model.compute_logits(hidden_TE)
        states = [share.state for share in shares if share.sample]
        if self._last is not None and any(state.has_grammar and state.num_pending_tokens for state in states):
            self._last.wait()
        if self.parallel.rank > 0:
            return self._learn(states)
        masks, unsampled = self._masks(states)
        columns, edits = to_device(make_columns(states), self.device.upload), self._edits.of(states)
        sampled = sampler.sample(logits_SV, columns, edits, self.backend, is_lazy=self.device.is_lazy, masks=masks)
        if self.parallel.world_size > 1:
            told_S = sampled.token_ids_S.int()
            if unsampled:
                [rows_N] = self.device.upload([np.array(list(unsampled), np.int64)])
                told_S = told_S.index_fill(0, rows_N, NO_TOKEN)
            self.parallel.broadcast(told_S)
        return sampled, unsampled

    def _learn(self, states: Sequence[SequenceState]) -> tuple[Sampled, dict[int, str]]:
        """Return the tokens that rank 0 sampled. Only rank 0 has their log probabilities, and knows what failed."""
        token_ids_S = torch.empty(len(states), dtype=torch.int32, device=self.device.torch_device)
        largest_S = torch.zeros(len(states), device=self.device.torch_device)
        self.parallel.broadcast(token_ids_S)
        unsampled: dict[int, str] = {}
        if any(state.has_grammar for state in states):
            unsampled = {row: "" for row, token_id in enumerate(token_ids_S.tolist()) if token_id == NO_TOKEN}
        return Sampled(token_ids_S.long(), largest_S, None), unsampled

    def _masks(self, states: Sequence[SequenceState]) -> tuple[sampler.Masks[Tensor] | None, dict[int, str]]:
        """Return the masks of rows that follow a grammar, and the rows whose mask is late or (by an error) never comes.

        Whatever is sampled for these means nothing.
        """
        matchers = {row: state.matcher for row, state in enumerate(states) if state.matcher is not None}
        Matcher.wait_for(matchers.values(), GRACE_S)
        found = {row: matcher.mask() for row, matcher in matchers.items()}
        unsampled = {row: matchers[row].error for row, mask in found.items() if mask is None}
        masks = {row: mask for row, mask in found.items() if mask is not None}
        if not masks:
            return None, unsampled
        arrays = [np.array(list(masks), np.int64), np.stack(list(masks.values()))]
        return sampler.Masks(*self.device.upload(arrays)), unsampled

    def _embed(self, hidden_TE: Tensor, shares: Sequence[ShareInputs], ends: Sequence[int]) -> list[Tensor]:
        """Collect the hidden states of prompts that are embedded; return the vectors of the prompts that end here."""
        vectors = []
        for share, end in zip(shares, ends, strict=True):
            state = share.state
            if state.embeds:
                collected_E = self.pooling.add(state.collected_E, hidden_TE[end - share.num_tokens : end])
                state.collected_E = collected_E
                if share.ends_embedding:
                    vectors.append(self.pooling.vector(collected_E, state.num_prompt_tokens))
        return vectors

    def _prompt_logprobs(self, hidden_TE: Tensor, share: ShareInputs) -> list[PromptSlice]:
        """Return the log probabilities of the prompt tokens that the share's tokens predict.

        Position p predicts token p + 1: chunks [a, b) and [b, c) give tokens a + 1 to b and b + 1 to c.
        """
        state = share.state
        first = state.num_computed_tokens + 1
        targets = np.array(state.prompt_token_ids[first : first + share.num_tokens], np.int64)
        starts = range(0, len(targets), PROMPT_LOGPROB_ROWS)
        slices = [self._prompt_slice(hidden_TE[s:], targets[s : s + PROMPT_LOGPROB_ROWS], state) for s in starts]
        return [part for part in slices if part is not None]

    def _prompt_slice(self, hidden_TE: Tensor, targets: np.ndarray, state: SequenceState) -> PromptSlice | None:
        """Return the log probabilities of `targets`; None on ranks other than 0, which only compute their part."""
        logits_RV = self.model.compute_logits(hidden_TE[: len(targets)])
        if self.parallel.rank > 0:
            return None
        largest_R, _ = self.backend.largest(logits_RV)
        sampler.clamp_non_finite(logits_RV, largest_R, is_lazy=self.device.is_lazy)
        [targets_R] = self.device.upload([targets])
        num_alternatives = state.sampling.num_prompt_logprobs or 0
        sliced = sampler.token_logprobs(logits_RV.log_softmax(-1), targets_R, num_alternatives, self.backend)
        return PromptSlice(sliced, largest_R)


def _graph_key(graphs: DecodeGraphs, arrays: StepArrays) -> tuple[int, int] | None:
    """Return the key of the graph for these arrays; None if a sequence has several tokens or no graph fits."""
    num_seqs, table_blocks = arrays.block_tables_SM.shape
    return graphs.find(num_seqs, table_blocks) if len(arrays.token_ids_T) == num_seqs else None
