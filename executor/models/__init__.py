"""Models: `load_model` returns what the runner runs, of one of two tiers.

The architectures of `executor.models.config` have their own forward pass here. Every other decoder runs through
transformers' modelling code (`executor.models.borrowed`), which is imported only when it is needed.
"""

from functools import partial
from pathlib import Path

from octavo.executor.checkpoints.checkpoint import Checkpoint
from octavo.executor.checkpoints.gguf import GGUFWeights
from octavo.executor.models.compiled import compile_decoder
from octavo.executor.models.config import ARCHITECTURES, ModelConfig, read_architecture, read_native_config
from octavo.executor.models.decoder import Decoder
from octavo.executor.models.interface import LoadedModel, Model, ModelDescription
from octavo.executor.models.plan import LoadPlan
from octavo.executor.models.renaming import renamed
from octavo.executor.models.rotary import rotary_table
from octavo.executor.models.split import check_size
from octavo.executor.models.weights import DummyWeights, agreed_ties, load_weights
from octavo.executor.parallel import TensorParallel

__all__ = [
    "Decoder",
    "LoadPlan",
    "LoadedModel",
    "Model",
    "ModelConfig",
    "ModelDescription",
    "TensorParallel",
    "compile_model",
    "load_model",
    "read_model_config",
]


def read_model_config(directory: Path, *, trust_remote_code: bool = False) -> ModelDescription:
    """Return what is known of a checkpoint directory before its weights are read.

    Python code of the directory runs only with `trust_remote_code`. Raises ValueError, with the reason, for a
    checkpoint that cannot be served.
    """
    architecture = read_architecture(directory)
    if architecture in ARCHITECTURES:
        return read_native_config(directory, architecture)
    from octavo.executor.models.borrowed import is_encoder, read_borrowed_config, read_encoder_config

    if is_encoder(architecture):
        return read_encoder_config(directory, architecture)
    return read_borrowed_config(directory, architecture, trust_remote_code=trust_remote_code)


def load_model(plan: LoadPlan) -> LoadedModel:
    """Return the model of a checkpoint directory, its weights on the device, ready to run.

    Raises ValueError if the checkpoint lacks a tensor, has one left over, or cannot be read; the message names the
    tensor and the file.
    """
    if isinstance(plan.config, ModelConfig):
        return _load_native(plan, plan.config)
    from octavo.executor.models.borrowed import BorrowedConfig, EncoderConfig, load_borrowed, load_encoder

    bits = plan.rounded_bits  # a wrong setting is refused before a size that cannot be
    check_size(plan.config, plan.parallel.world_size)
    if isinstance(plan.config, EncoderConfig):
        return load_encoder(plan, plan.config)
    assert isinstance(plan.config, BorrowedConfig)
    return load_borrowed(plan, plan.config, rounded_bits=bits)


def compile_model(model: LoadedModel) -> bool:
    """Let a program of the backend compute the model's layers, if there is one. Return whether there is one."""
    if not isinstance(model, Decoder):
        return False
    model.compiled = compile_decoder(model)
    return model.compiled is not None


def _load_native(plan: LoadPlan, config: ModelConfig) -> Decoder:
    rounded_bits = plan.rounded_bits
    cos_sin_PR = rotary_table(config.rope, config.rotary_dim, plan.max_model_len).to(plan.device)
    model = Decoder(config, cos_sin_PR, plan.backend, plan.parallel)
    load = partial(load_weights, model, dtype=plan.dtype, device=plan.device, progress=plan.progress)
    if plan.load_format == "dummy":
        load(DummyWeights(plan.seed), tied=model.tied, rounded_bits=rounded_bits)
    elif config.quantization is not None and config.quantization.method == "gguf":
        load(GGUFWeights(plan.directory), tied=model.tied)
    else:
        with Checkpoint(plan.directory, config.quantization) as checkpoint:
            source = renamed(checkpoint, config)
            load(source, tied=agreed_ties(model.tied, source), rounded_bits=rounded_bits)
    return model
