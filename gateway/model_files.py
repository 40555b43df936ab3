"""What the model's directory says to a gateway, read once at the start."""

from dataclasses import dataclass, field
from pathlib import Path

from protocol.config import Config


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What generation_config.json says for requests that do not; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFiles:
    directory: Path
    created_s: int  # Unix time, for /v1/models
    eos_token_ids: tuple[int, ...]
    max_position_tokens: int | None
    chat_template: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... as templates see them
    sampling_defaults: SamplingDefaults = SamplingDefaults()


def read_model_files(config: Config) -> ModelFiles:
    """Return what `config.model`, a directory, and `config.generation_config` say.

    Raises ValueError, naming the file, if something needed is missing or malformed.
    """
    raise ValueError(f"{config.model} is not a directory")
