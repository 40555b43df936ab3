"""Which kernels compute here: `choose_backend` returns the module that has the functions of `kernels.backend`.

The modules are `kernels.cpu`, `kernels.triton` and `kernels.reference`: the last is plain torch, slow and obvious.
A program imports this module before torch (see `kernels.cpu.jit`).
"""

from typing import NamedTuple

from octavo.kernels import cpu as cpu  # before torch

# isort: split
import importlib
import importlib.util
import os

import torch

from octavo.kernels.backend import Backend
from octavo.kernels.gpu import Gpu, find_gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LEAST_CAPABILITY = (8, 0)  # of GPUs for which Triton kernels are compiled; AMD's GPUs say 9 and more


class ChosenBackend(NamedTuple):
    name: str
    backend: Backend
    device: torch.device  # of the model's tensors


def available_backends(gpu: Gpu | None = None) -> dict[str, torch.device]:
    """Return the backends that this machine has, the best one first, and the device that each runs on."""
    capability = (gpu or find_gpu()).capability
    has_gpu = capability is not None
    found = {"cpu": CPU, "reference": CUDA if has_gpu else CPU}
    if importlib.util.find_spec("triton") is None:
        return found
    if capability is not None:
        return ({"triton": CUDA} | found) if capability >= LEAST_CAPABILITY else found
    # Triton's interpreter runs kernels on the CPU, for tests: thousands of times slower.
    return found | ({"triton": CPU} if os.environ.get("TRITON_INTERPRET") == "1" else {})


def choose_backend(name: str, gpu: Gpu | None = None) -> ChosenBackend:
    """Return the backend that an operator asked for by name; "auto" is the best one.

    `gpu` is what `find_gpu` finds. Raises ValueError for a backend that this machine lacks, and names the others; also
    for "auto" where torch cannot use the machine's GPU: nobody wants to serve on the CPU beside a GPU by mistake.
    """
    gpu = gpu or find_gpu()
    if name == "auto" and gpu.is_broken:
        raise ValueError(
            f"this machine has a GPU, but {_torch()} cannot use it: {gpu.complaint}. Install a driver new enough"
            " for this torch, or a torch that was built for the driver (nvidia-smi shows its CUDA version); with"
            " --attention-backend cpu the GPU is left alone"
        )
    available = available_backends(gpu)
    chosen = next(iter(available)) if name == "auto" else name
    if chosen not in available:
        raise ValueError(
            f"attention_backend {name!r} is not available on this machine{_why_no_triton(name, gpu)}; it has: auto,"
            f" {', '.join(available)}"
        )
    backend: Backend = importlib.import_module(f"octavo.kernels.{chosen}")
    return ChosenBackend(chosen, backend, available[chosen])


def _why_no_triton(name: str, gpu: Gpu) -> str:
    if name != "triton":
        return ""
    if gpu.capability is None:
        return f": it needs a GPU, and {_torch()} can use none ({gpu.complaint})"
    if gpu.capability < LEAST_CAPABILITY:
        least, own = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, gpu.capability))
        return f": it needs a GPU of compute capability {least}, and this one has {own}"
    return ": the Python package triton is missing (pip install triton)"


def _torch() -> str:
    built_for = torch.version.cuda or torch.version.hip
    return f"torch {torch.__version__}" + (f" (built for CUDA {built_for})" if torch.version.cuda else "")
