"""Reads a file of prompts, one per line: plain text (.txt) or JSON objects (.jsonl). Blank lines are skipped."""

import codecs
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.batch.escapes import unescape
from octavo.errors import CommandError
from octavo.gateway.openai.types import ChatMessage

SUFFIXES = (".txt", ".jsonl")
MARK_BYTES = 8


class PromptLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A line of a .jsonl file. `id` is the user's name for it, which the result repeats."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    id: Any = None


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """A text to continue, or messages to answer. `line` counts all lines from 1, also blank ones."""

    line: int
    asked: PromptLine


class Fingerprint:
    """A digest of a growing sequence of prompts, and a mark of MARK_BYTES for each prompt."""

    def __init__(self) -> None:
        self.num_prompts = 0
        self._hash = hashlib.sha256()
        self._marks = bytearray()

    def add(self, prompt: BatchPrompt) -> None:
        self.num_prompts += 1
        self._hash.update(msgspec.json.encode(prompt.asked) + b"\n")
        self._marks += _mark(prompt)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def has(self, index: int, prompt: BatchPrompt) -> bool:
        """Return whether `prompt` equals the prompt that was added at `index`, counted from 0."""
        return self._marks[index * MARK_BYTES : (index + 1) * MARK_BYTES] == _mark(prompt)


def _mark(prompt: BatchPrompt) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(prompt.asked), digest_size=MARK_BYTES).digest()


def read_prompts(path: Path) -> Iterator[BatchPrompt]:
    """Yield the prompts of the file; it is read lazily. Raises CommandError that names the line."""
    parse = _parsers()[path.suffix]
    try:
        file = path.open("rb")
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    with file:
        for number, raw in enumerate(file, 1):
            raw = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            try:
                text = raw.rstrip(b"\r\n").decode()
                if text.strip():
                    yield BatchPrompt(number, parse(text))
            except UnicodeDecodeError as error:
                raise CommandError(f"{path}, line {number} is not UTF-8 (byte {error.start + 1})") from None
            except (msgspec.DecodeError, ValueError) as error:
                raise CommandError(f"{path}, line {number}: {error}") from None


def read_again(path: Path, fingerprint: Fingerprint) -> Iterator[BatchPrompt]:
    """Yield the prompts of `fingerprint` from the file again, and no later prompts.

    Raises CommandError at the first prompt that has changed or is missing.
    """
    prompts = read_prompts(path)
    for index in range(fingerprint.num_prompts):
        prompt = next(prompts, None)
        if prompt is None or not fingerprint.has(index, prompt):
            raise CommandError(
                f"{path} changed while it was worked on: prompt {index + 1} is not there as it was. The results that"
                " there are belong to what it was: with that again, this command goes on; for other prompts, give"
                " another --output-path, or --overwrite"
            )
        yield prompt


def _parsers() -> dict[str, Callable[[str], PromptLine]]:
    decoder = msgspec.json.Decoder(PromptLine)
    return {".txt": lambda line: PromptLine(unescape(line)), ".jsonl": lambda line: _checked(decoder.decode(line))}


def _checked(line: PromptLine) -> PromptLine:
    """Return `line`. Raises ValueError unless it has one of prompt and messages, of the right form."""
    if (line.prompt is None) == (line.messages is None):
        raise ValueError("a line has either prompt or messages")
    if line.messages is not None:
        msgspec.convert(line.messages, list[ChatMessage])
    return line
