"""The served model as requests see it."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.gateway.text.model_files import ModelFiles
from octavo.protocol.messages import Ready


@dataclass(frozen=True, slots=True)
class Model:
    files: ModelFiles
    ready: Ready
    draw_seed: Callable[[], int]  # 64 random bits
