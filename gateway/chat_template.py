"""Messages to the text of a prompt, by the template that came with the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class ChatTemplateError(ValueError):
    """These messages cannot be rendered: the template's own words, for the client (400)."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt in which control tokens that the messages contained are placeholders, if there were any."""

    text: str
    placeholders: Mapping[str, str]  # placeholder: what it stands for


class ChatTemplate:
    """Renders conversations. `source` None: the model has none and every call raises ChatTemplateError."""

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], control_tokens: Sequence[str] = ()
    ) -> None:
        """`special_tokens` are what templates see (bos_token, ...); `control_tokens` is what users may not forge.

        Raises ValueError if the template is not valid Jinja.
        """

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Return the prompt of `messages` (content: a string, text parts or None). CPU work: call it in a thread.

        Raises ChatTemplateError.
        """
        raise ChatTemplateError("this model has no chat template")
