"""Events become a response of the Responses API, in one piece or as a stream."""

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from octavo.gateway.asking.choices import Choices, UsedTokens
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.openai.answers import Heading
from octavo.gateway.parsing.parts import Content, Part, Reasoning, ToolCall
from octavo.gateway.request_error import RequestError
from octavo.gateway.responses.types import (
    CallOutput,
    IncompleteDetails,
    InputDetails,
    MessageOutput,
    OutputBlock,
    OutputDetails,
    OutputText,
    ReasoningOutput,
    Response,
    ResponsesRequest,
    ResponseUsage,
    ThoughtText,
    encode,
)
from octavo.gateway.text.tokenizer import Tokenizer


class ResponseWriter:
    """Writes the answer to one request."""

    def __init__(
        self, body: ResponsesRequest, heading: Heading, prompts: Sequence[PreparedPrompt], tokenizer: Tokenizer
    ) -> None:
        self._head = Response(
            id=heading.id,
            created_at=heading.created,
            model=heading.model,
            status="in_progress",
            output=[],
            tools=body.tools or [],
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=body.temperature,
            top_p=body.top_p,
            max_output_tokens=body.max_output_tokens,
            text=body.text or {"format": {"type": "text"}},
            reasoning=body.reasoning or {"effort": None, "summary": None},
            truncation=body.truncation or "disabled",
            metadata=body.metadata or {},
        )

    async def whole(self, choices: Choices) -> bytes:
        items, reason = _Items(), None
        async for event in choices:
            for part in event.parts:
                for _ in items.take(part):
                    pass
            reason = event.finish_reason
        for _ in items.end(_status(reason)):
            pass
        return encode(self._ended(items.done, reason, choices.used_tokens()))

    async def chunks(self, choices: Choices) -> AsyncIterator[bytes]:
        """Yield the events. The first ones tell the client that its request was taken."""
        items, reason, number = _Items(), None, _Numbered()
        yield number.frame("response.created", response=self._head)
        yield number.frame("response.in_progress", response=self._head)
        async for event in choices:
            for part in event.parts:
                for kind, fields in items.take(part):
                    yield number.frame(kind, **fields)
            reason = event.finish_reason
        for kind, fields in items.end(_status(reason)):
            yield number.frame(kind, **fields)
        response = self._ended(items.done, reason, choices.used_tokens())
        yield number.frame(f"response.{response.status}", response=response)

    def _ended(self, output: list[OutputBlock], reason: str | None, used: UsedTokens) -> Response:
        return msgspec.structs.replace(
            self._head,
            status=_status(reason),
            output=output,
            usage=ResponseUsage(
                input_tokens=used.prompt,
                input_tokens_details=InputDetails(used.cached),
                output_tokens=used.completion,
                output_tokens_details=OutputDetails(used.reasoning),
                total_tokens=used.prompt + used.completion,
            ),
            incomplete_details=IncompleteDetails("max_output_tokens") if reason == "length" else None,
        )


class _Numbered:
    """Counts the events of one stream."""

    def __init__(self) -> None:
        self._next = 0

    def frame(self, kind: str, **fields: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": self._next, **fields})
        self._next += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


Named = tuple[str, dict[str, Any]]  # the type of an event and its fields


class _Items:
    """The items of an output: each part goes on with the present item or begins the next one."""

    def __init__(self) -> None:
        self.done: list[OutputBlock] = []
        self._present: OutputBlock | None = None
        self._call = -1  # the number of the present call
        self._pieces: list[str] = []

    def take(self, part: Part) -> Iterator[Named]:
        match part:
            case Content(text):
                if not isinstance(self._present, MessageOutput):
                    yield from self._begin(MessageOutput(_new_id("msg"), [], "in_progress"))
                    yield "response.content_part.added", self._place() | {"content_index": 0, "part": OutputText("")}
                yield from self._more("response.output_text.delta", text, content_index=0, logprobs=[])
            case Reasoning(text):
                if not isinstance(self._present, ReasoningOutput):
                    yield from self._begin(ReasoningOutput(_new_id("rs"), [], [], "in_progress"))
                    yield "response.content_part.added", self._place() | {"content_index": 0, "part": ThoughtText("")}
                yield from self._more("response.reasoning_text.delta", text, content_index=0)
            case ToolCall(number, arguments, call_id, name):
                if not isinstance(self._present, CallOutput) or self._call != number:
                    self._call = number
                    new = CallOutput(_new_id("fc"), call_id or "", name or "", "", "in_progress")
                    yield from self._begin(new)
                if arguments:
                    yield from self._more("response.function_call_arguments.delta", arguments)

    def end(self, status: str = "completed") -> Iterator[Named]:
        """End the present item, if there is one."""
        item, text, place = self._present, "".join(self._pieces), self._place()
        self._pieces = []
        if item is None:
            return
        content: OutputText | ThoughtText
        match item:
            case MessageOutput():
                content = OutputText(text)
                item.content = [content]
                yield "response.output_text.done", place | {"content_index": 0, "text": text, "logprobs": []}
                yield "response.content_part.done", place | {"content_index": 0, "part": content}
            case ReasoningOutput():
                content = ThoughtText(text)
                item.content = [content]
                yield "response.reasoning_text.done", place | {"content_index": 0, "text": text}
                yield "response.content_part.done", place | {"content_index": 0, "part": content}
            case CallOutput():
                item.arguments = text
                yield "response.function_call_arguments.done", place | {"arguments": text, "name": item.name}
        item.status = status
        self.done.append(item)
        self._present = None
        yield "response.output_item.done", {"output_index": len(self.done) - 1, "item": item}

    def _begin(self, item: OutputBlock) -> Iterator[Named]:
        yield from self.end()
        self._present = item
        yield "response.output_item.added", {"output_index": len(self.done), "item": item}

    def _more(self, kind: str, text: str, **fields: Any) -> Iterator[Named]:
        self._pieces.append(text)
        yield kind, self._place() | {"delta": text} | fields

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._present.id if self._present else "", "output_index": len(self.done)}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{os.urandom(12).hex()}"


def _status(finish_reason: str | None) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def error_event(error: RequestError) -> bytes:
    """Return the event with which a stream ends that fails."""
    data = {"type": "error", "code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
    return b"event: error\ndata: " + encode(data) + b"\n\n"
