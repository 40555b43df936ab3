"""`python -m octavo.executor.start.dry_run`: report what serving a model would take, from its config.json alone.

Exit status 0: the model fits this machine; 1: it does not fit, or cannot be served at all.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from octavo.kernels.choice import ChosenBackend, choose_backend  # before torch

# isort: split
import torch

from octavo.executor.dtypes import choose_dtype, choose_kv_dtype, kv_dtype_of
from octavo.executor.machine.memory import usable_bytes
from octavo.executor.models import ModelConfig, TensorParallel, read_model_config
from octavo.executor.models.split import check_size
from octavo.executor.start.decisions import choose_max_model_len
from octavo.executor.start.footprint import (
    Footprint,
    borrowed_footprint,
    choose_forms,
    native_footprint,
    native_footprints,
)
from octavo.executor.start.group import num_local_ranks, own_device
from octavo.executor.start.pool import CPU_SHARE
from octavo.executor.start.settings import FIELDS
from octavo.protocol.config import Config
from octavo.protocol.process import start_process

GB = 10**9
DEVICES_GB = (16, 24, 48, 80, 141)
GPU = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be served."""

    architecture: str
    tier: str
    footprints: Mapping[int, Footprint]  # of one rank, by the number of ranks
    num_ranks: int  # tensor_parallel_size
    form: str  # of quantized weights
    dtype: torch.dtype  # on a GPU
    kv_dtype: torch.dtype  # on a GPU
    checkpoint_dtype: torch.dtype
    max_model_len: int

    @property
    def own(self) -> Footprint:
        """What one of the `num_ranks` ranks holds."""
        return self.footprints[self.num_ranks]


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine offers to one rank."""

    name: str
    dtype: torch.dtype
    dtype_reason: str
    kv_dtype: torch.dtype
    usable_bytes: int
    room_bytes: int  # for the KV cache, after the weights are loaded
    room_reason: str


def main() -> int:
    config, _ = start_process(
        "octavo.executor.start.dry_run", "Say what serving a model takes, from its config.json alone.", FIELDS
    )
    try:
        chosen = choose_backend(config.attention_backend)
        plan = make_plan(config, chosen)
    except ValueError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    machine = look_at_machine(config, plan, chosen)
    try:
        with suppress(BrokenPipeError):  # the reader may have closed the pipe
            print(report(config, plan, machine), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes its buffer at exit
        print(f"octavo: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0 if isinstance(machine, Machine) and fits(plan, machine) else 1


def make_plan(config: Config, chosen: ChosenBackend) -> Plan:
    """Read config.json, or a GGUF file's index. Raises ValueError if the model cannot be served on any machine."""
    directory = Path(config.model)
    model = read_model_config(directory, trust_remote_code=config.trust_remote_code)
    max_model_len = choose_max_model_len(config.max_model_len, model)
    check_size(model, config.tensor_parallel_size)
    forms = choose_forms(directory, model, config)
    if isinstance(model, ModelConfig):
        tier = "native"
        own = native_footprint(model, chosen.backend, TensorParallel(0, config.tensor_parallel_size), forms)
        footprints = native_footprints(model, chosen.backend, forms) | {config.tensor_parallel_size: own}
    else:
        tier, footprints = "transformers' modelling code", {1: borrowed_footprint(model, forms)}
    dtype, _ = choose_dtype(config.dtype, model.dtype, GPU)
    return Plan(
        architecture=model.architecture,
        tier=tier,
        footprints=footprints,
        num_ranks=config.tensor_parallel_size,
        form=forms.description,
        dtype=dtype,
        kv_dtype=kv_dtype_of(config.kv_cache_dtype, dtype),
        checkpoint_dtype=model.dtype,
        max_model_len=max_model_len,
    )


def look_at_machine(config: Config, plan: Plan, chosen: ChosenBackend) -> Machine | str:
    """Return what this machine has for the plan, or the reason why it cannot serve it at any size."""
    try:
        return this_machine(config, plan, chosen)
    except ValueError as error:
        return str(error)


def this_machine(config: Config, plan: Plan, chosen: ChosenBackend) -> Machine:
    """Return what this machine has for the plan: the usable part of its GPU, or the free part of its memory.

    Raises ValueError if its kernels lack a dtype, or if there are fewer GPUs than ranks.
    """
    device = own_device(config, chosen.device)
    dtype, reason = choose_dtype(config.dtype, plan.checkpoint_dtype, device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        usable = int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization)
        share, share_reason = 1.0, f"{config.gpu_memory_utilization:.0%} of the GPU less the weights"
    else:
        name, usable = "CPU", usable_bytes() // num_local_ranks(config)
        share, share_reason = CPU_SHARE, f"{CPU_SHARE:.0%} of what the weights leave"
    room_bytes = int(max(0, usable - plan.own.weight_bytes(dtype)) * share)
    if config.kv_cache_memory_bytes is not None:
        room_bytes, share_reason = config.kv_cache_memory_bytes, "as set by kv_cache_memory_bytes"
    return Machine(
        name=name,
        dtype=dtype,
        dtype_reason=reason,
        kv_dtype=choose_kv_dtype(config.kv_cache_dtype, dtype, chosen),
        usable_bytes=usable,
        room_bytes=room_bytes,
        room_reason=share_reason,
    )


def fits(plan: Plan, machine: Machine) -> bool:
    """Return whether weights and KV cache fit, and the cache has room for one sequence of max_model_len tokens."""
    weight_bytes = plan.own.weight_bytes(machine.dtype)
    sequence_bytes = plan.own.kv_bytes(machine.kv_dtype) * plan.max_model_len
    return machine.room_bytes >= sequence_bytes and machine.usable_bytes >= weight_bytes + machine.room_bytes


def ranks_needed(plan: Plan, usable: float) -> int | None:
    """Return the least number of devices, of `usable` bytes each, that hold the weights and one sequence."""
    for world_size, footprint in plan.footprints.items():
        sequence_bytes = footprint.kv_bytes(plan.kv_dtype) * plan.max_model_len
        if footprint.weight_bytes(plan.dtype) + sequence_bytes <= usable:
            return world_size
    return None


def report(config: Config, plan: Plan, machine: Machine | str) -> str:
    """Return the report for a person; `machine` may be the reason why this machine cannot serve the model."""
    each = f", each of {plan.num_ranks} ranks" if plan.num_ranks > 1 else ""
    return "\n\n".join(
        [
            f"{plan.architecture} ({plan.tier}), {_count(plan.footprints[1].num_parameters)} parameters",
            _table(
                f"On a GPU ({_name(plan.dtype)}{each})", _needs(plan, plan.own.weight_bytes(plan.dtype), plan.kv_dtype)
            ),
            _here(plan, machine, each),
            _devices(config, plan),
        ]
    )


def _here(plan: Plan, machine: Machine | str, each: str) -> str:
    if isinstance(machine, str):
        return _table("On this machine", {"fits": f"no: {machine}"})
    weight_bytes = plan.own.weight_bytes(machine.dtype)
    rows = _needs(plan, weight_bytes, machine.kv_dtype) | _room(plan, machine)
    return _table(f"On this machine ({machine.name}{each}, {_name(machine.dtype)}: {machine.dtype_reason})", rows)


def _needs(plan: Plan, weight_bytes: int, kv_dtype: torch.dtype) -> dict[str, str]:
    token_bytes = plan.own.kv_bytes(kv_dtype)
    form = f", {plan.form} ({plan.own.quantized_bits:.2f} bits each, with scales)" if plan.own.num_quantized else ""
    return {
        "weights": _bytes(weight_bytes) + form,
        "KV cache of a token": _bytes(token_bytes),
        f"KV cache of {plan.max_model_len:,} tokens": _bytes(token_bytes * plan.max_model_len),
    }


def _room(plan: Plan, machine: Machine) -> dict[str, str]:
    num_tokens = machine.room_bytes // plan.own.kv_bytes(machine.kv_dtype)
    num_sequences = num_tokens / plan.max_model_len
    beside = f"{num_tokens:,} tokens, {num_sequences:.1f} sequences of max_model_len"
    return {
        "usable memory": _bytes(machine.usable_bytes),
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
