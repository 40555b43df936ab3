"""Reads prompts from a file: ShareGPT's JSON, or JSON lines of conversations, messages or prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo.bench.serve.requests import Message, Request
from octavo.errors import CommandError

ROLES = {"human": "user", "user": "user", "system": "system", "gpt": "assistant", "assistant": "assistant"}
MAX_NAMED = 5


class Turn(msgspec.Struct, rename={"speaker": "from"}):
    speaker: str
    value: str


class Said(msgspec.Struct):
    role: str
    content: str


class Entry(msgspec.Struct):
    """One of `conversations`, `messages` and `prompt` is what to ask; `max_tokens` may be its own."""

    conversations: list[Turn] | None = None
    messages: list[Said] | None = None
    prompt: str | None = None
    max_tokens: int | None = None


class Dataset(NamedTuple):
    """The requests of a file, in its order, and what is wrong with the entries that gave none."""

    requests: list[Request]
    problems: list[str]


def read_dataset(path: Path, endpoint: str, output_len: int) -> Dataset:
    """Return what `path` asks of `endpoint`; entries without a `max_tokens` of their own get `output_len`.

    A conversation is asked up to the first answer in it. Raises CommandError if the file cannot be read or has no
    usable entry.
    """
    requests, problems = [], []
    for place, raw in _entries(path):
        try:
            requests.append(_request(msgspec.json.decode(raw, type=Entry), endpoint, output_len))
        except (msgspec.DecodeError, ValueError) as error:
            problems.append(f"{place}: {error}")
    if not requests:
        raise CommandError(f"{path} has no prompt that can be asked. {named(problems)}")
    return Dataset(requests, problems)


def named(problems: list[str]) -> str:
    """Return the first of `problems` in one line, and how many there are beyond."""
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    return "; ".join(problems[:MAX_NAMED]) + more


def _entries(path: Path) -> Iterator[tuple[str, bytes | msgspec.Raw]]:
    """Yield each entry, and where it stands."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CommandError(f"--dataset-path {path} cannot be read: {error.strerror}") from None
    if content.lstrip()[:1] == b"[":
        try:
            entries = msgspec.json.decode(content, type=list[msgspec.Raw])
        except msgspec.DecodeError as error:
            raise CommandError(f"--dataset-path {path} is no JSON array: {error}") from None
        yield from ((f"{path}, entry {number}", entry) for number, entry in enumerate(entries, 1))
    else:
        lines = enumerate(content.splitlines(), 1)
        yield from ((f"{path}:{number}", line) for number, line in lines if line.strip())


def _request(entry: Entry, endpoint: str, output_len: int) -> Request:
    messages = tuple(_asked(entry))
    if not messages or messages[-1].role != "user" or not messages[-1].content:
        raise ValueError("there is no user's message to answer")
    if endpoint == "completions" and len(messages) > 1:
        raise ValueError("it has several messages, which /v1/completions cannot be asked: --endpoint chat")
    if entry.max_tokens is not None and entry.max_tokens < 1:
        raise ValueError("its max_tokens is below 1")
    return Request(messages, entry.max_tokens or output_len)


def _asked(entry: Entry) -> Iterator[Message]:
    """Yield the messages before the first answer of a conversation, or before a last answer in `messages`."""
    given = [bool(entry.conversations), bool(entry.messages), entry.prompt is not None]
    if sum(given) != 1:
        raise ValueError("it needs one of conversations, messages and prompt")
    if entry.prompt is not None:
        yield Message("user", entry.prompt)
    for turn in entry.conversations or ():
        if (role := _role(turn.speaker)) == "assistant":
            return
        yield Message(role, turn.value)
    said = entry.messages or []
    for message in said[:-1] if said and _role(said[-1].role) == "assistant" else said:
        yield Message(_role(message.role), message.content)


def _role(name: str) -> str:
    if name not in ROLES:
        raise ValueError(f"{name!r} is not one of {', '.join(ROLES)}")
    return ROLES[name]
