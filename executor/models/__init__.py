"""Models: `load_model` returns what the runner runs, of one of two tiers.

The architectures of `executor.models.config` have their own forward pass here; every other decoder runs through
transformers' modelling code (`executor.models.borrowed`), which is imported only then.
"""

from pathlib import Path

import torch

from executor.models.config import ARCHITECTURES, ModelConfig, read_architecture
from executor.models.config import read_model_config as read_native_config
from executor.models.decoder import Decoder
from executor.models.interface import LoadedModel, ModelDescription
from executor.models.layers import ALONE, TensorParallel
from executor.models.rotary import rotary_table
from executor.weights import Checkpoint, DummyWeights, load_weights
from kernels import Backend

__all__ = [
    "Decoder",
    "LoadedModel",
    "ModelConfig",
    "ModelDescription",
    "TensorParallel",
    "load_model",
    "read_model_config",
]

CPU = torch.device("cpu")


def read_model_config(directory: Path, *, trust_remote_code: bool = False) -> ModelDescription:
    """Return what is to be known of a checkpoint directory before its weights are read.

    Python code of the directory runs only with `trust_remote_code`. Raises ValueError, with the reason, for what cannot
    be served.
    """
    architecture = read_architecture(directory)
    if architecture in ARCHITECTURES:
        return read_native_config(directory)
    from executor.models.borrowed import read_borrowed_config

    return read_borrowed_config(directory, architecture, trust_remote_code=trust_remote_code)


def load_model(
    directory: Path,
    config: ModelDescription,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    load_format: str = "auto",
    seed: int = 0,
    backend: Backend,
    parallel: TensorParallel = ALONE,
    device: torch.device = CPU,
    progress: bool | None = None,
) -> LoadedModel:
    """Return the model of a checkpoint directory, its weights in `dtype` on `device`, ready to run.

    Positions reach to `max_model_len`, and so do the rotary frequencies that depend on it. `load_format` "auto" reads
    the directory's safetensors, "dummy" takes random weights of `seed` and reads nothing. `progress` shows a bar on
    stderr (None: if it is a terminal). Raises ValueError if the checkpoint lacks a tensor, has one left over, or cannot
    be read; it names the tensor and the file.
    """
    if not isinstance(config, ModelConfig):
        from executor.models.borrowed import BorrowedConfig, load_borrowed

        assert isinstance(config, BorrowedConfig)
        _refuse_ranks(config, parallel)
        return load_borrowed(
            directory,
            config,
            dtype,
            max_model_len=max_model_len,
            load_format=load_format,
            seed=seed,
            backend=backend,
            device=device,
            progress=progress,
        )
    cos_sin_PR = rotary_table(config.rope, config.head_dim, max_model_len).to(device)
    model = Decoder(config, cos_sin_PR, backend, parallel)
    if load_format == "dummy":
        load_weights(model, DummyWeights(seed), dtype, device, tied=model.tied, progress=progress)
    else:
        with Checkpoint(directory) as checkpoint:
            load_weights(model, checkpoint, dtype, device, tied=model.tied, progress=progress)
    return model


def _refuse_ranks(config: ModelDescription, parallel: TensorParallel) -> None:
    if parallel.world_size > 1:
        raise ValueError(
            f"tensor_parallel_size {parallel.world_size}: {config.architecture} runs through transformers' modelling"
            f" code, which cannot be split; only these can: {', '.join(ARCHITECTURES)}"
        )
