"""The dtypes of weights, activations and the KV cache."""

import torch

from octavo.kernels.choice import ChosenBackend

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(requested: str, checkpoint_dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype to run in, and why, for the log.

    `requested` is `Config.dtype`; it is obeyed or refused. "auto" takes the checkpoint's dtype, except that the CPU
    takes float32 for float16. Raises ValueError if float16 is requested on the CPU.
    """
    if requested != "auto":
        if requested == "float16" and device.type == "cpu":
            raise ValueError("float16 is not supported on the CPU: set --dtype to float32, bfloat16 or auto")
        return DTYPES[requested], "as set by dtype"
    name = str(checkpoint_dtype).removeprefix("torch.")
    if device.type == "cpu" and checkpoint_dtype == torch.float16:
        return torch.float32, "the checkpoint's float16 is not supported on the CPU"
    return checkpoint_dtype, f"the checkpoint is {name}"


def kv_dtype_of(requested: str, dtype: torch.dtype) -> torch.dtype:
    """Return the KV cache's dtype for a `Config.kv_cache_dtype`, if activations have `dtype`."""
    return dtype if requested == "auto" else torch.float8_e4m3fn


def choose_kv_dtype(requested: str, dtype: torch.dtype, chosen: ChosenBackend) -> torch.dtype:
    """Return the dtype of the KV cache, as `kv_dtype_of` does.

    Raises ValueError for a dtype that the kernels cannot read.
    """
    kv_dtype = kv_dtype_of(requested, dtype)
    if kv_dtype not in chosen.backend.kv_dtypes(dtype):
        raise ValueError(
            f"kv_cache_dtype {requested} is not supported by the {chosen.name} kernels: set --kv-cache-dtype to auto,"
            " or --attention-backend to triton or reference"
        )
    return kv_dtype
