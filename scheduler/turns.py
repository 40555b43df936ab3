"""Whose turn it is among the waiting: a client with much to do takes turns with the others.

Sequences of one body wait for turns that follow one another; who comes anew waits for the next one. So whoever has
one sequence waits for one of each other body, however many those have, and nobody is passed by for ever: a turn is
open only to those who came before it began. (Start-time fair queueing: Goyal, Vin and Cheng, 1996; here each sequence
counts as much.)
"""


class Turns:
    """Gives each sequence its turn, a number; lower ones go first."""

    def __init__(self) -> None:
        self._now = 0  # the latest turn of which a sequence was admitted
        self._next: dict[str, int] = {}  # by body_id: the turn after its last one
        self._num_seqs: dict[str, int] = {}  # by body_id: that have not ended

    def join(self, body_id: str) -> int:
        """Return the turn of a sequence that comes; without a `body_id` it is a body of its own."""
        turn = self._now + 1
        if body_id:
            turn = max(turn, self._next.get(body_id, 0))
            self._next[body_id] = turn + 1
            self._num_seqs[body_id] = self._num_seqs.get(body_id, 0) + 1
        return turn

    def begin(self, turn: int) -> None:
        """A sequence of this turn is admitted."""
        self._now = max(self._now, turn)

    def leave(self, body_id: str) -> None:
        """A sequence of this body has ended."""
        if body_id:
            self._num_seqs[body_id] -= 1
            if not self._num_seqs[body_id]:
                del self._num_seqs[body_id], self._next[body_id]

    @property
    def num_bodies(self) -> int:
        return len(self._num_seqs)
