"""What is to be loaded: which checkpoint, in which form, on which device."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch

from octavo.executor.models.interface import ModelDescription
from octavo.executor.parallel import ALONE, TensorParallel
from octavo.executor.quantization import Quantization, choose_rounding
from octavo.kernels.backend import Backend

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Everything that decides what `load_model` returns.

    Quantized weights keep their form, except that 8-bit floats are widened to `dtype`.
    """

    directory: Path
    config: ModelDescription
    dtype: torch.dtype  # of weights and activations
    _: KW_ONLY
    max_model_len: int  # the model has positions up to here; some rotary frequencies depend on it
    load_format: str = "auto"  # the directory's safetensors or GGUF file; "dummy": random weights, no file is read
    quantization: str = "auto"  # "int8" and "int4" round plain weights; another name is what the checkpoint must be
    seed: int = 0  # of dummy weights
    backend: Backend
    parallel: TensorParallel = ALONE
    device: torch.device = CPU
    progress: bool | None = None  # whether stderr shows a progress bar; None: only if stderr is a terminal

    @property
    def rounded_bits(self) -> int | None:
        """Return to how many bits plain weights are rounded. Raises ValueError as `choose_rounding` does."""
        return rounded_bits(self.load_format, self.quantization, self.config.quantization)


def rounded_bits(load_format: str, quantization: str, found: Quantization | None) -> int | None:
    """Return to how many bits plain weights are rounded, or None.

    Dummy weights of a quantized checkpoint are rounded to the checkpoint's bits; of a GGUF file to 4, which its usual
    types have.
    """
    bits = choose_rounding(quantization, found)
    if bits is not None or load_format != "dummy" or found is None:
        return bits
    return 4 if found.method == "gguf" else found.bits
