"""Turns messages into the text of a prompt, with the model's chat template."""

import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import TemplateSyntaxError

from octavo.gateway.text.tool_messages import (
    HistoryForm,
    as_text,
    described,
    find_history_form,
    knows_tools,
    takes_tool_messages,
)

# Template variables that a request may not set.
RESERVED_NAMES = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversations", "documents", "messages",
        "raise_exception", "return_assistant_tokens_mask", "strftime_now", "tokenize", "tools",
    }
)  # fmt: skip

SWITCHES = ("enable_thinking", "thinking")  # names of the variable that turns thinking on and off
HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # GPT-OSS knows three


class ChatTemplateError(ValueError):
    """The messages cannot be rendered. The message has the template's own words, for the client (400)."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt in which placeholders replace control tokens that the messages contained."""

    text: str
    placeholders: Mapping[str, str]  # placeholder: its control token

    @property
    def shown(self) -> str:
        """The prompt with all control tokens, those of the messages and those of the template alike."""
        return self.with_placeholders(self.text)

    def with_placeholders(self, text: str) -> str:
        """Return `text` with each placeholder replaced by its control token."""
        if not self.placeholders:
            return text
        pattern = re.compile("|".join(map(re.escape, self.placeholders)))  # no placeholder is a part of another
        return pattern.sub(lambda match: self.placeholders[match[0]], text)


class ChatTemplate:
    """Renders conversations with the renderer of transformers, for which templates are written."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        control_tokens: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> None:
        """`source` None: the model has no template, or only templates with `names`; `render` raises an error about it.

        Templates see `special_tokens` (bos_token, ...). Messages cannot forge `control_tokens`. Raises ValueError if
        the template is not valid Jinja.
        """
        self.source = source
        self._special_tokens, self._templates = dict(special_tokens), names
        self._set_names = RESERVED_NAMES | special_tokens.keys()
        self._names = _free_names(source) - self._set_names if source else frozenset()
        self._knows_developer = source is not None and "developer" in source
        self._render = _renderer() if source else None
        self._placeholders = _Placeholders(control_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
    ) -> RenderedChat:
        """Return the prompt of `messages` (content: a string, text parts or None). CPU work: call it in a thread.

        `tools` are definitions as in OpenAI's API; a template that does not know tools gets them in a system message.
        `template_kwargs` are variables that the template reads and the server does not set. `reasoning_effort` counts
        as far as the template has a variable for it. Raises ChatTemplateError.
        """
        if self.source is None or self._render is None:
            if self._templates:
                several = f"this model has chat templates by name ({', '.join(self._templates)}) and none by default"
                raise ChatTemplateError(f"{several}: start the server with --chat-template and one of the names")
            raise ChatTemplateError(
                "this model has no chat template: give it plain text (/v1/completions, LLM.generate)"
            )
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError("add_generation_prompt and continue_final_message exclude each other")
        template_kwargs = self._effort_kwargs(reasoning_effort) | self._known_kwargs(template_kwargs or {})
        shown = [self._plain(message) for message in messages]
        if tools and not self.knows_tools:
            shown, tools = _with_description(shown, described(tools)), None
        plain = self._merged(self._with_calls(shown))
        try:
            hidden, placeholders = self._placeholders.hide((plain, tools, template_kwargs))
        except RecursionError:
            raise ChatTemplateError("what the chat template is given is nested too deeply") from None
        plain, tools, template_kwargs = hidden
        try:
            text = self._rendered(
                plain,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
        except RecursionError:
            raise ChatTemplateError("what the chat template is given is nested too deeply") from None
        except Exception as error:  # a template can raise any exception
            reason = _show(str(error) or type(error).__name__, placeholders)
            raise ChatTemplateError(f"the chat template does not take these messages: {reason}") from None
        return RenderedChat(text, placeholders)

    @cached_property
    def knows_tools(self) -> bool:
        return self.source is not None and knows_tools(self._rendered)

    def _with_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return `messages` with calls and their results in the form that the template takes, or as text."""
        if not any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
            return messages
        form = self._history_form
        if form is None:
            return as_text(messages, keeps_results=self._takes_tool_messages)
        return [
            form.of(message) if message["role"] == "tool" or message.get("tool_calls") else message
            for message in messages
        ]

    @cached_property
    def _history_form(self) -> HistoryForm | None:
        return find_history_form(self._rendered)

    @cached_property
    def _takes_tool_messages(self) -> bool:
        return takes_tool_messages(self._rendered)

    def _effort_kwargs(self, effort: str | None) -> dict[str, Any]:
        """Return the template's variables for how much the model shall think."""
        if effort is None:
            return {}
        kwargs: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in self._names}
        if "reasoning_effort" in self._names and not (kwargs and effort == "none"):
            is_harmony = "<|channel|>" in (self.source or "")
            kwargs["reasoning_effort"] = HARMONY_EFFORTS.get(effort, effort) if is_harmony else effort
        return kwargs

    @cached_property
    def _knows_one_system_message(self) -> bool:
        """Whether the template refuses a second system message, or leaves it out."""
        probe = [{"role": "system", "content": text} for text in ("probe1", "probe2")]
        try:
            text = self._rendered([*probe, {"role": "user", "content": "hi"}])
        except Exception:  # a template can raise any exception
            return True
        return not ("probe1" in text and "probe2" in text)

    def _merged(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return `messages` with developer messages as system messages, of which the template can take the number.

        A template that knows one system message gets one, in front, with the texts of all in order. For other templates
        only the system and developer messages that begin a conversation are joined; later ones keep their places.
        """
        if self._knows_developer:
            return messages
        renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
        system = [message for message in renamed if message["role"] == "system"]
        if len(system) < 2:
            return renamed
        if self._knows_one_system_message:
            return [_joined(system), *(message for message in renamed if message["role"] != "system")]
        leading = list(takewhile(lambda message: message["role"] == "system", renamed))
        if any(message["role"] == "developer" for message in messages[: len(leading)]):
            return [_joined(leading), *renamed[len(leading) :]]
        return renamed

    def _rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        assert self._render is not None
        [text], _ = self._render([messages], chat_template=self.source, **self._special_tokens, **options)
        return text

    def _known_kwargs(self, template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that the template reads. Another variable may be null or false: it asks for nothing."""
        known_kwargs = {}
        for name, value in template_kwargs.items():
            if name in self._names:
                known_kwargs[name] = value
            elif not (value is None or (value is False and name not in self._set_names)):
                known = f"it knows {', '.join(sorted(self._names))}" if self._names else "it knows none"
                raise ChatTemplateError(f"the chat template does not take {name[:100]!r} from a request: {known}")
        return known_kwargs

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return `message` with its content as one string, which every template takes."""
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            content = "".join(_part_text(part) for part in content)
        return {**message, "role": message.get("role"), "content": "" if content is None else content}


def _with_description(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return `messages` with a text at the start of the leading system message."""
    first, *rest = messages
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _joined(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {**messages[0], "content": "\n\n".join(message["content"] for message in messages)}


class _Placeholders:
    """Placeholders for control tokens in users' text, so that they differ from control tokens of the template."""

    def __init__(self, control_tokens: Sequence[str]) -> None:
        nonce = secrets.token_hex(8)
        self._of = {token: f"control{nonce}n{index}e" for index, token in enumerate(control_tokens)}
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def hide(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Return `value` with control tokens replaced in all its strings, and the control token of each placeholder."""
        used: dict[str, str] = {}

        def replace(match: re.Match[str]) -> str:
            placeholder = self._of[match[0]]
            used[placeholder] = match[0]
            return placeholder

        return _map_strings(value, lambda text: self._pattern.sub(replace, text)), used


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    match value:
        case str():
            return change(value)
        case Mapping():
            return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
        case list():
            return [_map_strings(item, change) for item in value]
        case tuple():
            return tuple(_map_strings(item, change) for item in value)
        case _:
            return value


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ChatTemplateError(f"content parts of type {kind!r} are not supported: this model takes text")


def _show(text: str, placeholders: Mapping[str, str]) -> str:
    for placeholder, token in placeholders.items():
        text = text.replace(placeholder, token)
    return text


def _free_names(source: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set. Raises ValueError if it is not valid Jinja."""
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    without_generation_tags = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(without_generation_tags))
    except TemplateSyntaxError as error:
        raise ValueError(f"the model's chat template is not valid: line {error.lineno}: {error.message}") from None
    return frozenset(names - environment.globals.keys())


def _renderer() -> Callable[..., tuple[list[str], list[object]]]:
    """Import transformers' renderer, without its notice about torch; here, because it takes half a second."""
    notices = logging.getLogger("transformers")
    notices.addFilter(_is_not_about_torch)
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    finally:
        notices.removeFilter(_is_not_about_torch)
    render: Callable[..., tuple[list[str], list[object]]] = render_jinja_template
    return render


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")
