"""Talking to a model in a terminal: typed lines go to a server, and its answers appear while they are generated."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from octavo.errors import CommandError
from octavo.protocol.process import CONTROLS, paragraph
from octavo.terminal.api_client import ApiClient, ApiError

TextOf = Callable[[dict[str, Any]], str]  # of a choice

PROMPT = "> "
CLEAR = "/clear"
SHOWN_CONTROLS = {code: mark for code, mark in CONTROLS.items() if chr(code) not in "\n\t"}


@dataclass(slots=True)
class ShownAnswer:
    """The answer to one request, and its times in seconds of a monotonic clock."""

    asked_s: float
    first_s: float | None = None
    last_s: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class Terminal:
    """One person, or a pipe, and one model of a server.

    If a person types, Ctrl-C ends only the present answer. Otherwise Ctrl-C and errors end the program.
    """

    def __init__(
        self, client: ApiClient, model: str, sampling: dict[str, Any], *, stats: bool, interactive: bool
    ) -> None:
        self._client, self._sampling, self._stats = client, {"model": model, **sampling}, stats
        self._interactive = interactive
        self._shown = SHOWN_CONTROLS if sys.stdout.isatty() else {}

    def chat(self, system_prompt: str | None, lines: Iterator[str]) -> None:
        """Answer each of `lines` as the next message of one conversation. Raises ApiError if nobody types."""
        start = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages = list(start)
        for line in lines:
            if line.strip() == CLEAR and self._interactive:
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            answer = self._answer("chat/completions", {"messages": messages}, _chat_text)
            if answer is None or not answer.text:
                messages.pop()  # the conversation goes on without it
            else:
                messages.append({"role": "assistant", "content": answer.text})

    def complete(self, lines: Iterator[str]) -> None:
        """Continue each of `lines` by itself. Raises ApiError if nobody types."""
        for line in lines:
            self._answer("completions", {"prompt": line}, _completion_text)

    def _answer(self, route: str, body: dict[str, Any], text_of: TextOf) -> ShownAnswer | None:
        """Print the answer as it comes and return it, also an incomplete one; None if the server failed."""
        options = {"stream_options": {"include_usage": True}} if self._stats else {}
        answer = ShownAnswer(asked_s=time.monotonic())
        try:
            with closing(self._client.stream(route, {**self._sampling, **body, **options})) as chunks:
                for chunk in chunks:
                    self._take(answer, chunk, text_of)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        except ApiError as error:
            if answer.text:
                self._end_line(answer)
            if not self._interactive:
                raise
            print(f"octavo: {paragraph(error)}", file=sys.stderr)
            return None
        self._end_line(answer)
        self._say_more(answer)
        return answer

    def _take(self, answer: ShownAnswer, chunk: dict[str, Any], text_of: TextOf) -> None:
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk.get("choices") or ():
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if text := text_of(choice):
                answer.last_s = time.monotonic()
                answer.first_s = answer.first_s or answer.last_s
                answer.text += text
                print(text.translate(self._shown), end="", flush=True)

    def _end_line(self, answer: ShownAnswer) -> None:
        if not answer.text.endswith("\n"):
            print(flush=True)

    def _say_more(self, answer: ShownAnswer) -> None:
        if answer.finish_reason == "length" and self._interactive:
            print("[cut: max_tokens or the model's context window is reached]", file=sys.stderr)
        if self._stats and answer.usage and answer.first_s is not None:
            figures = _figures(answer.usage, answer.first_s - answer.asked_s, answer.last_s - answer.first_s)
            print(paragraph(figures), file=sys.stderr)


def typed_lines() -> Iterator[str]:
    """Yield typed lines until Ctrl-D. Ctrl-C discards a line."""
    import readline  # noqa: F401  (gives input() its editing keys)

    while True:
        try:
            line = input(PROMPT)
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if line.strip():
            yield line


def piped_lines() -> Iterator[str]:
    """Yield the lines of standard input that are not blank. Raises CommandError if it is closed or not text."""
    try:
        for raw in sys.stdin.buffer:
            if raw.strip():
                yield raw.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise CommandError(f"standard input cannot be read: {error.strerror}") from None


def _chat_text(choice: dict[str, Any]) -> str:
    return (choice.get("delta") or {}).get("content") or ""


def _completion_text(choice: dict[str, Any]) -> str:
    return choice.get("text") or ""


def _figures(usage: dict[str, Any], first_s: float, rest_s: float) -> str:
    num_tokens = usage.get("completion_tokens") or 0
    speed = f", then {(num_tokens - 1) / rest_s:.1f} tokens/s" if num_tokens > 1 and rest_s > 0 else ""
    return f"[prompt {usage.get('prompt_tokens')} tokens, answer {num_tokens}: the first after {first_s:.2f} s{speed}]"
