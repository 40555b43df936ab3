"""Models: `load_model` returns what the runner runs."""

from pathlib import Path

import torch

from executor.models.config import ModelConfig, read_model_config
from executor.models.decoder import Decoder
from executor.models.layers import TensorParallel

__all__ = ["Decoder", "ModelConfig", "TensorParallel", "load_model", "read_model_config"]


def load_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    load_format: str = "auto",
    seed: int = 0,
    parallel: TensorParallel = TensorParallel(),
    device: torch.device = torch.device("cpu"),
    progress: bool | None = None,
) -> Decoder:
    """Return the model of a checkpoint directory, its weights in `dtype` on `device`, ready to run.

    `load_format` "auto" reads the directory's safetensors, "dummy" takes random weights of `seed` and reads nothing.
    `progress` shows a bar on stderr (None: only if it is a terminal). Raises ValueError if the checkpoint lacks a
    tensor, has one left over, or cannot be read; it names the tensor and the file.
    """
    raise NotImplementedError
