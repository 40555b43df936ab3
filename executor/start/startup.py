"""From a Config to an executor that is ready for its first step, each phase logged with the time it took."""

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from octavo.executor.dtypes import choose_dtype, choose_kv_dtype
from octavo.executor.machine.memory import total_bytes
from octavo.executor.machine.threads import choose_num_threads
from octavo.executor.models import (
    LoadedModel,
    ModelConfig,
    ModelDescription,
    compile_model,
    load_model,
    read_model_config,
)
from octavo.executor.models.kv_caches import KVShape, allocate_kv_caches, block_bytes
from octavo.executor.models.split import check_size, num_kv_heads_of_rank
from octavo.executor.parallel import ALONE, TensorParallel
from octavo.executor.start.fingerprint import model_fingerprint
from octavo.executor.start.footprint import borrowed_footprint, choose_forms, native_footprint
from octavo.executor.start.group import check_agreement, join_group, num_local_ranks, own_device
from octavo.executor.start.pool import PoolSize, refuse_too_large, size_pool
from octavo.executor.start.warm_up import capture_graphs, compile_in_turn, largest_step, warm_up
from octavo.executor.step.device import Device, device_of
from octavo.executor.step.progress import StepProgress
from octavo.executor.step.runner import ModelRunner
from octavo.kernels import cpu
from octavo.kernels.backend import Backend
from octavo.kernels.choice import ChosenBackend, choose_backend
from octavo.protocol.config import FIELDS, Config
from octavo.protocol.lifeline import Heart
from octavo.protocol.messages import ExecutorReady
from octavo.protocol.sockets import new_identity

logger = logging.getLogger(__name__)

# What an operator can do something about: a setting, a file, memory.
START_FAILURES = (ValueError, OSError, MemoryError, torch.OutOfMemoryError)


class Executor(NamedTuple):
    """What `serve` needs."""

    runner: ModelRunner
    description: ExecutorReady
    progress: StepProgress


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log how long a phase of the start took."""
    started_s = time.monotonic()
    yield
    logger.info("%s: %.2f s", name, time.monotonic() - started_s)


class Decisions(NamedTuple):
    """What is decided before any weight is read."""

    model_config: ModelDescription
    max_model_len: int
    dtype: torch.dtype  # of weights and activations
    kv_dtype: torch.dtype


def start_executor(config: Config, heart: Heart | None = None) -> Executor:
    """Return the executor of a model directory.

    Raises ValueError, for the operator, if it cannot be had, and GroupLostError if another rank ends meanwhile.
    `heart` is to beat with every layer of a step.
    """
    chosen = choose_backend(config.attention_backend)
    device = own_device(config, chosen.device)
    with phase("configuration"):
        decided = _choose(config, chosen, device)
        parallel = join_group(config, device)
    with phase("weights"):
        model = _load(config, decided, chosen.backend, device, parallel)
        fingerprint = _fingerprint(config, decided)
        has_program = compile_model(model)
    weight_bytes = _weight_bytes(model)
    max_model_len = decided.max_model_len
    with phase("KV pool"):
        check_agreement(parallel, fingerprint, config.block_size)
        runner = make_runner(
            config, model, max_model_len, decided.kv_dtype, chosen.backend, device_of(device), parallel
        )
    compilation = chosen.backend.compilation_for(decided.dtype, model.products, has_program)
    if compilation.calls:
        with phase("kernels"):
            compile_in_turn(compilation, parallel)
    with phase("warm-up"):
        warm_up(runner, max_model_len)
    if chosen.backend.can_be_recorded() and device.type == "cuda" and not config.enforce_eager:
        with phase("CUDA graphs"):
            capture_graphs(runner, config.max_num_seqs, max_model_len)
    progress = StepProgress(heart or Heart())
    model.watch_layers(progress.count_layers)
    description = ExecutorReady(
        executor_incarnation=new_identity(),
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=decided.model_config.vocab_size,
        model_fingerprint=fingerprint,
        device_bytes=_device_bytes(weight_bytes, runner),
        process=f"process {os.getpid()} on {socket.gethostname()}",
    )
    return Executor(runner, description, progress)


def choose_max_model_len(requested: int | None, model_config: ModelDescription) -> int:
    """Return the longest sequence to serve. Raises ValueError if the model is not made for what is requested."""
    longest = model_config.longest_sequence_tokens
    if requested is not None and requested > longest:
        raise ValueError(
            f"max_model_len ({requested}) is beyond what the model is made for: {longest} tokens. Set --max-model-len"
            f" to {longest} or less, or leave it out; what stretches a model (rope_scaling) belongs in its config.json"
        )
    return requested or model_config.default_max_model_len


def _choose(config: Config, chosen: ChosenBackend, device: torch.device) -> Decisions:
    """Read config.json and decide what follows from it; refuse what cannot be before minutes of loading."""
    if not config.model:
        raise ValueError("no model: set --model to its directory")
    model_config = read_model_config(Path(config.model), trust_remote_code=config.trust_remote_code)
    max_model_len = choose_max_model_len(config.max_model_len, model_config)
    dtype, reason = choose_dtype(config.dtype, model_config.dtype, device)
    logger.info("%s on %s (%s): %s", dtype, device, torch.backends.cpu.get_cpu_capability(), reason)
    num_threads, reason = choose_num_threads(config.num_threads, num_sharing=num_local_ranks(config))
    cpu.set_num_threads(num_threads)
    logger.info("%d threads: %s", num_threads, reason)
    decided = Decisions(model_config, max_model_len, dtype, choose_kv_dtype(config.kv_cache_dtype, dtype, chosen))
    if config.rank == 0:  # which says it for all
        _refuse_impossible(config, decided, device)
        _refuse_too_large(config, decided, chosen, device)
        _warn_of_no_effect(config, device)
    return decided


def _refuse_impossible(config: Config, decided: Decisions, device: torch.device) -> None:
    """Raise ValueError for a split of the model that cannot be, and for a KV pool that cannot be, whatever the weights
    take."""
    check_size(decided.model_config, config.tensor_parallel_size)
    shapes = [
        (num_kv_heads_of_rank(num_kv_heads, config.tensor_parallel_size), key_size, value_size)
        for num_kv_heads, key_size, value_size in decided.model_config.kv_shapes
    ]
    _size_pool(config, shapes, decided.max_model_len, decided.kv_dtype, device)


def _refuse_too_large(config: Config, decided: Decisions, chosen: ChosenBackend, device: torch.device) -> None:
    """Raise ValueError for weights that this rank has no memory for."""
    model = decided.model_config
    forms = choose_forms(Path(config.model), model, config)
    if isinstance(model, ModelConfig):
        parallel = TensorParallel(config.rank, config.tensor_parallel_size)
        footprint = native_footprint(model, chosen.backend, parallel, forms)
    else:
        footprint = borrowed_footprint(model, forms)
    refuse_too_large(config, footprint.weight_bytes(decided.dtype), device, num_sharing=num_local_ranks(config))


def _warn_of_no_effect(config: Config, device: torch.device) -> None:
    if device.type == "cpu" and config.gpu_memory_utilization != FIELDS["gpu_memory_utilization"].default:
        logger.warning("gpu_memory_utilization has no effect on the CPU: kv_cache_memory_bytes sets the pool's size")
    if device.type == "cpu" and config.enforce_eager:
        logger.warning("enforce_eager has no effect on the CPU: there are no CUDA graphs")


def _load(
    config: Config, decided: Decisions, backend: Backend, device: torch.device, parallel: TensorParallel
) -> LoadedModel:
    return load_model(
        Path(config.model),
        decided.model_config,
        decided.dtype,
        max_model_len=decided.max_model_len,
        load_format=config.load_format,
        quantization=config.quantization,
        backend=backend,
        parallel=parallel,
        device=device,
        progress=None if config.rank == 0 else False,
    )


def _fingerprint(config: Config, decided: Decisions) -> str:
    return model_fingerprint(
        Path(config.model),
        decided.model_config,
        decided.dtype,
        max_model_len=decided.max_model_len,
        load_format=config.load_format,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
    )


def _weight_bytes(model: LoadedModel) -> int:
    """Return what the weights take, having logged in which forms."""
    held_bytes = Counter({"not packed": sum(parameter.nbytes for parameter in model.parameters())})
    for packed in model.products:
        held_bytes[packed.form] += packed.nbytes
    listed = "; ".join(f"{form}: {num_bytes / 2**20:.1f} MiB" for form, num_bytes in held_bytes.most_common())
    logger.info("%.1f MiB of weights (%s)", held_bytes.total() / 2**20, listed)
    return held_bytes.total()


def _device_bytes(weight_bytes: int, runner: ModelRunner) -> dict[str, int]:
    """Return what is known of the device's memory from the start on, as in messages.ExecutorReady."""
    kv_cache_bytes = sum(cache.nbytes for layer in runner.kv_caches for cache in layer)
    return {
        "weights": weight_bytes,
        "kv_cache": kv_cache_bytes,
        "total": total_bytes(runner.device.torch_device),
    }


def make_runner(
    config: Config,
    model: LoadedModel,
    max_model_len: int,
    kv_dtype: torch.dtype,
    backend: Backend,
    device: Device,
    parallel: TensorParallel = ALONE,
) -> ModelRunner:
    """Return a runner whose KV pool takes what the largest step leaves. Raises ValueError if that is too little."""
    shapes: list[KVShape] = model.kv_shapes

    def runner_of(num_blocks: int) -> ModelRunner:
        kv_caches = allocate_kv_caches(shapes, num_blocks, config.block_size, kv_dtype, device.torch_device)
        sizes = {"block_size": config.block_size, "num_blocks": num_blocks}
        return ModelRunner(model, kv_caches, backend, **sizes, device=device, parallel=parallel)

    activation_bytes = device.peak_bytes(lambda: runner_of(1).run(largest_step(config, max_model_len)))
    pool = _size_pool(config, shapes, max_model_len, kv_dtype, device.torch_device, activation_bytes)
    pool = pool._replace(num_blocks=parallel.least(pool.num_blocks))
    _log_pool(pool, config.block_size, max_model_len)
    return runner_of(pool.num_blocks)


def _size_pool(
    config: Config,
    shapes: list[KVShape],
    max_model_len: int,
    kv_dtype: torch.dtype,
    device: torch.device,
    activation_bytes: int = 0,
) -> PoolSize:
    num_bytes = block_bytes(shapes, config.block_size, kv_dtype)
    return size_pool(
        *(config, num_bytes, max_model_len, device),
        activation_bytes=activation_bytes,
        num_sharing=num_local_ranks(config),
    )


def _log_pool(pool: PoolSize, block_size: int, max_model_len: int) -> None:
    logger.info(
        "KV pool of %.1f MiB: %d blocks of %d tokens, room for %.1f sequences of %d tokens",
        pool.total_bytes / 2**20,
        pool.num_blocks,
        block_size,
        pool.num_blocks / -(-max_model_len // block_size),
        max_model_len,
    )
