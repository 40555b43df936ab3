"""Ranks in tiktoken's format as tokenizer.json: byte-level BPE."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ModelError
from octavo.gateway.text.byte_level import BYTES_OF_CHARACTERS
from octavo.models.older.vocabulary import merges, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHARACTERS = {encoded[0]: character for character, encoded in BYTES_OF_CHARACTERS.items()}
LONGEST_TOKEN = 4096  # bytes; models have some hundred, and the time for cuts grows with the square


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the rank, which is the id, of each token's bytes. Raises ModelError if the file is missing or damaged."""
    content = read_vocabulary(path)
    try:
        lines = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        if wrong := [rank for token, rank in ranks.items() if not (0 <= rank < 2**31 and len(token) <= LONGEST_TOKEN)]:
            raise ValueError(f"no token can have the rank {wrong[0]}, or one of more than {LONGEST_TOKEN} bytes")
        return ranks
    except (ValueError, binascii.Error) as error:
        raise ModelError(f"{path} has no ranks of tiktoken: {error}. Download the model again.") from error


def has_ranks(path: Path) -> bool:
    """Return whether the file has tiktoken's format, by its first line."""
    with path.open("rb") as file:
        first = file.readline(1000).split()
    return len(first) == 2 and first[1].isdigit()


def build_byte_level(
    ranks: Mapping[bytes, int], special_tokens: Mapping[str, int], split: str, *, normalize_nfc: bool
) -> "Tokenizer":
    """Return the tokenizer that splits text by the regular expression `split` and merges by rank.

    Any two tokens that make a third token together are a merge: tiktoken takes the pair of the lowest rank, whatever
    the pair was made of.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    spelled = {token: _spell(token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | dict(special_tokens)
    spelled_merges = [(spelled[left], spelled[right]) for left, right in merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=spelled_merges, ignore_merges=True))
    if normalize_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


def _spell(token: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in token)
