"""Models: `load_model` returns what the runner runs."""

from pathlib import Path

import torch

from executor.models.config import ModelConfig, read_model_config
from executor.models.decoder import Decoder
from executor.models.layers import ALONE, TensorParallel
from executor.models.renaming import renamed
from executor.models.rotary import rotary_table
from executor.weights import Checkpoint, DummyWeights, load_weights
from kernels import Backend

__all__ = ["Decoder", "ModelConfig", "TensorParallel", "load_model", "read_model_config"]

CPU = torch.device("cpu")


def load_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    load_format: str = "auto",
    seed: int = 0,
    backend: Backend,
    parallel: TensorParallel = ALONE,
    device: torch.device = CPU,
    progress: bool | None = None,
) -> Decoder:
    """Return the model of a checkpoint directory, its weights in `dtype` on `device`, ready to run.

    Positions reach to `max_model_len`, and so do the rotary frequencies that depend on it. `load_format` "auto" reads
    the directory's safetensors, "dummy" takes random weights of `seed` and reads nothing. `progress` shows a bar on
    stderr (None: if it is a terminal). Raises ValueError if the checkpoint lacks a tensor, has one left over, or cannot
    be read; it names the tensor and the file.
    """
    cos_sin_PR = rotary_table(config.rope, config.rotary_dim, max_model_len).to(device)
    model = Decoder(config, cos_sin_PR, backend, parallel)
    if load_format == "dummy":
        load_weights(model, DummyWeights(seed), dtype, device, tied=model.tied, progress=progress)
    else:
        with Checkpoint(directory) as checkpoint:
            source = renamed(checkpoint, config)
            load_weights(model, source, dtype, device, tied=model.tied, progress=progress)
    return model
