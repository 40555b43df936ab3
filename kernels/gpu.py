"""Whether torch can use a GPU of this machine, and if not, why."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

ROOT = Path("/")
NO_COMPLAINT = ""
NO_GPU = "No CUDA GPUs are available"  # torch's words where the driver works
DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/kfd")  # of NVIDIA's driver, and of AMD's
HIDING_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
HIDES_ALL = ("", "-1", "NoDevFiles")


class Gpu(NamedTuple):
    """What torch says about this machine's GPUs."""

    capability: tuple[int, int] | None  # of a GPU that torch can use
    complaint: str = ""  # torch's words where it can use no GPU
    is_present: bool = False  # there is a driver, and nobody hid its devices
    is_expected: bool = False  # torch was built for a GPU

    @property
    def is_broken(self) -> bool:
        """Whether the machine has a GPU and torch was built for a GPU, but the two do not match."""
        return self.capability is None and self.is_present and self.is_expected and self.complaint != NO_GPU


class Cuda(Protocol):
    """The part of `torch.cuda` (which also stands for ROCm) that is used here."""

    def is_available(self) -> bool: ...
    def init(self) -> None: ...
    def get_device_capability(self) -> tuple[int, int]: ...


def find_gpu(
    cuda: Cuda = torch.cuda,
    root: Path = ROOT,
    environ: Mapping[str, str] = os.environ,
    *,
    is_expected: bool = bool(torch.version.cuda or torch.version.hip),
) -> Gpu:
    """Return what this machine has; the arguments are for tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `complaint` says what torch warns of
        complaint = _complaint(cuda)
        if cuda.is_available() and complaint == NO_COMPLAINT:
            return Gpu(cuda.get_device_capability())
    is_hidden = any(environ.get(name, "0") in HIDES_ALL for name in HIDING_VARIABLES)
    is_present = not is_hidden and any((root / name).exists() for name in DRIVER_FILES)
    return Gpu(None, complaint, is_present, is_expected)


def _complaint(cuda: Cuda) -> str:
    try:
        cuda.init()
    except (RuntimeError, AssertionError, OSError) as error:
        return " ".join(str(error).split()).rstrip(".")
    return NO_COMPLAINT if cuda.is_available() else NO_GPU
