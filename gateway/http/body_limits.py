"""What bodies may take of the gateway: memory all together, and time each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from octavo.gateway.request_error import overloaded

FREE_BYTES = 64 << 10  # of each body: the connection's own buffer holds as much
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class BodyTimes:
    """How long a body may take; proxies allow the same (nginx, HAProxy and Node between 30 and 300 s)."""

    stall_s: float = 30.0  # from one piece to the next
    whole_s: float = 120.0


@dataclass(slots=True)
class Bodies:
    """The bodies that are held: from their first byte until their text has become tokens."""

    max_bytes: int
    times: BodyTimes = field(default_factory=BodyTimes)
    num_bytes: int = 0

    @contextmanager
    def place(self) -> Iterator["Place"]:
        """Give room to one body; what it holds is given back at the end of the context at the latest."""
        place = Place(self)
        try:
            yield place
        finally:
            place.give_back()


class Place:
    """What one body holds."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0  # counted
        self.num_bytes = 0  # of the body, as far as it has come

    @property
    def times(self) -> BodyTimes:
        return self._bodies.times

    def check(self, num_bytes: int) -> None:
        """Raise RequestError (429) if a body of `num_bytes` has no room now. Nothing is held for an announcement.

        A body beside which no other is held always has room: sent again, each gets its turn.
        """
        counted, others = num_bytes - FREE_BYTES, self._bodies.num_bytes - self._num_bytes
        if counted > 0 and others > 0 and others + counted > self._bodies.max_bytes:
            message = (
                f"the bodies of other requests leave no room for one of {num_bytes} bytes: send it again later"
                f" (all together may have {self._bodies.max_bytes} bytes)"
            )
            raise overloaded(message, RETRY_AFTER_S)

    def hold(self, num_bytes: int) -> None:
        """Hold `num_bytes` in all. Raises RequestError (429) if there is no room for them."""
        self.check(num_bytes)
        self.num_bytes = num_bytes
        counted = max(0, num_bytes - FREE_BYTES)
        self._bodies.num_bytes += counted - self._num_bytes
        self._num_bytes = counted

    def give_back(self) -> None:
        """Hold nothing; may be called any number of times."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0
