"""Chat completions: a body of `/v1/chat/completions` becomes `Asked`, and events become the answer."""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from octavo.gateway.asking.asked import Asked, FieldNames, PromptMessages
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.asking.events import Answer, Event
from octavo.gateway.openai.answer_types import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatToolCall,
    FunctionDelta,
    ToolCallDelta,
    Usage,
)
from octavo.gateway.openai.answers import Heading, Renderer, asked_sampling, truncation
from octavo.gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from octavo.gateway.openai.neutral import refuse_unsupported
from octavo.gateway.openai.structured import asked_grammar
from octavo.gateway.openai.tools import asked_tools, shown_call, shown_tools, usable_tools
from octavo.gateway.openai.types import ChatMessage, ChatRequest, check_common, wanted_tokens
from octavo.gateway.parsing.parts import Content, Part, Reasoning, ToolCall
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.delta import TokenLogprob
from octavo.gateway.text.tokenizer import Tokenizer

# The one role whose messages may have the field.
OF_ROLES = {
    "tool_calls": "assistant",
    "reasoning": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}


def ask_chat(body: ChatRequest) -> Asked:
    """Return what the body asks for. Raises RequestError for faults that decoding by type cannot find."""
    check_common(body)
    check_chat(body)
    max_tokens, asked_by = wanted_tokens(body)
    if max_tokens == 0:
        raise RequestError(f"{asked_by} must be at least 1", param=asked_by, code="invalid_value")
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = usable_tools(body.tools, body.tool_choice)
    asked_for = asked_tools(tools, body.tool_choice, is_parallel=body.parallel_tool_calls is not False)
    grammar = asked_grammar(body)
    if grammar is not None and asked_for is not None:
        name = grammar.param.partition(".")[0]
        reason = f"{name} and tools exclude each other: set tool_choice to none, or ask for either"
        raise RequestError(reason, param=name, code="unsupported_value")
    return Asked(
        prompts=map(chat_prompt, [body]),
        sampling=asked_sampling(
            body, max_tokens=max_tokens, num_logprobs=num_logprobs, num_prompt_logprobs=body.prompt_logprobs
        ),
        n=body.n or 1,
        names=FieldNames(prompt="messages", max_tokens=asked_by, logprobs="top_logprobs"),
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        truncation=truncation(body),
        divides=True,
        tools=asked_for,
        grammar=grammar,
    )


def check_chat(body: ChatRequest) -> None:
    """Raise RequestError for faults of a chat request that decoding by type cannot find."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
    check_messages(body.messages, body.add_generation_prompt, body.continue_final_message)


def check_messages(
    messages: Sequence[ChatMessage], add_generation_prompt: bool | None, continue_final_message: bool | None
) -> None:
    """Raise RequestError for faults of a conversation that decoding by type cannot find."""
    for index, message in enumerate(messages):
        refuse_unsupported(message, f"messages[{index}].")
        _check_message(message, f"messages[{index}]")
    if add_generation_prompt and continue_final_message:
        complaint = "continue_final_message and add_generation_prompt exclude each other"
        raise RequestError(complaint, param="continue_final_message", code="invalid_value")


def _check_message(message: ChatMessage, path: str) -> None:
    missing = [
        name
        for name, is_needed in (("content", message.role != "assistant"), ("tool_call_id", message.role == "tool"))
        if is_needed and getattr(message, name) is None
    ]
    if missing:
        name = f"{path}.{missing[0]}"
        raise RequestError(f"{name} is required", param=name, code="missing_required_parameter")
    for field, role in OF_ROLES.items():
        if getattr(message, field) and message.role != role:
            name = f"{path}.{field}"
            raise RequestError(f"{name}: only a message of role {role} has it", param=name, code="invalid_value")


def chat_prompt(body: ChatRequest) -> PromptMessages:
    """Return the conversation of a chat request. It can be long: call this in a thread."""
    return conversation(
        body.messages,
        body.add_generation_prompt,
        body.continue_final_message,
        body.chat_template_kwargs,
        tools=shown_tools(usable_tools(body.tools, body.tool_choice)),
        reasoning_effort=body.reasoning_effort,
    )


def conversation(
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: dict[str, Any] | None,
    *,
    tools: Sequence[dict[str, Any]] = (),
    reasoning_effort: str | None = None,
) -> PromptMessages:
    """Return a conversation, with defaults for the fields that are not set."""
    continues = bool(continue_final_message)
    prompts_answer = not continues if add_generation_prompt is None else add_generation_prompt
    shown = [shown_message(message) for message in messages]
    return PromptMessages(shown, prompts_answer, continues, template_kwargs, tools, reasoning_effort)


def shown_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates take it."""
    shown: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name:
        shown["name"] = message.name
    if message.tool_calls:
        shown["tool_calls"] = [shown_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        shown["reasoning_content"] = shown["reasoning"] = reasoning
        if not message.text:  # GPT-OSS takes one of the two
            shown["thinking"] = reasoning
    return shown


def chat_delta(part: Part | None) -> ChatDelta:
    match part:
        case Reasoning(text):
            return ChatDelta(reasoning=text, reasoning_content=text)
        case ToolCall(index, arguments, call_id, name):
            is_first = call_id is not None
            call = ToolCallDelta(index, FunctionDelta(arguments, name), call_id, "function" if is_first else None)
            return ChatDelta(tool_calls=[call])
        case Content(text):
            return ChatDelta(text)
        case None:
            return ChatDelta("")


def echoed_text(body: ChatRequest) -> str:
    """Return the text with which an answer begins: that of the last message, if an assistant's is to be echoed."""
    last = body.messages[-1]
    return last.text if body.echo and last.role == "assistant" else ""


class ChatRenderer(Renderer):
    chunk_object = "chat.completion.chunk"
    divides = True

    def __init__(
        self, body: ChatRequest, heading: Heading, prompts: Sequence[PreparedPrompt], tokenizer: Tokenizer
    ) -> None:
        has_logprobs, self._includes_reasoning = bool(body.logprobs), body.include_reasoning is not False
        is_long = has_logprobs or body.prompt_logprobs is not None
        super().__init__(body, heading, prompts, tokenizer, has_logprobs=has_logprobs, is_long=is_long)
        self._echoed = echoed_text(body)

    def shown(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if self._includes_reasoning:
            return parts
        return tuple(part for part in parts if not isinstance(part, Reasoning))

    def completed(self, answers: Sequence[Answer], usage: Usage) -> ChatCompletion:
        head = self.heading
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        of_prompt = answers[0].whole.prompt_logprobs  # every choice has the same prompt
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage,
            prompt_logprobs=UNSET if of_prompt is None else prompt_logprobs(of_prompt, self.tokenizer),
            prompt_token_ids=self.prompts[0].token_ids if self.has_token_ids else UNSET,
        )

    def first(self, event: Event) -> ChatChunkChoice:
        return ChatChunkChoice(event.choice, ChatDelta(self._echoed, "assistant"))

    def head_of(self, event: Event) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[event.choice].token_ids} if self.has_token_ids else {}

    def text(self, choice: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(choice, ChatDelta(text))

    def more(self, event: Event, part: Part | None) -> ChatChunkChoice:
        delta = event.delta
        return ChatChunkChoice(
            index=event.choice,
            delta=chat_delta(part),
            logprobs=None if delta.logprobs is None else self._logprobs(delta.logprobs),
            finish_reason=event.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self.has_token_ids else UNSET,
        )

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        whole = answer.whole
        return ChatChoice(
            index=index,
            message=self._message(answer),
            logprobs=self._logprobs(whole.logprobs or []),
            finish_reason=answer.finish_reason or "",
            stop_reason=whole.stop_reason,
            token_ids=whole.token_ids if self.has_token_ids else UNSET,
        )

    def _message(self, answer: Answer) -> ChatAnswer:
        content, calls, reasoning = answer.content, answer.tool_calls, answer.reasoning
        content = self._echoed + content
        message = ChatAnswer(content or None if calls else content)
        if calls:
            message.tool_calls = [ChatToolCall(each.id, CalledFunction(each.name, each.arguments)) for each in calls]
        if reasoning and self._includes_reasoning:
            message.reasoning = message.reasoning_content = reasoning
        return message

    def _logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs | None:
        return chat_logprobs(logprobs, self.tokenizer, names_ids=self.names_ids) if self.has_logprobs else None
