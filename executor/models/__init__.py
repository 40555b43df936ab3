"""Models: `load_model` returns what the runner runs, of one of two tiers.

The architectures of `executor.models.config` have their own forward pass here; every other decoder runs through
transformers' modelling code (`executor.models.borrowed`), which is imported only then.
"""

import functools
from pathlib import Path

import torch

from octavo.executor.checkpoints.checkpoint import Checkpoint
from octavo.executor.checkpoints.gguf import GGUFWeights
from octavo.executor.models.compiled import compile_decoder
from octavo.executor.models.config import ARCHITECTURES, ModelConfig, read_architecture, read_native_config
from octavo.executor.models.decoder import Decoder
from octavo.executor.models.interface import LoadedModel, Model, ModelDescription
from octavo.executor.models.renaming import renamed
from octavo.executor.models.rotary import rotary_table
from octavo.executor.models.split import check_size
from octavo.executor.models.weights import DummyWeights, agreed_ties, load_weights
from octavo.executor.parallel import ALONE, TensorParallel
from octavo.executor.quantization import Quantization, choose_rounding
from octavo.kernels.backend import Backend

__all__ = [
    "Decoder",
    "LoadedModel",
    "Model",
    "ModelConfig",
    "ModelDescription",
    "TensorParallel",
    "compile_model",
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
        return read_native_config(directory, architecture)
    from octavo.executor.models.borrowed import read_borrowed_config

    return read_borrowed_config(directory, architecture, trust_remote_code=trust_remote_code)


def load_model(
    directory: Path,
    config: ModelDescription,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    load_format: str = "auto",
    quantization: str = "auto",
    seed: int = 0,
    backend: Backend,
    parallel: TensorParallel = ALONE,
    device: torch.device = CPU,
    progress: bool | None = None,
) -> LoadedModel:
    """Return the model of a checkpoint directory, its weights in `dtype` on `device`, ready to run.

    Positions reach to `max_model_len`, and so do the rotary frequencies that depend on it. `load_format` "auto" reads
    the directory's safetensors or GGUF file, "dummy" takes random weights of `seed` and reads nothing. Quantized
    weights stay so (fp8 ones excepted); `quantization` "int8" or "int4" rounds plain ones, and another name is what the
    checkpoint has to be. Dummy weights of a quantized checkpoint are rounded to its bits. `progress` shows a bar on
    stderr (None: if it is a terminal). Raises ValueError if the checkpoint lacks a tensor, has one left over, or cannot
    be read; it names the tensor and the file.
    """
    rounded_bits = choose_rounding(quantization, config.quantization)
    if load_format == "dummy":
        rounded_bits = rounded_bits or dummy_bits(config.quantization)
    if not isinstance(config, ModelConfig):
        from octavo.executor.models.borrowed import BorrowedConfig, load_borrowed

        assert isinstance(config, BorrowedConfig)
        check_size(config, parallel.world_size)
        return load_borrowed(
            directory,
            config,
            dtype,
            max_model_len=max_model_len,
            load_format=load_format,
            rounded_bits=rounded_bits,
            seed=seed,
            backend=backend,
            device=device,
            progress=progress,
        )
    cos_sin_PR = rotary_table(config.rope, config.rotary_dim, max_model_len).to(device)
    model = Decoder(config, cos_sin_PR, backend, parallel)
    load = functools.partial(load_weights, model, dtype=dtype, device=device, progress=progress)
    if load_format == "dummy":
        load(DummyWeights(seed), tied=model.tied, rounded_bits=rounded_bits)
    elif config.quantization is not None and config.quantization.method == "gguf":
        load(GGUFWeights(directory), tied=model.tied)
    else:
        with Checkpoint(directory, config.quantization) as checkpoint:
            source = renamed(checkpoint, config)
            load(source, tied=agreed_ties(model.tied, source), rounded_bits=rounded_bits)
    return model


def compile_model(model: LoadedModel) -> bool:
    """Let a program of the backend compute the model's layers, where there is one. Return whether there is."""
    if not isinstance(model, Decoder):
        return False
    model.compiled = compile_decoder(model)
    return model.compiled is not None


def dummy_bits(quantization: Quantization | None) -> int | None:
    """Return the bits that stand for a quantized checkpoint's own: of GGUF's types, those of the usual ones."""
    if quantization is None:
        return None
    return 4 if quantization.method == "gguf" else quantization.bits
