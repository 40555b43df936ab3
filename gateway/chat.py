"""POST /v1/chat/completions."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from gateway.body import decode_body, read_body
from gateway.body_limits import Place
from gateway.chat_template import ChatTemplate, ChatTemplateError, RenderedChat
from gateway.choices import Choices, generation_requests
from gateway.delta import Whole
from gateway.encodings import Steps
from gateway.engine import Delta, GenerationRequest, TokenLogprob
from gateway.errors import RequestError
from gateway.logprobs import chat_logprobs
from gateway.openai_responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    RunningUsage,
    Usage,
    encode,
    system_fingerprint,
)
from gateway.openai_types import (
    ChatRequest,
    chat_decoder,
    check_common,
    refuse_unsupported,
    usage_options,
    wanted_tokens,
)
from gateway.sampling import check_text_length, resolve_max_tokens, sampling_params, too_many_tokens
from gateway.service import Service, new_response_id, unless_client_leaves
from gateway.sse import DONE, ChunkWriter, EventStream
from gateway.tokenizer import TooManyTokens
from protocol.messages import Ready
from protocol.sampling import Sampling


async def chat_completions(request: Request) -> Response:
    arrived_s = time.perf_counter()
    service: Service = request.state.service
    with service.bodies.place() as place:
        body = decode_body(chat_decoder, await read_body(request, place))
        check_common(body)
        check_chat(body)
        return await unless_client_leaves(request, _answer(service, request.state.tenant, body, place, arrived_s))


def check_chat(body: ChatRequest) -> None:
    """Raise RequestError for what the types alone cannot say about a chat request."""
    for index, message in enumerate(body.messages):
        refuse_unsupported(message, f"messages[{index}].")
        if message.content is None and message.role != "assistant":
            name = f"messages[{index}].content"
            raise RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    if body.add_generation_prompt and body.continue_final_message:
        complaint = "continue_final_message and add_generation_prompt exclude each other"
        raise RequestError(complaint, param="continue_final_message", code="invalid_value")


async def _answer(service: Service, tenant: str, body: ChatRequest, place: Place, arrived_s: float) -> Response:
    model, ready = service.model_name(body.model), service.ready()
    response_id = new_response_id("chatcmpl")
    steps = _prepare(service, body, ready, response_id, tenant)
    requests = await service.encodings.run(steps, place.num_bytes)
    body.messages = []  # the tokens stand for them from here on
    place.give_back()
    choices = await Choices.start(service.engine, requests, n=body.n or 1, metrics=service.metrics, arrived_s=arrived_s)
    renderer = _Renderer(
        service, body, len(requests[0].prompt.token_ids), response_id, model, system_fingerprint(ready)
    )
    if body.stream:
        return EventStream(renderer.events(choices), choices.close, service.keep_alive_s)
    try:
        return Response(await renderer.whole(choices), media_type="application/json")
    finally:
        choices.close()


def _prepare(
    service: Service, body: ChatRequest, ready: Ready, response_id: str, tenant: str
) -> Steps[list[GenerationRequest]]:
    """Return, in steps, what to start. Raises RequestError."""
    chat = render_chat(service.files.chat_template, body, ready.max_model_len)
    yield
    try:
        token_ids = yield from service.files.tokenizer.encode_chat_steps(chat, max_tokens=ready.max_model_len)
    except TooManyTokens as error:
        raise too_many_tokens(error.at_least, ready.max_model_len, "messages") from None
    sampling = _sampling(service, body, ready, len(token_ids))
    return generation_requests(body, response_id, tenant, [token_ids], [sampling])


def render_chat(template: ChatTemplate, body: ChatRequest, max_model_len: int) -> RenderedChat:
    """Return the prompt of the messages. CPU work: call it in a thread. Raises RequestError."""
    messages = [
        {"role": message.role, "content": message.text} | ({"name": message.name} if message.name else {})
        for message in body.messages
    ]
    continues = bool(body.continue_final_message)
    prompts_answer = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    check_text_length(sum(len(message["content"]) for message in messages), max_model_len, "messages")
    try:
        return template.render(
            messages,
            add_generation_prompt=prompts_answer,
            continue_final_message=continues,
            template_kwargs=body.chat_template_kwargs,
        )
    except ChatTemplateError as error:
        param = "chat_template_kwargs" if body.chat_template_kwargs else "messages"
        raise RequestError(str(error), param=param, code="invalid_value") from None


def _sampling(service: Service, body: ChatRequest, ready: Ready, num_prompt_tokens: int) -> Sampling:
    asked, asked_by = wanted_tokens(body)
    if asked == 0:
        raise RequestError(f"{asked_by} must be at least 1", param=asked_by, code="invalid_value")
    defaults = service.files.sampling_defaults
    max_tokens = resolve_max_tokens(
        asked,
        defaults.max_tokens,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=ready.max_model_len,
        asked_by=asked_by,
        prompt_is="messages",
    )
    return sampling_params(
        body,
        defaults,
        vocab_size=ready.vocab_size,
        eos_token_ids=service.files.eos_token_ids,
        tokenizer=service.files.tokenizer,
        max_tokens=max_tokens,
        max_logprobs=service.files.max_logprobs,
        seed=service.seed(body),
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _text_chunk(index: int, text: str) -> ChatChunkChoice:
    return ChatChunkChoice(index, ChatDelta(text))


class _Renderer:
    """Writes the answer to one request, in one piece or in chunks."""

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        num_prompt_tokens: int,
        response_id: str,
        model: str,
        fingerprint: str,
    ) -> None:
        self._tokenizer = service.files.tokenizer
        self._logprobs_wanted = bool(body.logprobs)
        self._usage_wanted, continuous = usage_options(body)
        self._running = RunningUsage([num_prompt_tokens] * (body.n or 1)) if continuous else None
        self._id, self._created, self._model, self._fingerprint = response_id, int(time.time()), model, fingerprint

    async def whole(self, choices: Choices) -> bytes:
        collected = await choices.collect()
        if self._logprobs_wanted:  # of a hundred thousand tokens they take seconds
            return await asyncio.to_thread(self._whole, collected, choices.usage())
        return self._whole(collected, choices.usage())

    def _whole(self, collected: list[Whole], usage: Usage) -> bytes:
        wholes = [self._choice(index, whole) for index, whole in enumerate(collected)]
        return encode(ChatCompletion(self._id, self._created, self._model, self._fingerprint, wholes, usage))

    def _choice(self, index: int, whole: Whole) -> ChatChoice:
        logprobs = self._logprobs(whole.logprobs or [])
        return ChatChoice(index, ChatAnswer(whole.text), logprobs, whole.finish_reason or "", whole.stop_reason)

    async def events(self, choices: Choices) -> AsyncIterator[bytes]:
        writer = ChunkWriter(self._head(), usage=self._usage_wanted, encode=encode)
        text_writers: dict[int, Callable[[str], bytes]] = {}  # of the choices that have begun
        async for index, delta in choices:
            if index not in text_writers:
                text_writers[index] = writer.text(partial(_text_chunk, index))
                begun = self._running and self._running.of(index)
                yield writer.choice(ChatChunkChoice(index, ChatDelta("", "assistant")), begun)
            if self._running:
                self._running.add(index, len(delta.token_ids), delta.num_cached_tokens)
                yield writer.choice(self._chunk(index, delta), self._running.of(index))
            elif delta.finish_reason is None and not self._logprobs_wanted:
                yield text_writers[index](delta.text)
            else:
                yield writer.choice(self._chunk(index, delta))
        if self._usage_wanted:
            yield writer.usage(choices.usage())
        yield DONE

    def _chunk(self, index: int, delta: Delta) -> ChatChunkChoice:
        logprobs = self._logprobs(delta.logprobs or [])
        return ChatChunkChoice(index, ChatDelta(delta.text), logprobs, delta.finish_reason, delta.stop_reason)

    def _logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(logprobs, self._tokenizer) if self._logprobs_wanted else None

    def _head(self) -> dict[str, str | int]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }
