"""Events become a message of the Messages API, in one piece or as a stream."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from octavo.gateway.anthropic.types import (
    AnswerBlock,
    Message,
    MessagesRequest,
    MessageUsage,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
    encode,
)
from octavo.gateway.asking.choices import Choices, UsedTokens
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.asking.events import Answer, Event
from octavo.gateway.openai.answers import Heading
from octavo.gateway.parsing.parts import Content, Part, Reasoning, ToolCall
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.tokenizer import Tokenizer

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageWriter:
    """Writes the answer to one request."""

    def __init__(
        self, body: MessagesRequest, heading: Heading, prompts: Sequence[PreparedPrompt], tokenizer: Tokenizer
    ) -> None:
        self._heading, self._num_prompt_tokens = heading, len(prompts[0].token_ids)
        self._shows_thinking = body.thinking is not None and body.thinking.is_shown

    async def whole(self, choices: Choices) -> bytes:
        [answer] = await choices.collect()
        reason, sequence = _stop(answer.finish_reason, answer.whole.stop_reason)
        message = Message(
            id=self._heading.id,
            model=self._heading.model,
            content=self._blocks(answer),
            usage=_usage(choices.used_tokens()),
            stop_reason=reason,
            stop_sequence=sequence,
        )
        return encode(message)

    def _blocks(self, answer: Answer) -> list[AnswerBlock]:
        blocks: list[AnswerBlock] = []
        if answer.reasoning and self._shows_thinking:
            blocks.append(ThinkingAnswer(answer.reasoning))
        if answer.content:
            blocks.append(TextAnswer(answer.content))
        return blocks + [ToolUseAnswer(call.id, call.name, _input(call.arguments)) for call in answer.tool_calls]

    async def chunks(self, choices: Choices) -> AsyncIterator[bytes]:
        blocks, has_begun, reason, sequence = _Blocks(), False, "end_turn", None
        async for event in choices:
            if not has_begun:
                has_begun = True
                yield self._start(event)
            for part in event.parts:
                if self._shows_thinking or not isinstance(part, Reasoning):
                    for frame in blocks.take(part):
                        yield frame
            if event.finish_reason is not None:
                reason, sequence = _stop(event.finish_reason, event.delta.stop_reason)
        for frame in blocks.end():
            yield frame
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _frame("message_delta", delta=delta, usage=_usage(choices.used_tokens()))
        yield _frame("message_stop")

    def _start(self, event: Event) -> bytes:
        num_cached = event.delta.num_cached_tokens
        usage = MessageUsage(self._num_prompt_tokens - num_cached, 0, num_cached)
        return _frame("message_start", message=Message(self._heading.id, self._heading.model, [], usage))


class _Blocks:
    """The content blocks of a stream: each part goes on with the present block or begins the next one."""

    def __init__(self) -> None:
        self._index = -1
        self._present: tuple[str, int] | None = None  # the kind of the present block, and the number of its call

    def take(self, part: Part) -> Iterator[bytes]:
        match part:
            case Content(text):
                yield from self._open(("text", 0), TextAnswer(""))
                yield self._delta(type="text_delta", text=text)
            case Reasoning(text):
                yield from self._open(("thinking", 0), ThinkingAnswer(""))
                yield self._delta(type="thinking_delta", thinking=text)
            case ToolCall(number, arguments, call_id, name):
                yield from self._open(("tool_use", number), ToolUseAnswer(call_id or "", name or "", {}))
                if arguments:
                    yield self._delta(type="input_json_delta", partial_json=arguments)

    def end(self) -> Iterator[bytes]:
        if self._present is not None:
            yield _frame("content_block_stop", index=self._index)

    def _open(self, kind: tuple[str, int], block: AnswerBlock) -> Iterator[bytes]:
        if self._present != kind:
            yield from self.end()
            self._index, self._present = self._index + 1, kind
            yield _frame("content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return _frame("content_block_delta", index=self._index, delta=delta)


def _frame(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"


def _stop(finish_reason: str | None, stop_reason: str | int | None) -> tuple[str, str | None]:
    """Return why the answer ended, and the stop sequence if it ended there."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return "stop_sequence", stop_reason
    return STOP_REASONS.get(finish_reason or "", "end_turn"), None


def _usage(used: UsedTokens) -> MessageUsage:
    return MessageUsage(used.prompt - used.cached, used.completion, used.cached)


def _input(arguments: str) -> Any:
    """Return the arguments of a call as an object; what a model cut short or wrote wrongly is an empty one."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def error_body(error: RequestError) -> bytes:
    """Return an error in Anthropic's envelope."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return encode({"type": "error", "error": {"type": kind, "message": error.message}})


def error_event(error: RequestError) -> bytes:
    """Return the event with which a stream ends that fails."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
