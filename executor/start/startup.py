"""From a Config to an executor that is ready for its first step.

`start_executor` is the list of the start's stages, in their order. Each stage logs how long it took.
"""

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

from octavo.executor.machine.memory import total_bytes
from octavo.executor.models import LoadedModel, LoadPlan, compile_model, load_model
from octavo.executor.models.kv_caches import KVShape, allocate_kv_caches, block_bytes
from octavo.executor.models.pooling import TAKES_LAST, Pooling, read_pooling
from octavo.executor.parallel import ALONE, TensorParallel
from octavo.executor.start.decisions import decide
from octavo.executor.start.fingerprint import model_fingerprint
from octavo.executor.start.group import check_agreement, join_group, num_local_ranks, own_device
from octavo.executor.start.pool import PoolSize, size_pool
from octavo.executor.start.warm_up import capture_graphs, compile_in_turn, largest_step, warm_up
from octavo.executor.step.device import Device, device_of
from octavo.executor.step.grammars import Grammars
from octavo.executor.step.progress import StepProgress
from octavo.executor.step.runner import ModelRunner
from octavo.kernels.backend import Backend
from octavo.kernels.choice import ChosenBackend, choose_backend
from octavo.protocol.config import Config
from octavo.protocol.lifeline import Heart
from octavo.protocol.messages import ExecutorReady
from octavo.protocol.sockets import new_identity

logger = logging.getLogger(__name__)

# Failures that an operator can mend: a setting, a file, memory.
START_FAILURES = (ValueError, OSError, MemoryError, torch.OutOfMemoryError)


class Executor(NamedTuple):
    """What `serve` needs."""

    runner: ModelRunner
    description: ExecutorReady
    progress: StepProgress


class Loaded(NamedTuple):
    """A model on its device."""

    model: LoadedModel
    fingerprint: str
    has_program: bool  # a program of the backend computes its layers
    pooling: Pooling
    weight_bytes: int


def start_executor(config: Config, heart: Heart | None = None) -> Executor:
    """Return the executor of a model directory.

    Raises ValueError, for the operator, if it cannot start, and GroupLostError if another rank ends meanwhile.
    `heart` beats with every layer of a step.
    """
    chosen = choose_backend(config.attention_backend)
    plan, kv_dtype = configure(config, chosen)
    loaded = load(config, plan)
    runner = make_kv_pool(config, plan, loaded, kv_dtype)
    compile_kernels(plan, loaded)
    take_first_steps(runner, plan.max_model_len)
    record_graphs(config, runner, plan.max_model_len)
    progress = watch_progress(loaded.model, heart or Heart())
    return Executor(runner, describe(config, plan, loaded, runner), progress)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Log how long a stage of the start took."""
    started_s = time.monotonic()
    yield
    logger.info("%s: %.2f s", name, time.monotonic() - started_s)


def configure(config: Config, chosen: ChosenBackend) -> tuple[LoadPlan, torch.dtype]:
    """Return what is to be loaded, and the dtype of the KV cache, once all ranks have met."""
    device = own_device(config, chosen.device)
    with stage("configuration"):
        decided = decide(config, chosen, device)
        plan = LoadPlan(
            Path(config.model),
            decided.model_config,
            decided.dtype,
            max_model_len=decided.max_model_len,
            load_format=config.load_format,
            quantization=config.quantization,
            backend=chosen.backend,
            parallel=join_group(config, device),
            device=device,
            progress=None if config.rank == 0 else False,
        )
    return plan, decided.kv_dtype


def load(config: Config, plan: LoadPlan) -> Loaded:
    """Load the weights; compile the model's layers if the backend has a program for them."""
    with stage("weights"):
        model = load_model(plan)
        fingerprint = model_fingerprint(plan, config.kv_cache_dtype)
        has_program = compile_model(model)
        pooling = read_pooling(plan.directory, config.pooling, plan.device)
    return Loaded(
        model=model,
        fingerprint=fingerprint,
        has_program=has_program,
        pooling=pooling,
        weight_bytes=_weight_bytes(model),
    )


def make_kv_pool(config: Config, plan: LoadPlan, loaded: Loaded, kv_dtype: torch.dtype) -> ModelRunner:
    """Return the runner with its KV pool, once all ranks have the same model."""
    with stage("KV pool"):
        check_agreement(plan.parallel, loaded.fingerprint, config.block_size)
        device = device_of(plan.device)
        return make_runner(
            config,
            loaded.model,
            plan.max_model_len,
            kv_dtype,
            plan.backend,
            device,
            plan.parallel,
            loaded.pooling,
        )


def compile_kernels(plan: LoadPlan, loaded: Loaded) -> None:
    """Compile the kernels that the model's steps call, unless the first steps compile them."""
    compilation = plan.backend.compilation_for(plan.dtype, loaded.model.products, loaded.has_program)
    if compilation.calls:
        with stage("kernels"):
            compile_in_turn(compilation, plan.parallel)


def take_first_steps(runner: ModelRunner, max_model_len: int) -> None:
    with stage("warm-up"):
        warm_up(runner, max_model_len)


def record_graphs(config: Config, runner: ModelRunner, max_model_len: int) -> None:
    """Record decode steps as CUDA graphs, if the backend, the device and the settings allow it."""
    is_gpu = runner.device.torch_device.type == "cuda"
    if runner.backend.can_be_recorded() and is_gpu and not config.enforce_eager:
        with stage("CUDA graphs"):
            capture_graphs(runner, config.max_num_seqs, max_model_len)


def watch_progress(model: LoadedModel, heart: Heart) -> StepProgress:
    """Return the progress that each of the model's layers advances from here on."""
    progress = StepProgress(heart)
    model.watch_layers(progress.count_layers)
    return progress


def describe(config: Config, plan: LoadPlan, loaded: Loaded, runner: ModelRunner) -> ExecutorReady:
    """Return how the executor introduces itself to the scheduler."""
    is_encoder = not loaded.model.kv_shapes
    return ExecutorReady(
        executor_incarnation=new_identity(),
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        max_model_len=plan.max_model_len,
        vocab_size=plan.config.vocab_size,
        model_fingerprint=loaded.fingerprint,
        device_bytes={
            "weights": loaded.weight_bytes,
            "kv_cache": sum(cache.nbytes for layer in runner.kv_caches for cache in layer),
            "total": total_bytes(plan.device),
        },
        process=f"process {os.getpid()} on {socket.gethostname()}",
        tasks=("embed",) if is_encoder else ("generate", "embed"),
        embedding_size=loaded.pooling.size(loaded.model.hidden_size),
        embeds_all_tokens=loaded.pooling.needs_all_tokens,
        whole_prompts=is_encoder,
    )


def make_runner(
    config: Config,
    model: LoadedModel,
    max_model_len: int,
    kv_dtype: torch.dtype,
    backend: Backend,
    device: Device,
    parallel: TensorParallel = ALONE,
    pooling: Pooling = TAKES_LAST,
) -> ModelRunner:
    """Return a runner whose KV pool fills the memory that the largest step leaves free.

    Raises ValueError if too little memory is left.
    """
    shapes: list[KVShape] = model.kv_shapes
    grammars = Grammars(Path(config.model), model.vocab_size) if parallel.rank == 0 else None

    def runner_of(num_blocks: int) -> ModelRunner:
        kv_caches = allocate_kv_caches(shapes, num_blocks, config.block_size, kv_dtype, device.torch_device)
        sizes = {"block_size": config.block_size, "num_blocks": num_blocks}
        return ModelRunner(
            model, kv_caches, backend, **sizes, device=device, parallel=parallel, pooling=pooling, grammars=grammars
        )

    pool = size_pool(
        config,
        block_bytes(shapes, config.block_size, kv_dtype),
        max_model_len,
        device.torch_device,
        activation_bytes=device.peak_bytes(
            lambda: runner_of(1).run(largest_step(config, max_model_len, generates=bool(shapes)))
        ),
        num_sharing=num_local_ranks(config),
    )
    pool = pool._replace(num_blocks=parallel.least(pool.num_blocks))
    _log_pool(pool, config.block_size, max_model_len)
    return runner_of(pool.num_blocks)


def _weight_bytes(model: LoadedModel) -> int:
    """Return how much memory the weights take; log in which forms they are held."""
    held_bytes = Counter({"not packed": sum(parameter.nbytes for parameter in model.parameters())})
    for packed in model.products:
        held_bytes[packed.form] += packed.nbytes
    listed = "; ".join(f"{form}: {num_bytes / 2**20:.1f} MiB" for form, num_bytes in held_bytes.most_common())
    logger.info("%.1f MiB of weights (%s)", held_bytes.total() / 2**20, listed)
    return held_bytes.total()


def _log_pool(pool: PoolSize, block_size: int, max_model_len: int) -> None:
    logger.info(
        "KV pool of %.1f MiB: %d blocks of %d tokens, room for %.1f sequences of %d tokens",
        pool.total_bytes / 2**20,
        pool.num_blocks,
        block_size,
        pool.num_blocks / -(-max_model_len // block_size),
        max_model_len,
    )
