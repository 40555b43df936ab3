"""How fast requests end, and so after what time a refused request should be sent again. Pure."""

SMOOTHING = 0.125  # weight of the newest interval in the running mean
MIN_RETRY_S, MAX_RETRY_S, DEFAULT_RETRY_S = 1.0, 60.0, 5.0


class FinishRate:
    """How many requests have ended per second lately."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._num_finished = 0

    def observe(self, num_finished: int, interval_s: float, *, is_busy: bool) -> None:
        """Take the number of requests that ever ended, `interval_s` after the last call; `is_busy` if others run."""
        if num_finished == self._num_finished and not is_busy:
            return  # nobody asked for anything: this says nothing about how fast requests end
        recent_per_s = (num_finished - self._num_finished) / interval_s
        self._num_finished = num_finished
        self._per_s += SMOOTHING * (recent_per_s - self._per_s)

    def retry_after_s(self, num_waiting: int) -> float:
        """Return about how long a request would wait behind `num_waiting` other requests."""
        if self._per_s <= 0.0:
            return DEFAULT_RETRY_S
        return min(max(num_waiting / self._per_s, MIN_RETRY_S), MAX_RETRY_S)
