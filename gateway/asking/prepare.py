"""From what is asked to what the engine starts: encoded, checked, resolved. The one path of every door."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.gateway.asking.asked import Asked, AskedPrompt, FieldNames, PromptMessages, PromptText, PromptTokens
from octavo.gateway.asking.model import Model
from octavo.gateway.asking.sampling import (
    check_text_length,
    check_token_ids,
    for_choice,
    resolve_sampling,
    too_many_tokens,
)
from octavo.gateway.link.engine import GenerationRequest, Prompt
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.chat_template import ChatTemplate, ChatTemplateError, RenderedChat
from octavo.gateway.text.steps import Steps
from octavo.gateway.text.text_cuts import SLICE_CHARACTERS
from octavo.gateway.text.tokenizer import TooManyTokens
from octavo.protocol.messages import excess_of_prompt_logprobs
from octavo.protocol.sampling import Sampling


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    text: str | None  # None: it was given as ids, or nobody will ask for it
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """`requests` has n choices of the first prompt, then n of the second, and so on."""

    prompts: list[PreparedPrompt]
    requests: list[GenerationRequest]


def prepare(asked: Asked, model: Model, request_id: str, tenant: str = "") -> Steps[Prepared]:
    """Return, in steps, what to start. Raises RequestError; the first prompt that is wrong ends it.

    `request_id` is unique over the life of the process.
    """
    prompts, samplings, num_characters = [], [], 0
    for given in asked.prompts:
        prompt = yield from _encode(given, model, asked.names, keeps_text=asked.keeps_text)
        samplings.append(resolve_sampling(asked.sampling, model, len(prompt.token_ids), asked.names))
        num_characters += len(prompt.token_ids) if prompt.text is None else len(prompt.text)
        prompts.append(prompt if asked.keeps_text else PreparedPrompt(None, prompt.token_ids))
        if num_characters >= SLICE_CHARACTERS:
            num_characters = 0
            yield
    return Prepared(prompts, _requests(asked, prompts, samplings, request_id, tenant))


def _encode(given: AskedPrompt, model: Model, names: FieldNames, *, keeps_text: bool) -> Steps[PreparedPrompt]:
    """Return, in steps, the text and the tokens of one prompt."""
    max_tokens, tokenizer = model.ready.max_model_len, model.files.tokenizer
    text: str | None = None
    try:
        match given:
            case PromptTokens(token_ids, text):
                check_token_ids(token_ids, model.ready.vocab_size, names.prompt)
            case PromptText(text, adds):
                token_ids = yield from tokenizer.encode_steps(text, add_special_tokens=adds, max_tokens=max_tokens)
            case PromptMessages():
                chat = _render(model.files.chat_template, given, max_tokens, names)
                text = chat.shown if keeps_text else None
                yield
                token_ids = yield from tokenizer.encode_chat_steps(chat, max_tokens=max_tokens)
    except TooManyTokens as error:
        raise too_many_tokens(error.at_least, max_tokens, names.prompt) from None
    if not token_ids:
        raise RequestError("the prompt is empty", param=names.prompt, code="invalid_value")
    return PreparedPrompt(text, token_ids)


def _render(template: ChatTemplate, given: PromptMessages, max_model_len: int, names: FieldNames) -> RenderedChat:
    check_text_length(sum(len(message["content"]) for message in given.messages), max_model_len, names.prompt)
    try:
        return template.render(
            given.messages,
            add_generation_prompt=given.add_generation_prompt,
            continue_final_message=given.continue_final_message,
            template_kwargs=given.template_kwargs,
        )
    except ChatTemplateError as error:
        param = "chat_template_kwargs" if given.template_kwargs else names.prompt
        raise RequestError(str(error), param=param, code="invalid_value") from None


def _requests(
    asked: Asked,
    prompts: Sequence[PreparedPrompt],
    samplings: Sequence[Sampling],
    request_id: str,
    tenant: str,
) -> list[GenerationRequest]:
    for prompt, sampling in zip(prompts, samplings, strict=True):
        if excess := excess_of_prompt_logprobs(len(prompt.token_ids), sampling.num_prompt_logprobs):
            raise RequestError(excess, param=asked.names.logprobs, code="invalid_value")
    shared = [Prompt.of(f"{request_id}-{index}", prompt.token_ids) for index, prompt in enumerate(prompts)]
    return [
        GenerationRequest(
            request_id=f"{request_id}-{index * asked.n + choice}",
            prompt=prompt,
            sampling=for_choice(sampling, choice),
            stop=asked.sampling.stop,
            include_stop_str_in_output=asked.sampling.include_stop_str_in_output,
            skip_special_tokens=asked.sampling.skip_special_tokens,
            tenant=tenant,
            cache_salt=asked.cache_salt,
            body_id=request_id,
        )
        for index, (prompt, sampling) in enumerate(zip(shared, samplings, strict=True))
        for choice in range(asked.n)
    ]
