"""A file of prompts: one a line, as plain text (.txt) or as JSON objects (.jsonl). Blank lines are none."""

import codecs
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gateway.openai_types import ChatMessage
from octavo.batch.escapes import unescape
from octavo.errors import CommandError

SUFFIXES = (".txt", ".jsonl")


class PromptLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A line of a .jsonl file. `id` is whatever its owner calls it: it comes back in the result."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    id: Any = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to generate for: a text to go on with, or messages to answer. `line` counts from 1, blank ones as well."""

    line: int
    asked: PromptLine


class Fingerprint:
    """The identity of a sequence of prompts, which grows with each."""

    def __init__(self) -> None:
        self.num_prompts = 0
        self._hash = hashlib.sha256()

    def add(self, prompt: Prompt) -> None:
        self.num_prompts += 1
        self._hash.update(msgspec.json.encode(prompt.asked) + b"\n")

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Yield the prompts of the file, read as they are asked for. Raises CommandError that names the line."""
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
                    yield Prompt(number, parse(text))
            except UnicodeDecodeError as error:
                raise CommandError(f"{path}, line {number} is not UTF-8 (byte {error.start + 1})") from None
            except (msgspec.DecodeError, ValueError) as error:
                raise CommandError(f"{path}, line {number}: {error}") from None


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
