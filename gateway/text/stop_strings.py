"""Finds the place where a stop string ends a text, a character at a time."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

CHARACTER_BITS = 21  # every code point is below 2**21


class StopStrings:
    """Watches one text for several strings. The string that is complete first wins; of two at once, the longer one.

    All strings share an Aho-Corasick automaton: the cost of a character does not depend on the number of strings, on
    the text before it, or on the pieces of the text. After `feed`, the last `num_held` characters may be the start of
    a string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty and contain no empty string."""
        self._automaton = _automaton(tuple(stops))
        self._node = 0  # stands for the longest start of a string that is at the end of the text
        self.num_held = 0

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, int] | None:
        """Return (stop string, index in `text` after its end), or None. Strings do not stop unless `armed`."""
        children, fallbacks, found, held = self._automaton
        node = self._node
        for index, character in enumerate(text):
            code = ord(character)
            while (child := children.get(node << CHARACTER_BITS | code)) is None and node:
                node = fallbacks[node]
            node = child or 0
            if armed and found[node]:
                self._node = node
                return found[node], index + 1
        self._node = node
        self.num_held = held[node]
        return None


class _Automaton(NamedTuple):
    """A node is the start of at least one string; node 0 is the empty start."""

    children: dict[int, int]  # node << CHARACTER_BITS | code point: the node that is one character longer
    fallbacks: list[int]  # the longest node that is a proper suffix of a node
    found: list[str]  # the longest string that a node ends with, or ""
    held: list[int]  # the length of the longest suffix of a node that can still become a string


@lru_cache(maxsize=32)  # the choices of one request have the same strings
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    children: dict[int, int] = {}
    found, depths = [""], [0]
    characters_of: list[list[int]] = [[]]  # the characters that may follow a node
    for stop in stops:
        node = 0
        for code in map(ord, stop):
            key = node << CHARACTER_BITS | code
            if key not in children:
                children[key] = len(found)
                characters_of[node].append(code)
                found.append("")
                depths.append(depths[node] + 1)
                characters_of.append([])
            node = children[key]
        found[node] = stop
    fallbacks, held, waiting = [0] * len(found), [0] * len(found), deque([0])
    while waiting:  # the short nodes first: a fallback is shorter than its node
        node = waiting.popleft()
        found[node] = found[node] or found[fallbacks[node]]
        held[node] = depths[node] if characters_of[node] else held[fallbacks[node]]
        for code in characters_of[node]:
            child, suffix = children[node << CHARACTER_BITS | code], node
            while suffix:
                suffix = fallbacks[suffix]
                if longer := children.get(suffix << CHARACTER_BITS | code):
                    fallbacks[child] = longer
                    break
            waiting.append(child)
    return _Automaton(children, fallbacks, found, held)
