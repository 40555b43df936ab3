"""A SentencePiece model as tokenizer.json, read from its file without SentencePiece."""

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from octavo.errors import ModelError
from octavo.models.older.vocabulary import merges, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "\u2581"  # what SentencePiece writes for a space
BPE = 2  # of TrainerSpec.ModelType


class PieceType(IntEnum):
    """`SentencePiece.Type` of sentencepiece_model.proto."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The part of a `.model` file on which encoding depends. A piece's id is its place."""

    pieces: list[Piece]
    unk_piece: str
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool

    def of_type(self, *types: PieceType) -> list[str]:
        return [piece.text for piece in self.pieces if piece.type in types]


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Return the model in `path`. Raises ModelError if it is missing, damaged, or not of the kind BPE."""
    content = read_vocabulary(path)
    try:
        return _model(_fields(content))
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise ModelError(f"{path} is no SentencePiece model: {error}. Download the model again.") from error


def build_bpe(model: SentencePieceModel, special_tokens: Sequence[str] = ()) -> "Tokenizer":
    """Return a tokenizer. It encodes text between special tokens as `SentencePieceProcessor.encode` does. The model's
    control pieces and `special_tokens` are special; a special token that the model lacks follows its pieces.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    normal = [(i, piece) for i, piece in enumerate(model.pieces) if piece.type == PieceType.NORMAL]
    whole = [text for text in model.of_type(PieceType.USER_DEFINED) if text not in special_tokens]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges({piece.text: (-piece.score, i) for i, piece in normal}),
            unk_token=model.unk_piece,
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
            ignore_merges=bool(whole),
        )
    )
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", SPACE))
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    if whole:
        longest_first = sorted((text.replace(" ", SPACE) for text in whole), key=len, reverse=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    strip = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    special = [*model.of_type(PieceType.UNKNOWN, PieceType.CONTROL), *special_tokens]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


# A message of protocol buffers: the values of each field, by number; nested messages are bytes.
_Value = int | bytes
_Message = dict[int, list[_Value]]


def _model(message: _Message) -> SentencePieceModel:
    trainer, normalizer = (_fields(_bytes(message, field)) for field in (2, 3))
    if _int(trainer, 3, 1) != BPE:
        raise ValueError("its kind is not BPE")
    if _int(trainer, 24, 0) or not _int(normalizer, 5, 1):
        raise ValueError("it does not write spaces in front of words")
    pieces = [_piece(_fields(piece)) for piece in message.get(1, []) if isinstance(piece, bytes)]
    if not pieces:
        raise ValueError("it has no pieces")
    return SentencePieceModel(
        pieces,
        unk_piece=pieces[_int(trainer, 40, 0)].text,
        byte_fallback=bool(_int(trainer, 35, 0)),
        charsmap=_bytes(normalizer, 2),
        add_dummy_prefix=bool(_int(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_int(normalizer, 4, 1)),
    )


def _piece(message: _Message) -> Piece:
    [score] = struct.unpack("<f", _bytes(message, 2, bytes(4)))
    return Piece(_bytes(message, 1).decode(), score, _int(message, 3, PieceType.NORMAL))


def _int(message: _Message, field: int, default: int) -> int:
    value = message.get(field, [default])[-1]
    if not isinstance(value, int):
        raise ValueError(f"field {field} is no number")
    return value


def _bytes(message: _Message, field: int, default: bytes = b"") -> bytes:
    value = message.get(field, [default])[-1]
    if not isinstance(value, bytes):
        raise ValueError(f"field {field} is no text")
    return value


def _fields(content: bytes) -> _Message:
    """Return the fields of an encoded message (protobuf.dev/programming-guides/encoding)."""
    message: _Message = {}
    for field, value in _read_fields(content):
        message.setdefault(field, []).append(value)
    return message


def _read_fields(content: bytes) -> Iterator[tuple[int, _Value]]:
    position = 0
    while position < len(content):
        tag, position = _varint(content, position)
        field, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, position = _varint(content, position)
            yield field, value
            continue
        if wire_type == 2:
            num_bytes, position = _varint(content, position)
        else:
            num_bytes = {1: 8, 5: 4}.get(wire_type, -1)
        if num_bytes < 0 or position + num_bytes > len(content):
            raise ValueError(f"it is damaged at byte {position}")
        yield field, content[position : position + num_bytes]
        position += num_bytes


def _varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError(f"it is damaged at byte {position}")
