"""Which request kills executors: it is found, so that it ends and the others go on."""

from collections.abc import Collection

from octavo.scheduler.sequence import Sequence

MAX_DEATHS = 1  # one death may be chance; a sequence that was in flight at more deaths is a suspect


class Suspects:
    """While there are suspects, only suspects are admitted, in groups of at most half the last group that died.

    A sequence stops being a suspect once it gets a new token: it has survived the step that killed.
    """

    def __init__(self) -> None:
        self._seq_ids: set[int] = set()
        self._max_group = 1

    def accuse(self, in_flight: Collection[Sequence]) -> Sequence | None:
        """An executor died with these sequences in flight: return the culprit if it is found, else None."""
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

    def admissible(self, waiting: list[Sequence], running: list[Sequence]) -> list[Sequence]:
        """Return which of the waiting sequences may join the running ones."""
        if not self._seq_ids:
            return waiting
        num_running = sum(sequence.seq_id in self._seq_ids for sequence in running)
        suspects = [sequence for sequence in waiting if sequence.seq_id in self._seq_ids]
        return suspects[: max(0, self._max_group - num_running)]
