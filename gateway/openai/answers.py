"""The part that chat and completions share: a body becomes sampling; events become an answer or a stream."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.gateway.asking.asked import AskedSampling
from octavo.gateway.asking.choices import Choices, UsedTokens
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.asking.events import Answer, Event, content
from octavo.gateway.openai.chunk_writer import DONE, ChunkWriter
from octavo.gateway.openai.responses import PromptTokensDetails, RunningUsage, Usage, encode
from octavo.gateway.openai.types import CommonRequest, stop_strings, usage_options
from octavo.gateway.text.tokenizer import Tokenizer


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
        self._has_usage, is_continuous = usage_options(body)
        self._running = RunningUsage([len(prompt.token_ids) for prompt in prompts]) if is_continuous else None

    @abstractmethod
    def completed(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole answer."""

    @abstractmethod
    def first(self, event: Event) -> Any | None:
        """Return the chunk's choice that comes before the first text of a choice, or None."""

    @abstractmethod
    def text(self, choice: int, text: str) -> Any:
        """Return a choice of a chunk that has only text."""

    @abstractmethod
    def more(self, event: Event) -> Any:
        """Return a choice of a chunk with everything that `event` has."""

    async def whole(self, choices: Choices) -> bytes:
        answers = await choices.collect()
        if self._is_long:
            return await asyncio.to_thread(self._encoded, answers, choices.used_tokens())
        return self._encoded(answers, choices.used_tokens())

    async def chunks(self, choices: Choices) -> AsyncIterator[bytes]:
        writer = ChunkWriter(self._head(), usage=self._has_usage, encode=encode)
        text_writers: dict[int, Callable[[str], bytes]] = {}  # by choice, for the choices that have begun
        async for event in choices:
            choice, text, delta = event.choice, content(event.parts), event.delta
            if choice not in text_writers:
                text_writers[choice] = writer.text(partial(self.text, choice))
                if first := await self._first(writer, event):
                    yield first
            if self._running and (text or delta.token_ids or delta.finish_reason):
                self._running.add(choice, len(delta.token_ids), delta.num_cached_tokens)
                yield writer.choice(self.more(event), self._running.of(choice))
            elif text and delta.finish_reason is None and not self.has_logprobs:
                yield text_writers[choice](text)
            elif text or delta.token_ids or delta.finish_reason:
                yield writer.choice(self.more(event))
        if self._has_usage:
            yield writer.usage(_usage(choices.used_tokens()))
        yield DONE

    async def _first(self, writer: ChunkWriter, event: Event) -> bytes | None:
        if self._is_long:
            return await asyncio.to_thread(self._encoded_first, writer, event)
        return self._encoded_first(writer, event)

    def _encoded_first(self, writer: ChunkWriter, event: Event) -> bytes | None:
        first = self.first(event)
        return first and writer.choice(first, self._running and self._running.of(event.choice))

    def _encoded(self, answers: Sequence[Answer], used: UsedTokens) -> bytes:
        return encode(self.completed(answers, _usage(used)))

    def _head(self) -> dict[str, str | int]:
        heading = self.heading
        return {
            "id": heading.id,
            "object": self.chunk_object,
            "created": heading.created,
            "model": heading.model,
            "system_fingerprint": heading.system_fingerprint,
        }


def _usage(used: UsedTokens) -> Usage:
    num_tokens = used.prompt + used.completion
    return Usage(used.prompt, used.completion, num_tokens, PromptTokensDetails(used.cached))
