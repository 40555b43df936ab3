"""How sampling parameters change the logits of a step's rows, on the device, as `Backend.edit_logits` takes it.

The entries of all rows lie joined on the device and stay there. A step uploads where each row's entries lie and, for
each row with penalties, the entry that the last sampled token changed. So the host's work does not grow with the
biases, stop ids and distinct tokens of a sequence. Entries are joined anew when other sequences sample than in the step
before, or when a sequence has no room left.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from octavo.executor.step.sequences import SequenceState

# R rows with edits, N entries, C counted tokens

NOTHING = np.zeros(0, np.int32), np.zeros(0, np.float32)

Upload = Callable[[Sequence[np.ndarray]], list[Tensor]]


class Edits(NamedTuple):
    """The arguments of `Backend.edit_logits` beside the logits."""

    row_R: Tensor
    bounds_R4: Tensor
    penalties_R3: Tensor
    token_id_N: Tensor
    value_N: Tensor


class Place(NamedTuple):
    """Where a sequence's entries lie: ids that min_tokens forbids, then biases, then counted tokens and spare room."""

    sequence: SequenceState
    forbidden: int
    biased: int
    counted: int
    limit: int

    def bounds(self) -> tuple[int, int, int, int]:
        """Return where each kind of entry begins, and where the last kind ends."""
        seq = self.sequence
        forbidden = self.forbidden if seq.forbids_stop_ids else self.biased
        return forbidden, self.biased, self.counted, self.counted + (seq.counts.size if seq.counts else 0)


class JoinedEdits:
    """The edits of the sequences for which a step samples. A sequence samples one token a step."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._places: list[Place] = []  # of the last step
        self._on_device: list[Tensor] = []  # penalties_R3, token_id_N and value_N of these places

    def of(self, sequences: Sequence[SequenceState]) -> Edits | None:
        """Return the edits of rows that sample the next token of these sequences; None if no sequence has any."""
        rows = [row for row, seq in enumerate(sequences) if seq.has_edits]
        if not rows:
            self._places, self._on_device = [], []
            return None
        if not self._are_joined([sequences[row] for row in rows]):
            self._join([sequences[row] for row in rows])
        bounds = [place.bounds() for place in self._places]
        row_R, bounds_R4, at_C, token_id_C, count_C = self._upload(
            [np.array(rows, np.int64), np.array(bounds, np.int64), *self._last_counted()]
        )
        penalties_R3, token_id_N, value_N = self._on_device
        token_id_N.index_copy_(0, at_C, token_id_C)
        value_N.index_copy_(0, at_C, count_C)
        return Edits(row_R, bounds_R4, penalties_R3, token_id_N, value_N)

    def _are_joined(self, edited: Sequence[SequenceState]) -> bool:
        """Return whether the last step had the same sequences, and each still has room."""
        return len(edited) == len(self._places) and all(
            place.sequence is seq and place.bounds()[-1] <= place.limit
            for place, seq in zip(self._places, edited, strict=True)
        )

    def _join(self, edited: Sequence[SequenceState]) -> None:
        kinds = [kind for seq in edited for kind in _kinds(seq)]
        starts = [0, *accumulate(len(token_ids) for token_ids, _ in kinds)]
        self._places = [Place(seq, *starts[3 * row : 3 * row + 4]) for row, seq in enumerate(edited)]
        token_id_N, value_N = (np.concatenate(arrays) for arrays in zip(*kinds, strict=True))
        penalties_R3 = np.array([_penalties(seq) for seq in edited], np.float32)
        self._on_device = self._upload([penalties_R3, token_id_N, value_N])

    def _last_counted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, for each sequence, the place, the id and the count of the token that it counted last."""
        last = [(place.counted, seq.counts.last()) for place in self._places if (seq := place.sequence).counts]
        return (
            np.array([counted + slot for counted, (slot, _, _) in last], np.int64),
            np.array([token_id for _, (_, token_id, _) in last], np.int32),
            np.array([count for _, (_, _, count) in last], np.float32),
        )


def _kinds(seq: SequenceState) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the token ids and numbers of the sequence's entries, in the order of a Place."""
    forbidden = seq.stop_ids if seq.forbids_stop_ids and seq.stop_ids is not None else NOTHING[0]
    return [
        (forbidden, np.zeros(len(forbidden), np.float32)),
        seq.bias or NOTHING,
        seq.counts.arrays() if seq.counts else NOTHING,
    ]


def _penalties(seq: SequenceState) -> tuple[float, float, float]:
    sampling = seq.sampling
    return sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
