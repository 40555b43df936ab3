"""Finding the one request that kills executors, so that it ends and the others do not."""

from collections.abc import Collection
from collections.abc import Sequence as Sequences

from scheduler.sequence import Sequence

MAX_DEATHS = 1  # one may be chance; a sequence that was there at more is a suspect


class Suspects:
    """While there are suspects, only they are admitted, in groups of at most half the last one that died.

    A sequence is no suspect any more once it has a new token: it has lived through the step that killed.
    """

    def __init__(self) -> None:
        self._seq_ids: set[int] = set()
        self._max_group = 1

    def accuse(self, in_flight: Collection[Sequence]) -> Sequence | None:
        """An executor died with these sequences in flight: return the culprit, if it is known now."""
        for sequence in in_flight:
            sequence.num_deaths += 1
        suspects = [sequence for sequence in in_flight if sequence.num_deaths > MAX_DEATHS]
        if len(suspects) == len(in_flight) == 1:
            return suspects[0]
        if suspects:
            self._max_group = max(1, len(suspects) // 2)
            self._seq_ids.update(sequence.seq_id for sequence in suspects)
        return None

    def clear(self, sequence: Sequence) -> None:
        sequence.num_deaths = 0
        self._seq_ids.discard(sequence.seq_id)

    def admissible(self, waiting: Sequences[Sequence], running: Sequences[Sequence]) -> Sequences[Sequence]:
        """Return which of the waiting sequences may join the running ones."""
        if not self._seq_ids:
            return waiting
        num_running = sum(sequence.seq_id in self._seq_ids for sequence in running)
        suspects = [sequence for sequence in waiting if sequence.seq_id in self._seq_ids]
        return suspects[: max(0, self._max_group - num_running)]
