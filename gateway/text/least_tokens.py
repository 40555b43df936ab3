"""A lower bound of the number of tokens of a text, without tokenizing it.

L(b) is the length of the vocabulary's longest token that contains the byte (or character) b. So each token adds at most
1 to the sum of 1 / L(b) over all bytes of the text, and the text has at least as many tokens as this sum.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from octavo.gateway.text.byte_level import BYTES_OF_CHARACTERS
from octavo.gateway.text.text_cuts import SPACE, is_space_replacement, parts

MAX_CHARACTERS_PER_TOKEN = 256  # for tokenizers whose vocabulary gives no bound: no average comes near it
WHITE_SPACE = " \t\n\r\x0b\x0c"


class LeastTokens:
    """The bound for one tokenizer. A text is given in slices, whose results are added."""

    def __init__(self, content: dict[str, Any]) -> None:
        """`content` is a tokenizer.json."""
        normalizers, stages = parts(content.get("normalizer")), parts(content.get("pre_tokenizer"))
        self._form: Literal["NFC", "NFKC"] | None = None
        for step in normalizers:
            if step["type"] in ("NFC", "NFKC"):
                self._form = step["type"]
        self._is_byte_level = any(stage["type"] == "ByteLevel" for stage in stages)
        self._shares: dict[Any, float] | None = None  # 1 / L(b)
        self._of_unknown = 0.0  # a token for unknown text may stand for text of any length
        if _keeps_all_text(normalizers, stages) and content["model"].get("type") in ("BPE", "Unigram"):
            self._shares = self._find_shares(content)
            if not self._is_byte_level and content["model"].get("byte_fallback"):
                self._of_unknown = 1.0

    def of(self, part: str) -> float:
        """Return how much a slice adds to the least number of tokens of its text."""
        if self._shares is None:
            return len(part) / MAX_CHARACTERS_PER_TOKEN
        text = unicodedata.normalize(self._form, part) if self._form else part
        counts: Counter[Any] = Counter(text.encode()) if self._is_byte_level else Counter(text)
        total = math.fsum(count * self._shares.get(key, self._of_unknown) for key, count in counts.items())
        # Normalization may join the last character with the next slice's first; and floats are rounded.
        return max(0.0, total * (1 - 1e-9) - (1 if self._form else 0))

    def _find_shares(self, content: dict[str, Any]) -> dict[Any, float]:
        vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or []
        special = {token["content"] for token in added}
        longest: dict[Any, int] = {}
        units: Sequence[Any]
        for token in vocabulary if isinstance(vocabulary, dict) else (piece for piece, _ in vocabulary):
            if token in special:
                continue
            if self._is_byte_level:
                units = [byte for char in token for byte in BYTES_OF_CHARACTERS.get(char, char.encode())]
            else:
                units = token.replace(SPACE, " ")
            _note(longest, units, len(token))
        for token in added:
            units = token["content"].encode() if self._is_byte_level else token["content"].replace(SPACE, " ")
            _note(longest, units, len(units))
        if not self._is_byte_level:
            longest[SPACE] = longest.get(" ", 0)
        shares = {unit: 1 / length for unit, length in longest.items() if length}
        if any(
            token.get("lstrip") or token.get("rstrip") for token in added
        ):  # the token includes any white space beside it
            for char in WHITE_SPACE:
                shares[ord(char) if self._is_byte_level else char] = 0.0
        return shares


def _note(longest: dict[Any, int], units: Sequence[Any], length: int) -> None:
    for unit in units:
        if longest.get(unit, 0) < length:
            longest[unit] = length


def _keeps_all_text(normalizers: list[dict[str, Any]], stages: list[dict[str, Any]]) -> bool:
    """Whether every character of a text is in some token."""
    if not all(is_space_replacement(step) or step["type"] in ("NFC", "NFKC", "Prepend") for step in normalizers):
        return False
    return all(
        stage["type"] in ("ByteLevel", "Metaspace", "Digits")
        or (stage["type"] in ("Split", "Punctuation") and stage.get("behavior") != "Removed")
        for stage in stages
    )
