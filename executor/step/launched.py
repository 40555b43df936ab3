"""A launched step, and its results once they are on the host."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from octavo.executor.step.device import Device
from octavo.executor.step.packing import ShareInputs
from octavo.executor.step.sampler import Sampled, TokenLogprobs, pack_logprobs
from octavo.protocol.messages import Logprobs, SequenceResult, Step, StepResult

logger = logging.getLogger(__name__)


class PromptSlice(NamedTuple):
    """Log probabilities of some of a prompt's tokens, on the device."""

    logprobs: TokenLogprobs[Tensor]
    largest_R: Tensor  # float32; not finite if a logit is not


class StepOutputs(NamedTuple):
    """The outputs of a step's shares, on the device."""

    sampled: Sampled | None  # of the shares that sample
    prompt_slices: list[list[PromptSlice]]  # of each share
    embeddings: list[Tensor]  # float32, of the shares that end a prompt that is embedded
    unsampled: Mapping[int, str]  # shares that sat out only at the sampling: why they cannot go on, or nothing

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order in which `Launched` reads them."""
        sampled = [*self.sampled[:2], *(self.sampled.logprobs or ())] if self.sampled else []
        slices = [
            tensor for part in self.prompt_slices for logprobs, largest in part for tensor in (largest, *logprobs)
        ]
        return sampled + slices + self.embeddings


class Launched:
    """One step in flight. `wait` tells the states of its sequences their new tokens."""

    def __init__(
        self,
        step: Step,
        shares: Sequence[ShareInputs],
        outputs: StepOutputs,
        device: Device,
        previous: "Launched | None",
        absent: Mapping[int, str],
    ) -> None:
        """`previous` is the step before, if it has not been waited for: states learn their tokens in order.

        `absent` has the indexes, in the step, of sequences that have no share, and why they cannot go on, or nothing.
        """
        self.token_ids_S = outputs.sampled.token_ids_S if outputs.sampled else None  # on the device
        self.previous = previous
        self._step = step
        self._absent = absent
        self._shares = shares
        self._outputs = outputs
        self._download = device.download(outputs.tensors())
        self._result: StepResult | None = None

    @property
    def is_settled(self) -> bool:
        """Return whether the step has been waited for."""
        return self._result is not None

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.is_settled or self._download.is_done()

    def wait(self) -> StepResult:
        """Return the results; a second call returns the same. Raises the error of the device."""
        if self._result is None:
            if self.previous is not None:
                self.previous.wait()
                self.previous = None
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        arrays = iter(self._download.wait())
        sampled = self._read_sampled(arrays)
        results = []
        for index, (share, slices) in enumerate(zip(self._shares, self._outputs.prompt_slices, strict=True)):
            token_ids, logprobs = next(sampled) if share.sample else ([], None)
            prompt_logprobs = _read_prompt(arrays, share, len(slices))
            if (error := self._outputs.unsampled.get(index)) is not None:
                results.append(SequenceResult([], error=error))
                continue
            for token_id in token_ids:
                share.state.append(token_id)
            results.append(SequenceResult(token_ids, logprobs, prompt_logprobs))
        if self._outputs.embeddings:
            results = _with_embeddings(results, self._shares, arrays)
        return self._with_absent(results)

    def _with_absent(self, results: list[SequenceResult]) -> StepResult:
        """Return the results of all sequences of the step, in its order."""
        step, late = self._step, {index for index, error in self._outputs.unsampled.items() if not error}
        computed = iter([(result, index in late) for index, result in enumerate(results)])
        sequences, not_ready = [], []
        for index, part in enumerate(step.sequences):
            error = self._absent.get(index)
            result, is_late = next(computed) if error is None else (SequenceResult([], error=error), not error)
            sequences.append(result)
            if is_late:
                not_ready.append(part.seq_id)
        return StepResult(step.scheduler_incarnation, step.executor_incarnation, step.step_id, sequences, not_ready)

    def _read_sampled(self, arrays: Iterator[np.ndarray]) -> Iterator[tuple[list[int], Logprobs | None]]:
        """Return the token of each share that samples, and its log probabilities if the share wants them."""
        if self._outputs.sampled is None:
            return iter(())
        token_ids = [[token_id] for token_id in next(arrays).tolist()]
        _warn_of_bad(next(arrays))
        wanted = [share.state.sampling.num_logprobs for share in self._shares if share.sample]
        if self._outputs.sampled.logprobs is None:  # no share wants them, or another rank has them
            return ((token_id, None) for token_id in token_ids)
        values = TokenLogprobs(*(next(arrays) for _ in TokenLogprobs._fields))
        entries = iter(pack_logprobs(values, [k for k in wanted if k is not None]))
        return zip(token_ids, [None if k is None else next(entries) for k in wanted], strict=True)


def _with_embeddings(
    results: Sequence[SequenceResult], shares: Sequence[ShareInputs], arrays: Iterator[np.ndarray]
) -> list[SequenceResult]:
    return [
        msgspec.structs.replace(result, embedding=next(arrays).tobytes()) if share.ends_embedding else result
        for result, share in zip(results, shares, strict=True)
    ]


def _read_prompt(arrays: Iterator[np.ndarray], share: ShareInputs, num_slices: int) -> Logprobs | None:
    num_alternatives = share.state.sampling.num_prompt_logprobs or 0
    found: list[Logprobs] = []
    for _ in range(num_slices):
        _warn_of_bad(next(arrays))
        values = TokenLogprobs(*(next(arrays) for _ in TokenLogprobs._fields))
        found += pack_logprobs(values, [num_alternatives] * len(values.rank_R))
    return sum(found, Logprobs(num_alternatives)) if found else None


def _warn_of_bad(largest_S: np.ndarray) -> None:
    num_bad = sum(not math.isfinite(logit) for logit in largest_S.tolist())
    if num_bad:
        logger.warning("logits of %d sequences are not finite: is the checkpoint sound?", num_bad)
