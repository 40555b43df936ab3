"""The served model as `prepare` needs it."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.gateway.text.model_files import ModelFiles
from octavo.protocol.messages import Ready


@dataclass(frozen=True, slots=True)
class ServedModel:
    files: ModelFiles
    ready: Ready
    draw_seed: Callable[[], int]  # 64 random bits
