"""Functions on tensors: attention over a paged KV cache, its companions, linear layers, the sampler's parts.

`Backend` says what there is; `choose_backend` returns the module that has it: `kernels.cpu`, `kernels.triton`, or
`kernels.reference`, which is the same in plain torch, slow and obvious. Import this package before torch (see
`kernels.cpu.jit`).

Promise of `kernels.cpu`: what comes out for a token has the same bits whatever else is in the batch, however its
prompt was cut into chunks, for any block size, block table and number of threads.
"""

from typing import NamedTuple

from kernels import cpu as cpu  # before torch

# isort: split
import importlib
import importlib.util
import os

import torch

from kernels.backend import Backend, PackedLinear
from kernels.groupwise import GroupwiseWeight

__all__ = ["Backend", "ChosenBackend", "GroupwiseWeight", "PackedLinear", "available_backends", "choose_backend"]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LEAST_CAPABILITY = (8, 0)  # of the GPUs that the Triton kernels are compiled for; AMD's call themselves 9 and more


class ChosenBackend(NamedTuple):
    name: str
    backend: Backend
    device: torch.device  # where the model's tensors are to be


def available_backends() -> dict[str, torch.device]:
    """Return the backends that this machine has, the best one first, and the device that each runs on."""
    has_gpu = torch.cuda.is_available()  # ROCm's devices say so as well
    found = {"cpu": CPU, "reference": CUDA if has_gpu else CPU}
    if importlib.util.find_spec("triton") is None:
        return found
    if has_gpu:
        return ({"triton": CUDA} | found) if torch.cuda.get_device_capability() >= LEAST_CAPABILITY else found
    # Triton's interpreter runs kernels on the CPU, for tests: thousands of times slower.
    return found | ({"triton": CPU} if os.environ.get("TRITON_INTERPRET") == "1" else {})


def choose_backend(name: str) -> ChosenBackend:
    """Return the backend that an operator asked for by name; "auto" is the best one.

    Raises ValueError, naming those that this machine has, for any other.
    """
    available = available_backends()
    chosen = next(iter(available)) if name == "auto" else name
    if chosen not in available:
        raise ValueError(
            f"attention_backend {name!r} is not available on this machine; it has: auto, {', '.join(available)}"
        )
    backend: Backend = importlib.import_module(f"kernels.{chosen}")
    return ChosenBackend(chosen, backend, available[chosen])
