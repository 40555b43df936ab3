"""What the files of SentencePiece and tiktoken have in common: they are required, and they leave out the merges."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from octavo.errors import ModelError

Token = TypeVar("Token", str, bytes)


def read_vocabulary(path: Path) -> bytes:
    """Return what is in a tokenizer's file. Raises ModelError if it is missing."""
    if not path.is_file():
        raise ModelError(f"{path} does not exist: it is the tokenizer of this model. Download the model again.")
    return path.read_bytes()


def merges(ranks: Mapping[Token, Any]) -> list[tuple[Token, Token]]:
    """Return every way to make a token of two others, in the order of the results' ranks."""
    ranked = [
        (rank, cut, token)
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return [(token[:cut], token[cut:]) for _, cut, token in sorted(ranked)]
