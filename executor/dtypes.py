"""Which type weights, activations and the KV cache have."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(requested: str, checkpoint_dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype to run in, and why, for the log.

    `requested` is `Config.dtype`: what is asked for is obeyed or refused. "auto" is the checkpoint's dtype, but
    float32 for float16 on the CPU. Raises ValueError for float16 on the CPU.
    """
    if requested != "auto":
        if requested == "float16" and device.type == "cpu":
            raise ValueError("float16 is not supported on the CPU: set --dtype to float32, bfloat16 or auto")
        return DTYPES[requested], "as set by dtype"
    name = str(checkpoint_dtype).removeprefix("torch.")
    if device.type == "cpu" and checkpoint_dtype == torch.float16:
        return torch.float32, "the checkpoint's float16 is not supported on the CPU"
    return checkpoint_dtype, f"the checkpoint is {name}"


def choose_kv_dtype(requested: str, dtype: torch.dtype, backend_name: str) -> torch.dtype:
    """Return the dtype of the KV cache; `requested` is `Config.kv_cache_dtype`, `dtype` that of the activations.

    Raises ValueError for fp8 with kernels that cannot read it.
    """
    if requested == "auto":
        return dtype
    if backend_name == "cpu":
        raise ValueError(
            "kv_cache_dtype fp8 is not supported by the cpu kernels: set --kv-cache-dtype to auto, or"
            " --attention-backend to triton or reference"
        )
    return torch.float8_e4m3fn
