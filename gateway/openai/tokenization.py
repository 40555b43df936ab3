"""Text to tokens and back: the bodies and answers of `/tokenize` and `/detokenize`, with vLLM's field names."""

from typing import Any

import msgspec

from octavo.gateway.asking.asked import AskedPrompts, FieldNames, PromptText, PromptTokens
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.openai.answer_types import encode
from octavo.gateway.openai.chat import check_messages, conversation
from octavo.gateway.openai.neutral import Unsupported, UnsupportedObject, refuse_unsupported
from octavo.gateway.openai.tools import Tools, shown_tools, usable_tools
from octavo.gateway.openai.types import ChatMessage, Messages, ModelRequest
from octavo.gateway.request_error import RequestError, unsupported

OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeRequest(ModelRequest, kw_only=True):
    """A body of `/tokenize`: either a `prompt`, or `messages` with the fields that belong to them."""

    prompt: str | None = None
    add_special_tokens: bool | None = None

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None

    return_token_strs: bool | None = None

    chat_template: Unsupported = None
    mm_processor_kwargs: UnsupportedObject = None
    media_io_kwargs: UnsupportedObject = None

    def forget_prompt(self) -> None:
        if self.messages is None:
            self.prompt = ""
        else:
            self.messages, self.chat_template_kwargs = [ChatMessage(role="assistant")], None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None  # names in the vocabulary; None for an id that it lacks


class DetokenizeRequest(ModelRequest, kw_only=True):
    """A body of `/detokenize`."""

    tokens: list[int]

    def forget_prompt(self) -> None:
        self.tokens = []


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def ask_tokenize(body: TokenizeRequest) -> AskedPrompts:
    """Return the prompt of the body. Raises RequestError for faults that decoding by type cannot find."""
    refuse_unsupported(body)
    if (body.prompt is None) == (body.messages is None):
        code = "missing_required_parameter" if body.prompt is None else "invalid_value"
        raise RequestError("send either prompt or messages", param="prompt", code=code)
    if body.messages is not None:
        return _ask_messages(body, body.messages)
    for name in OF_MESSAGES:
        if getattr(body, name) is not None:
            raise RequestError(f"{name} needs messages", param=name, code="invalid_value")
    return AskedPrompts(prompts=[PromptText(body.prompt or "", body.add_special_tokens is not False)])


def _ask_messages(body: TokenizeRequest, messages: Messages) -> AskedPrompts:
    if body.add_special_tokens:
        raise unsupported("add_special_tokens", "add_special_tokens with messages")
    check_messages(messages, body.add_generation_prompt, body.continue_final_message)
    tools = shown_tools(usable_tools(body.tools, None))
    prompts = (
        conversation(
            each, body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs, tools=tools
        )
        for each in [messages]
    )
    return AskedPrompts(prompts=prompts, names=FieldNames(prompt="messages"))


def write_tokens(body: TokenizeRequest, prompt: PreparedPrompt, model: ServedModel) -> bytes:
    """Return the answer. It can be long: call this in a thread."""
    token_ids = prompt.token_ids
    names = [model.files.tokenizer.token_name(each) for each in token_ids] if body.return_token_strs else None
    return encode(TokenizeAnswer(len(token_ids), model.ready.max_model_len, token_ids, names))


def ask_detokenize(body: DetokenizeRequest) -> AskedPrompts:
    """Return the tokens of the body. Raises RequestError for faults that decoding by type cannot find."""
    refuse_unsupported(body)
    return AskedPrompts(prompts=[PromptTokens(body.tokens)], names=FieldNames(prompt="tokens"))


def write_text(body: DetokenizeRequest, prompt: PreparedPrompt, model: ServedModel) -> bytes:
    """Return the answer, in which special tokens are text too. It can be long: call this in a thread."""
    return encode(DetokenizeAnswer(model.files.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)))
