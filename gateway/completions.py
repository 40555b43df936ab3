"""POST /v1/completions."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.body import decode_body, read_body
from gateway.body_limits import Place
from gateway.choices import Choices, generation_requests
from gateway.delta import Delta, TokenLogprob, Whole
from gateway.encodings import Steps
from gateway.engine import GenerationRequest
from gateway.errors import RequestError
from gateway.logprobs import CompletionLogprobsWriter, joined
from gateway.openai_responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    RunningUsage,
    Usage,
    encode,
    system_fingerprint,
)
from gateway.openai_types import (
    MAX_CHOICES,
    CompletionRequest,
    check_common,
    completion_decoder,
    usage_options,
    wanted_tokens,
)
from gateway.sampling import (
    DEFAULT_MAX_TOKENS,
    check_token_ids,
    resolve_max_tokens,
    sampling_params,
    too_many_tokens,
)
from gateway.service import Service, new_response_id, unless_client_leaves
from gateway.sse import DONE, ChunkWriter, EventStream
from gateway.text_cuts import SLICE_CHARACTERS
from gateway.tokenizer import TooManyTokens
from protocol.messages import Ready
from protocol.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str | None  # None: it was given as ids, or nobody will ask for it
    token_ids: list[int]


async def completions(request: Request) -> Response:
    arrived_s = time.perf_counter()
    service: Service = request.state.service
    with service.bodies.place() as place:
        body = decode_body(completion_decoder, await read_body(request, place))
        check_common(body)
        return await unless_client_leaves(request, _answer(service, request.state.tenant, body, place, arrived_s))


async def _answer(service: Service, tenant: str, body: CompletionRequest, place: Place, arrived_s: float) -> Response:
    model, ready, n = service.model_name(body.model), service.ready(), body.n or 1
    response_id = new_response_id("cmpl")
    steps = _prepare(service, body, ready, response_id, tenant)
    prompts, requests = await service.encodings.run(steps, place.num_bytes)
    body.prompt = None  # the tokens stand for it from here on
    place.give_back()
    choices = await Choices.start(service.engine, requests, n=n, metrics=service.metrics, arrived_s=arrived_s)
    by_choice = [prompts[index // n] for index in range(len(requests))]
    renderer = _Renderer(service, body, by_choice, response_id, model, system_fingerprint(ready))
    if body.stream:
        return EventStream(renderer.events(choices), choices.close, service.keep_alive_s)
    try:
        return Response(await renderer.whole(choices), media_type="application/json")
    finally:
        choices.close()


def split_prompts(prompt: Any, n: int = 1) -> list[str | list[int]]:
    """Return the prompts in a string, a list of strings, a list of token ids or a list of such lists.

    Raises RequestError that names the place of what is none of these, or if they make too many choices, n each.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _wrong_prompt("prompt")
    if not prompt:
        raise RequestError("prompt is empty", param="prompt", code="invalid_value")
    if type(prompt[0]) is int:
        return [_integers(prompt, "prompt")]
    if len(prompt) * n > MAX_CHOICES:
        message = f"{len(prompt)} prompts with n {n} make more than {MAX_CHOICES} choices"
        raise RequestError(message, param="n" if n > 1 else "prompt", code="invalid_value")
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind or kind not in (str, list):
            raise _wrong_prompt(f"prompt[{index}]")
    return prompt if kind is str else [_integers(item, f"prompt[{i}]") for i, item in enumerate(prompt)]


def _integers(items: list[Any], path: str) -> list[int]:
    if not items:
        raise RequestError(f"{path} is empty", param=path, code="invalid_value")
    if set(map(type, items)) != {int}:
        index = next(index for index, item in enumerate(items) if type(item) is not int)
        raise _wrong_prompt(f"{path}[{index}]")
    return items


def _wrong_prompt(path: str) -> RequestError:
    message = f"{path}: a prompt is a string, a list of strings, a list of token ids or a list of such lists"
    return RequestError(message, param=path, code="invalid_type")


def _prepare(
    service: Service, body: CompletionRequest, ready: Ready, response_id: str, tenant: str
) -> Steps[tuple[list[Prompt], list[GenerationRequest]]]:
    """Return, in steps, the prompts and what to start for them. Raises RequestError; the first wrong one ends it."""
    prompts, samplings, num_characters = [], [], 0
    for given in split_prompts(body.prompt, body.n or 1):
        prompt = yield from _encode_prompt(service, body, ready, given)
        prompts.append(prompt)
        samplings.append(_sampling(service, body, ready, len(prompt.token_ids)))
        num_characters += len(given)
        if num_characters >= SLICE_CHARACTERS:
            num_characters = 0
            yield
    requests = generation_requests(body, response_id, tenant, [prompt.token_ids for prompt in prompts], samplings)
    return prompts, requests


def _encode_prompt(service: Service, body: CompletionRequest, ready: Ready, prompt: str | list[int]) -> Steps[Prompt]:
    if isinstance(prompt, list):
        check_token_ids(prompt, ready.vocab_size, "prompt")
        return Prompt(None, prompt)
    adds = body.add_special_tokens is not False
    steps = service.files.tokenizer.encode_steps(prompt, add_special_tokens=adds, max_tokens=ready.max_model_len)
    try:
        token_ids = yield from steps
    except TooManyTokens as error:
        raise too_many_tokens(error.at_least, ready.max_model_len, "prompt") from None
    if not token_ids:
        raise RequestError("prompt is empty", param="prompt", code="invalid_value")
    return Prompt(prompt if body.echo else None, token_ids)


def _sampling(service: Service, body: CompletionRequest, ready: Ready, num_prompt_tokens: int) -> Sampling:
    asked, asked_by = wanted_tokens(body)
    if asked == 0 and not body.echo:
        raise RequestError(f"{asked_by} must be at least 1 (0 needs echo)", param=asked_by, code="invalid_value")
    defaults = service.files.sampling_defaults
    max_tokens = resolve_max_tokens(
        asked,
        DEFAULT_MAX_TOKENS if defaults.max_tokens is None else defaults.max_tokens,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=ready.max_model_len,
        asked_by=asked_by,
        prompt_is="prompt",
    )
    return sampling_params(
        body,
        defaults,
        vocab_size=ready.vocab_size,
        eos_token_ids=service.files.eos_token_ids,
        tokenizer=service.files.tokenizer,
        max_tokens=max_tokens,
        max_logprobs=service.files.max_logprobs,
        seed=service.seed(body),  # of each prompt its own, unless the request says one
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.logprobs if body.echo else None,
    )


class _Renderer:
    """Writes the answer to one request, in one piece or in chunks. `prompts` has one entry a choice."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        response_id: str,
        model: str,
        fingerprint: str,
    ) -> None:
        self._tokenizer = service.files.tokenizer
        self._prompts = prompts if body.echo else None
        self._logprobs_wanted = body.logprobs is not None
        self._usage_wanted, continuous = usage_options(body)
        self._running = RunningUsage([len(prompt.token_ids) for prompt in prompts]) if continuous else None
        self._id, self._created, self._model, self._fingerprint = response_id, int(time.time()), model, fingerprint
        self._logprobs_writers = [
            CompletionLogprobsWriter(service.files.tokenizer, skip_special_tokens=body.skip_special_tokens is not False)
            for _ in prompts
        ]

    async def whole(self, choices: Choices) -> bytes:
        collected = await choices.collect()
        if self._logprobs_wanted or self._prompts:  # of a hundred thousand tokens they take seconds
            return await asyncio.to_thread(self._whole, collected, choices.usage())
        return self._whole(collected, choices.usage())

    def _whole(self, collected: list[Whole], usage: Usage) -> bytes:
        wholes = [self._choice(index, whole) for index, whole in enumerate(collected)]
        return encode(Completion(self._id, self._created, self._model, self._fingerprint, wholes, usage))

    def _choice(self, index: int, whole: Whole) -> CompletionChoice:
        echoed = self._echo(index, whole.prompt_logprobs)
        text, logprobs = whole.text, self._logprobs(index, whole.token_ids, whole.logprobs or [])
        if echoed:
            text = echoed.text + text
            logprobs = joined(echoed.logprobs, logprobs) if echoed.logprobs and logprobs else logprobs
        return CompletionChoice(index, text, logprobs, whole.finish_reason, whole.stop_reason)

    async def events(self, choices: Choices) -> AsyncIterator[bytes]:
        head = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }
        writer = ChunkWriter(head, usage=self._usage_wanted, encode=encode)
        text_writers: dict[int, Callable[[str], bytes]] = {}  # of the choices that have begun
        async for index, delta in choices:
            if index not in text_writers:
                text_writers[index] = writer.text(partial(CompletionChoice, index))
                if self._prompts is not None:
                    yield await asyncio.to_thread(self._echo_chunk, writer, index, delta.prompt_logprobs)
            if self._running and (delta.text or delta.token_ids or delta.finish_reason):
                self._running.add(index, len(delta.token_ids), delta.num_cached_tokens)
                yield writer.choice(self._chunk(index, delta), self._running.of(index))
            elif delta.text and delta.finish_reason is None and not self._logprobs_wanted:
                yield text_writers[index](delta.text)
            elif delta.text or delta.token_ids or delta.finish_reason:
                yield writer.choice(self._chunk(index, delta))
        if self._usage_wanted:
            yield writer.usage(choices.usage())
        yield DONE

    def _chunk(self, index: int, delta: Delta) -> CompletionChoice:
        logprobs = self._logprobs(index, delta.token_ids, delta.logprobs or [])
        return CompletionChoice(index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)

    def _echo_chunk(self, writer: ChunkWriter, index: int, prompt_logprobs: list[TokenLogprob | None] | None) -> bytes:
        """Return the chunk that repeats the prompt."""
        return writer.choice(self._echo(index, prompt_logprobs), self._running and self._running.of(index))

    def _echo(self, index: int, prompt_logprobs: list[TokenLogprob | None] | None) -> CompletionChoice | None:
        """Return what repeats the prompt, if it is wanted."""
        if self._prompts is None:
            return None
        prompt = self._prompts[index]
        text = prompt.text
        if text is None:  # as it would have been written: special tokens are a part of a prompt
            text = self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        if not self._logprobs_wanted:
            return CompletionChoice(index, text)
        writer = self._logprobs_writers[index]
        return CompletionChoice(index, text, writer.write_prompt(text, prompt.token_ids, prompt_logprobs or []))

    def _logprobs(
        self, index: int, token_ids: list[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs | None:
        return self._logprobs_writers[index].write(token_ids, logprobs) if self._logprobs_wanted else None
