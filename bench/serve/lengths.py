"""Distributions of lengths in tokens, as a person writes them."""

import math
import random
import re
from dataclasses import dataclass

NUMBER = r"(\d+(?:\.\d+)?)"
FORMS = {
    "fixed": re.compile(r"(\d+)"),
    "uniform": re.compile(r"(\d+)-(\d+)"),
    "normal": re.compile(rf"normal:{NUMBER},{NUMBER}"),
    "lognormal": re.compile(rf"lognormal:{NUMBER},{NUMBER}"),
}


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens, at least 1: `128`, `64-256` (as often each), `normal:MEAN,SD` or `lognormal:MEAN,SD`.

    Mean and standard deviation are those of the lengths, also of lognormal ones, before they are rounded and cut.
    """

    text: str
    form: str
    values: tuple[float, ...]

    def draw(self, rng: random.Random) -> int:
        match self.form, self.values:
            case "fixed", (length,):
                return int(length)
            case "uniform", (least, most):
                return rng.randint(int(least), int(most))
            case "normal", (mean, deviation):
                return max(1, round(rng.gauss(mean, deviation)))
            case _, (mean, deviation):
                variance = math.log1p((deviation / mean) ** 2)
                return max(1, round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))
            case _:
                raise AssertionError(self)


def parse_lengths(text: str) -> Lengths:
    """Return the distribution that `text` describes. Raises ValueError."""
    for form, pattern in FORMS.items():
        if found := pattern.fullmatch(text.strip()):
            values = tuple(float(value) for value in found.groups())
            if values[0] < 1 or (form == "uniform" and values[0] > values[1]):
                raise ValueError(f"{text} has to begin with its least or mean length, of 1 or more")
            return Lengths(text.strip(), form, values)
    raise ValueError(f"{text!r} is not one of 128, 64-256, normal:128,32 and lognormal:128,64")
