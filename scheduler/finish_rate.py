"""How fast requests end, and so how long a refused one should wait before it is sent again. Pure."""

SMOOTHING = 0.125  # weight of the newest interval in the running mean
SHORTEST_RETRY_S, LONGEST_RETRY_S, UNKNOWN_RETRY_S = 1.0, 60.0, 5.0


class FinishRate:
    """How many requests end a second, lately."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._num_finished = 0

    def observe(self, num_finished: int, interval_s: float, *, is_busy: bool) -> None:
        """Take the count of all that ever finished, `interval_s` after the last; `is_busy` if some have not."""
        if num_finished == self._num_finished and not is_busy:
            return  # that nobody asked for anything says nothing about how long it takes
        recent_per_s = (num_finished - self._num_finished) / interval_s
        self._num_finished = num_finished
        self._per_s += SMOOTHING * (recent_per_s - self._per_s)

    def retry_after_s(self, num_waiting: int) -> float:
        """Return about how long a request would wait behind `num_waiting` others."""
        if self._per_s <= 0.0:
            return UNKNOWN_RETRY_S
        return min(max(num_waiting / self._per_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
