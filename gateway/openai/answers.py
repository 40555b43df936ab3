"""The part that chat and completions share: a body becomes sampling; events become an answer or a stream."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.gateway.asking.asked import AskedSampling, Truncation
from octavo.gateway.asking.choices import Choices, UsedTokens
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.asking.events import Answer, Event
from octavo.gateway.openai.answer_types import CompletionTokensDetails, PromptTokensDetails, RunningUsage, Usage, encode
from octavo.gateway.openai.chunk_writer import DONE, ChunkWriter
from octavo.gateway.openai.types import CommonRequest, stop_strings, usage_options
from octavo.gateway.parsing.parts import Content, Part
from octavo.gateway.text.delta import Delta
from octavo.gateway.text.tokenizer import Tokenizer

NOTHING = Delta("", [])


def asked_sampling(
    body: CommonRequest,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None = None,
    cuts_max_tokens: bool = False,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
) -> AskedSampling:
    """Return the sampling that a body asks for. The keywords are the fields that differ between the two APIs."""
    return AskedSampling(
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        cuts_max_tokens=cuts_max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        logit_bias=body.logit_bias or {},
        stop=stop_strings(body),
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def truncation(body: CommonRequest) -> Truncation | None:
    """Return what of a prompt that is too long is kept."""
    if body.truncate_prompt_tokens is None:
        return None
    max_tokens = None if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    return Truncation(max_tokens, keeps_end=body.truncation_side != "right")


@dataclass(frozen=True, slots=True)
class Heading:
    """The first fields of an answer, and of each chunk of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Renderer(ABC):
    """Writes the answer to one request, in one piece or in chunks. `prompts` has one entry per choice."""

    chunk_object: str  # the field `object` of a chunk
    divides = False  # the answers have their thinking apart

    def __init__(
        self,
        body: CommonRequest,
        heading: Heading,
        prompts: Sequence[PreparedPrompt],
        tokenizer: Tokenizer,
        *,
        has_logprobs: bool,
        is_long: bool,
    ) -> None:
        """`is_long`: writing the whole answer can take seconds, so a thread does it."""
        self.heading, self.prompts, self.tokenizer = heading, prompts, tokenizer
        self.has_logprobs, self._is_long = has_logprobs, is_long
        self.has_token_ids, self.names_ids = bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)
        self._has_usage, is_continuous = usage_options(body)
        self._running = RunningUsage([len(prompt.token_ids) for prompt in prompts]) if is_continuous else None

    @abstractmethod
    def completed(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole answer."""

    @abstractmethod
    def first(self, event: Event) -> Any | None:
        """Return the chunk's choice that comes before the first text of a choice, or None."""

    def head_of(self, event: Event) -> dict[str, Any]:
        """Return more fields of the chunk that `first` is a part of."""
        return {}

    @abstractmethod
    def text(self, choice: int, text: str) -> Any:
        """Return a choice of a chunk that has only text."""

    @abstractmethod
    def more(self, event: Event, part: Part | None) -> Any:
        """Return a choice of a chunk with one part of `event`, and with the tokens and the finish that `event` has."""

    def shown(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Return the parts that the client wants to see."""
        return parts

    async def whole(self, choices: Choices) -> bytes:
        answers = await choices.collect()
        if self._is_long:
            return await asyncio.to_thread(self._encoded, answers, choices.used_tokens())
        return self._encoded(answers, choices.used_tokens())

    async def chunks(self, choices: Choices) -> AsyncIterator[bytes]:
        writer = ChunkWriter(self._head(), usage=self._has_usage, encode=encode)
        text_writers: dict[int, Callable[[str], bytes]] = {}  # by choice, for the choices that have begun
        is_plain = not self._counts_tokens
        async for event in choices:
            choice, parts = event.choice, event.parts
            if choice not in text_writers:
                text_writers[choice] = writer.text(partial(self.text, choice))
                if first := await self._first(writer, event):
                    yield first
            if is_plain and event.finish_reason is None and len(parts) == 1 and type(part := parts[0]) is Content:
                yield text_writers[choice](part.text)
                continue
            usage = None
            if self._running:
                self._running.add(choice, len(event.delta.token_ids), event.delta.num_cached_tokens)
                usage = self._running.of(choice)
            for chunk in self._chunks(event):
                yield writer.choice(chunk, usage)
        if self._has_usage:
            yield writer.usage(self._usage(choices.used_tokens()))
        yield DONE

    def _chunks(self, event: Event) -> Iterator[Any]:
        """Yield the choices of the chunks for an event: one for each part; the last has the tokens and the finish."""
        *parts, last = self.shown(event.parts) or (None,)
        for part in parts:
            yield self.more(Event(event.choice, (), NOTHING), part)
        if last is not None or event.finish_reason is not None or (self._counts_tokens and event.delta.token_ids):
            yield self.more(event, last)

    @property
    def _counts_tokens(self) -> bool:
        return self.has_logprobs or self.has_token_ids or self._running is not None

    async def _first(self, writer: ChunkWriter, event: Event) -> bytes | None:
        if self._is_long:
            return await asyncio.to_thread(self._encoded_first, writer, event)
        return self._encoded_first(writer, event)

    def _encoded_first(self, writer: ChunkWriter, event: Event) -> bytes | None:
        first = self.first(event)
        return first and writer.choice(first, self._running and self._running.of(event.choice), **self.head_of(event))

    def _encoded(self, answers: Sequence[Answer], used: UsedTokens) -> bytes:
        return encode(self.completed(answers, self._usage(used)))

    def _usage(self, used: UsedTokens) -> Usage:
        details = CompletionTokensDetails(used.reasoning) if self.divides else None
        num_tokens = used.prompt + used.completion
        return Usage(used.prompt, used.completion, num_tokens, PromptTokensDetails(used.cached), details)

    def _head(self) -> dict[str, str | int]:
        heading = self.heading
        return {
            "id": heading.id,
            "object": self.chunk_object,
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.system_fingerprint,
        }
