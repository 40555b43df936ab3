"""`python -m executor.dry_run`: say what serving a model would take, from its config.json alone.

Exit status 0: it fits this machine; 1: it does not, or cannot be served at all.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels  # before torch

# isort: split
import msgspec
import torch

from executor.dtypes import choose_dtype, has_bfloat16
from executor.footprint import Footprint, WeightForm, native_footprints, read_transformers_model, weight_form
from executor.memory import CPU_SHARE, usable_bytes
from executor.models.config import ARCHITECTURES, read_architecture, read_model_config
from executor.startup import choose_max_model_len
from kernels import ChosenBackend
from protocol.config import Config
from protocol.process import start_process

GB = 10**9
DEVICES_GB = (16, 24, 48, 80, 141)
GPU = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be served."""

    architecture: str
    tier: str
    footprints: Mapping[int, Footprint]  # of one rank, by the number of ranks
    form: WeightForm | None
    dtype: torch.dtype  # on a GPU
    max_model_len: int

    @property
    def whole(self) -> Footprint:
        return self.footprints[1]


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine would hold."""

    name: str
    dtype: torch.dtype
    dtype_reason: str
    usable_bytes: int
    room_bytes: int  # for the KV cache, once the weights are there
    room_reason: str


def main() -> int:
    config = start_process("executor.dry_run", "Say what serving a model takes, from its config.json alone.")
    try:
        chosen = kernels.choose_backend(config.attention_backend)
        plan = make_plan(config, chosen)
        machine = this_machine(config, plan, chosen.device)
    except ValueError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    print(report(config, plan, machine))
    return 0 if fits(plan, machine) else 1


def make_plan(config: Config, chosen: ChosenBackend) -> Plan:
    """Read config.json. Raises ValueError if the model cannot be served."""
    directory = Path(config.model)
    raw = _read_config(directory / "config.json")
    if read_architecture(directory) in ARCHITECTURES:
        model = read_model_config(directory)
        footprints = native_footprints(model, chosen.backend)
        max_model_len = choose_max_model_len(config.max_model_len, model)
        architecture, tier, checkpoint_dtype = model.architecture, "native", model.dtype
    else:
        other = read_transformers_model(directory, trust_remote_code=config.trust_remote_code)
        footprints = {1: other.footprint}
        max_model_len = config.max_model_len or other.max_position_embeddings
        architecture, tier, checkpoint_dtype = other.architecture, "transformers' modelling code", other.dtype
    form = weight_form(raw.get("quantization_config"), config.quantization)
    dtype, _ = choose_dtype(config.dtype, checkpoint_dtype, GPU, has_bfloat16=True)
    return Plan(architecture, tier, footprints, form, dtype, max_model_len)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def this_machine(config: Config, plan: Plan, device: torch.device) -> Machine:
    """Return what this machine has for the plan: all that its GPU may use, or what is left of its memory."""
    dtype, reason = choose_dtype(config.dtype, plan.dtype, device, has_bfloat16=has_bfloat16(device))
    weight_bytes = plan.whole.weight_bytes(dtype, plan.form)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        usable = int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization)
        share, share_reason = 1.0, f"{config.gpu_memory_utilization:.0%} of the GPU less the weights"
    else:
        name, usable = "CPU", usable_bytes()
        share, share_reason = CPU_SHARE, f"{CPU_SHARE:.0%} of what the weights leave"
    room_bytes = int(max(0, usable - weight_bytes) * share)
    if config.kv_cache_memory_bytes is not None:
        room_bytes, share_reason = config.kv_cache_memory_bytes, "as set by kv_cache_memory_bytes"
    return Machine(name, dtype, reason, usable, room_bytes, share_reason)


def fits(plan: Plan, machine: Machine) -> bool:
    """Whether this machine holds the weights and the KV cache, and the cache one sequence of max_model_len."""
    weight_bytes = plan.whole.weight_bytes(machine.dtype, plan.form)
    sequence_bytes = plan.whole.kv_bytes(machine.dtype) * plan.max_model_len
    return machine.room_bytes >= sequence_bytes and machine.usable_bytes >= weight_bytes + machine.room_bytes


def ranks_needed(plan: Plan, usable: float) -> int | None:
    """Return the least number of devices, each with `usable` bytes, that hold the weights and one sequence."""
    for world_size, footprint in plan.footprints.items():
        sequence_bytes = footprint.kv_bytes(plan.dtype) * plan.max_model_len
        if footprint.weight_bytes(plan.dtype, plan.form) + sequence_bytes <= usable:
            return world_size
    return None


def report(config: Config, plan: Plan, machine: Machine) -> str:
    """Return all that there is to say, for a person."""
    return "\n\n".join(
        [
            f"{plan.architecture} ({plan.tier}), {_count(plan.whole.num_parameters)} parameters",
            _table(f"On a GPU ({_name(plan.dtype)})", _needs(plan, plan.dtype)),
            _table(
                f"On this machine ({machine.name}, {_name(machine.dtype)}: {machine.dtype_reason})",
                _needs(plan, machine.dtype) | _room(plan, machine),
            ),
            _devices(config, plan),
        ]
    )


def _needs(plan: Plan, dtype: torch.dtype) -> dict[str, str]:
    token_bytes = plan.whole.kv_bytes(dtype)
    form = "" if plan.form is None else f", products in {plan.form.name} ({plan.form.bits:.2f} a weight with scales)"
    return {
        "weights": _bytes(plan.whole.weight_bytes(dtype, plan.form)) + form,
        "KV cache of a token": _bytes(token_bytes),
        f"KV cache of {plan.max_model_len:,} tokens": _bytes(token_bytes * plan.max_model_len),
    }


def _room(plan: Plan, machine: Machine) -> dict[str, str]:
    num_tokens = machine.room_bytes // plan.whole.kv_bytes(machine.dtype)
    num_sequences = num_tokens / plan.max_model_len
    beside = f"{num_tokens:,} tokens, {num_sequences:.1f} sequences of max_model_len"
    return {
        "memory for all": _bytes(machine.usable_bytes),
        "room for KV cache": f"{_bytes(machine.room_bytes)} ({machine.room_reason}): {beside}",
        "fits": "yes" if fits(plan, machine) else "no",
    }


def _devices(config: Config, plan: Plan) -> str:
    utilization = config.gpu_memory_utilization
    needed = {size: ranks_needed(plan, size * GB * utilization) for size in DEVICES_GB}
    most = max(plan.footprints)
    rows = {f"{size} GB": f"more than {most}" if n is None else str(n) for size, n in needed.items()}
    sizes = ", ".join(map(str, plan.footprints))  # tensor_parallel_size
    title = f"Devices needed for weights and one sequence of {plan.max_model_len:,} tokens (max_model_len)"
    return _table(f"{title},\n{utilization:.0%} of each in use; ranks can be {sizes}; 1 GB is 10^9 bytes", rows)


def _table(title: str, rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _bytes(num_bytes: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
