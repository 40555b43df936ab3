"""Whose turn it is among the waiting sequences: a client with many sequences takes turns with the others.

The sequences of one body get consecutive turns; a new body gets the next turn. So a single sequence waits for at most
one sequence of each other body, however many these bodies have. Nobody is overtaken for ever, because only sequences
that came before a turn began are in it. (Start-time fair queueing: Goyal, Vin and Cheng, 1996; here every sequence has
the same weight.)
"""


class Turns:
    """Gives each sequence its turn, a number; lower ones go first."""

    def __init__(self) -> None:
        self._now = 0  # the latest turn in which a sequence was admitted
        self._next: dict[str, int] = {}  # by body_id: the turn after its last one
        self._num_seqs: dict[str, int] = {}  # by body_id: sequences that have not ended

    def join(self, body_id: str) -> int:
        """Return the turn of a new sequence. Without a `body_id` it is a body of its own."""
        turn = self._now + 1
        if body_id:
            turn = max(turn, self._next.get(body_id, 0))
            self._next[body_id] = turn + 1
            self._num_seqs[body_id] = self._num_seqs.get(body_id, 0) + 1
        return turn

    def begin(self, turn: int) -> None:
        """A sequence of this turn has been admitted."""
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
