"""One streamed answer, read as cheaply as can be: the client shares its cores with the server that it measures."""

import re
from typing import Any

import msgspec

# A chunk with text. Quotes within text are escaped, so that the name of a field cannot be mistaken.
WITH_TEXT = re.compile(rb'"(?:text|content|reasoning|reasoning_content)":\s?"(?!")')
WITH_USAGE = re.compile(rb'"usage":\s?\{')
DONE = b"[DONE]"
MAX_REASON_CHARACTERS = 200


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """What is read of a chunk that is decoded, as few are."""

    usage: Usage | None = None
    error: Any = None


class Answer:
    """Takes the bytes of a stream of server-sent events as they arrive and keeps when text came, usage and errors."""

    def __init__(self) -> None:
        self.chunk_times_s: list[float] = []  # on the clock of who calls
        self.usage: Usage | None = None
        self.error: str | None = None
        self.is_done = False
        self._rest = b""

    def feed(self, received: bytes, now_s: float) -> None:
        """Read what was received at `now_s`."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip(), now_s)

    def _read(self, payload: bytes, now_s: float) -> None:
        has_text = WITH_TEXT.search(payload) is not None
        if has_text:
            self.chunk_times_s.append(now_s)
        if payload == DONE:
            self.is_done = True
        elif not has_text or WITH_USAGE.search(payload):
            self._decode(payload)

    def _decode(self, payload: bytes) -> None:
        try:
            chunk = msgspec.json.decode(payload, type=Chunk)
        except msgspec.DecodeError:
            self.error = self.error or f"not a chunk of an answer: {shorten(payload.decode(errors='replace'))}"
            return
        self.usage = chunk.usage or self.usage
        if chunk.error is not None:
            self.error = self.error or f"error in the stream: {error_message(chunk.error)}"


def error_message(body: Any) -> str:
    """Return what an error of OpenAI's API, or whatever came in its place, says."""
    if isinstance(body, dict):
        body = body.get("error", body)
    if isinstance(body, dict):
        body = body.get("message", body)
    return shorten(str(body))


def shorten(text: str) -> str:
    return " ".join(text.split())[:MAX_REASON_CHARACTERS]
