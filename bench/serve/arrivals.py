"""When requests arrive: pure, from a rate and a seed."""

import random
from itertools import accumulate


def poisson_arrivals(num_requests: int, rate: float, seed: int) -> list[float]:
    """Return the seconds after the start at which requests arrive, `rate` a second on average; the first at 0."""
    rng = random.Random(f"{seed} arrivals")
    return list(accumulate((rng.expovariate(rate) for _ in range(num_requests - 1)), initial=0.0))
