"""Finds markers in text that comes in pieces."""

import re
from collections.abc import Sequence


class Markers:
    """Some texts to look for, the longest first where several begin at one place."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._first = frozenset(text[0] for text in texts)

    def find(self, text: str) -> re.Match[str] | None:
        return self._pattern.search(text)

    def match(self, text: str) -> re.Match[str] | None:
        """Return the marker with which `text` begins."""
        return self._pattern.match(text)

    def num_held(self, text: str) -> int:
        """Return how many characters at the end of `text`, which has no marker, may be the start of one."""
        if not self._first.intersection(text):
            return 0
        longest = max((len(marker) - 1 for marker in self._texts), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(marker.startswith(text[-length:]) for marker in self._texts):
                return length
        return 0
