"""Limits of bodies: the memory of all bodies together, and the time of each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from octavo.gateway.request_error import overloaded

FREE_BYTES = 64 << 10  # of each body that are not counted: the connection's own buffer holds as much
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class BodyTimes:
    """How long a body may take; proxies allow the same (nginx, HAProxy and Node between 30 and 300 s)."""

    stall_s: float = 30.0  # from one piece to the next
    whole_s: float = 120.0


@dataclass(slots=True)
class Bodies:
    """The memory of all bodies. A body is counted from its first byte until its text has become tokens."""

    max_bytes: int
    times: BodyTimes = field(default_factory=BodyTimes)
    num_bytes: int = 0

    @contextmanager
    def place(self) -> Iterator["Place"]:
        """Give a place to one body. At the latest, the end of the context gives the body's bytes back."""
        place = Place(self)
        try:
            yield place
        finally:
            place.give_back()


class Place:
    """The bytes that one body holds."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0  # counted in `bodies`
        self.num_bytes = 0  # of the body, so far

    @property
    def times(self) -> BodyTimes:
        return self._bodies.times

    def check(self, num_bytes: int) -> None:
        """Raise RequestError (429) if there is no room now for a body of `num_bytes`. This reserves nothing.

        There is always room for a body while no other is held, so that every body gets its turn if it is sent again.
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
        """Give all bytes back; may be called any number of times."""
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0
