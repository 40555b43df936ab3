"""Where a text ends because of a stop string, found a character at a time."""

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Watches one text for several strings; the one that is complete first wins, of two the longer.

    Each string has the automaton of Knuth, Morris and Pratt, so a character costs the same whatever was before it
    and however the text was cut into pieces. After `feed`, the last `num_held` characters may be the start of one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty and contain no empty string."""
        # The longest first: of two strings that end at one character, it is the one that began earlier.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each string the text ends with
        self.num_held = 0

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, int] | None:
        """Return (stop string, index in `text` behind its end), or None; unless `armed`, a string does not stop."""
        for index, character in enumerate(text):
            for which, stop in enumerate(self._stops):
                if self._advance(which, stop, character) == len(stop):
                    if armed:
                        return stop, index + 1
                    self._matched[which] = self._borders[which][-1]
        self.num_held = max(self._matched)
        return None

    def _advance(self, which: int, stop: str, character: str) -> int:
        matched, borders = self._matched[which], self._borders[which]
        while matched and stop[matched] != character:
            matched = borders[matched - 1]
        matched += stop[matched] == character
        self._matched[which] = matched
        return matched


@lru_cache(maxsize=64)  # the choices of one request have the same strings
def _borders(text: str) -> tuple[int, ...]:
    """Return, for each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    matched = 0
    for index in range(1, len(text)):
        while matched and text[index] != text[matched]:
            matched = borders[matched - 1]
        matched += text[index] == text[matched]
        borders[index] = matched
    return tuple(borders)
