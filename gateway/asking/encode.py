"""Encodes given prompts. Every door needs their tokens."""

from dataclasses import dataclass

from octavo.gateway.asking.asked import (
    AskedPrompt,
    AskedPrompts,
    FieldNames,
    PromptMessages,
    PromptText,
    PromptTokens,
)
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.asking.sampling import check_token_ids
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.chat_template import ChatTemplate, ChatTemplateError, RenderedChat
from octavo.gateway.text.least_tokens import MAX_CHARACTERS_PER_TOKEN
from octavo.gateway.text.steps import Steps
from octavo.gateway.text.tokenizer import TooManyTokens

MAX_TOKENS = 1 << 20  # of a prompt that is only tokenized: as many as a body can list


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    text: str | None  # None: the prompt was given as token ids, or the text is not needed
    token_ids: list[int]


class PromptTooLong(Exception):  # noqa: N818  (a property of the prompt)
    """The prompt has more tokens than are allowed. The exact number is not known."""


def encode(
    given: AskedPrompt, model: ServedModel, names: FieldNames, *, max_tokens: int, keeps_text: bool
) -> Steps[PreparedPrompt]:
    """Return, in steps, the text and the tokens of one prompt.

    Raises RequestError, and PromptTooLong as soon as it is known that there are more than `max_tokens`. The result can
    have more than `max_tokens` too.
    """
    tokenizer = model.files.tokenizer
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
        raise PromptTooLong(f"the prompt has at least {error.at_least} tokens") from None
    return PreparedPrompt(text, token_ids)


def encode_only(asked: AskedPrompts, model: ServedModel) -> Steps[list[PreparedPrompt]]:
    """Return, in steps, prompts that are only tokenized: they may be empty, or longer than the context.

    Raises RequestError at the first prompt that is wrong.
    """
    max_tokens = max(MAX_TOKENS, model.ready.max_model_len)
    prompts = []
    for given in asked.prompts:
        try:
            prompt = yield from encode(given, model, asked.names, max_tokens=max_tokens, keeps_text=asked.keeps_text)
            if len(prompt.token_ids) > max_tokens:
                raise PromptTooLong(f"the prompt has {len(prompt.token_ids)} tokens")
        except PromptTooLong as error:
            message = f"the prompt is too long: at most {max_tokens} tokens are answered, {error}"
            raise RequestError(message, param=asked.names.prompt, code="invalid_value") from None
        prompts.append(prompt)
    return prompts


def _render(template: ChatTemplate, given: PromptMessages, max_tokens: int, names: FieldNames) -> RenderedChat:
    num_characters = sum(len(message["content"] or "") for message in given.messages)
    if num_characters > max_tokens * MAX_CHARACTERS_PER_TOKEN:  # too many tokens in any case
        raise PromptTooLong(f"the prompt has {num_characters} characters, more than that many tokens can have")
    try:
        return template.render(
            given.messages,
            add_generation_prompt=given.add_generation_prompt,
            continue_final_message=given.continue_final_message,
            template_kwargs=given.template_kwargs,
            tools=given.tools,
            reasoning_effort=given.reasoning_effort,
        )
    except ChatTemplateError as error:
        param = "chat_template_kwargs" if given.template_kwargs else names.prompt
        raise RequestError(str(error), param=param, code="invalid_value") from None
