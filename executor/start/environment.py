"""`python -m octavo.executor.start.environment`: print, as JSON, what this machine computes with.

It works without torch too.
"""

import json

from octavo.executor.machine.cgroups import memory_limits
from octavo.executor.machine.threads import choose_num_threads, cpu_quota

GIB = 1 << 30


def limits() -> dict[str, str]:
    """Return the limits of this process's control groups."""
    least, quota = min(memory_limits(), default=None), cpu_quota()
    num_threads, reason = choose_num_threads()
    return {
        "memory limit": "none" if least is None or least >= 1 << 60 else f"{least / GIB:.1f} GiB",
        "CPU quota": "none" if quota is None else f"{quota:g} CPUs",
        "threads of the model": f"{num_threads} ({reason})",
    }


def devices() -> dict[str, str]:
    """Return what torch and the kernels find. Raises ImportError if they are not installed."""
    from octavo.kernels.choice import available_backends  # before torch

    # isort: split
    import torch

    from octavo.kernels.cpu.products import bfloat16_form

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    described = [f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, {gpu.major}.{gpu.minor}" for gpu in gpus]
    return {
        "torch computes for": f"CUDA {torch.version.cuda}" if torch.version.cuda else _other_platform(torch),
        "GPUs that torch finds": "; ".join(described) or "none",
        "backends": ", ".join(f"{name} (on {device.type})" for name, device in available_backends().items()),
        "bfloat16 on the CPU": bfloat16_form(),
    }


def _other_platform(torch: object) -> str:
    hip = getattr(torch.version, "hip", None)  # type: ignore[attr-defined]
    return f"ROCm {hip}" if hip else "CPUs only"


def main() -> None:
    found = limits()
    try:
        found |= devices()
    except ImportError as error:
        found["backends"] = f"none: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
