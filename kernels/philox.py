"""Counter-based random numbers: a pure function of seed, position and purpose, so that nothing needs replaying.

Philox-2x64-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011): the seed is the key, position
and purpose are the counter.
"""

MASK = (1 << 64) - 1
MULTIPLIER = 0xD2B74407B1CE6E93
KEY_STEP = 0x9E3779B97F4A7C15  # the golden ratio
NUM_ROUNDS = 10


def philox(key: int, low: int, high: int) -> tuple[int, int]:
    """Return 128 random bits, as two 64-bit integers, for a 64-bit key and a counter of two 64-bit words."""
    for _ in range(NUM_ROUNDS):
        product = MULTIPLIER * low
        low, high = (product >> 64) ^ key ^ high, product & MASK
        key = (key + KEY_STEP) & MASK
    return low, high


def uniform(seed: int, position: int, purpose: int) -> float:
    """Return a number in [0, 1), a multiple of 2**-53, of the lowest 64 bits of `seed`."""
    return (philox(seed & MASK, position, purpose)[0] >> 11) * 2.0**-53
