"""The served model as `prepare` needs it."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.gateway.parsing.formats import Formats, formats_of
from octavo.gateway.text.chat_template import ChatTemplate
from octavo.gateway.text.model_files import ModelFiles
from octavo.protocol.config import Config
from octavo.protocol.messages import Ready


@dataclass(frozen=True, slots=True)
class ServedModel:
    files: ModelFiles
    ready: Ready
    draw_seed: Callable[[], int]  # 64 random bits
    formats: Formats  # how answers are divided


def formats_from(config: Config, template: ChatTemplate) -> Formats:
    """Return how the model thinks and calls tools, by its settings and its chat template."""
    return formats_of(
        config.tool_call_parser, config.reasoning_parser, template.source or "", knows_tools=template.knows_tools
    )
