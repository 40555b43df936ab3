"""From a Config to an executor that is ready for its first step, each phase logged with the time it took."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

import kernels
from executor.dtypes import choose_dtype
from executor.fingerprint import model_fingerprint
from executor.memory import KVShape, PoolSize, allocate_kv_caches, block_bytes, size_pool
from executor.models import LoadedModel, ModelDescription, load_model, read_model_config
from executor.runner import ModelRunner
from executor.server import StepProgress
from executor.threads import choose_num_threads
from kernels import ChosenBackend
from kernels.cpu.warm_up import warm_up as warm_up_kernels
from protocol.config import FIELDS, Config
from protocol.messages import ExecutorReady, SequenceInit, SequenceStep, Step, pack_ids
from protocol.sampling import SamplingParams
from protocol.sockets import new_identity

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
SLOW_COMPILE_S = 0.5  # a kernel that takes longer was not in the user's cache


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


def start_executor(config: Config) -> Executor:
    """Return the executor of a model directory. Raises ValueError, for the operator, if it cannot be had."""
    chosen = kernels.choose_backend(config.attention_backend)
    device = chosen.device
    directory = Path(config.model)
    with phase("configuration"):
        if not config.model:
            raise ValueError("no model: set --model to its directory")
        model_config = read_model_config(directory, trust_remote_code=config.trust_remote_code)
        max_model_len = choose_max_model_len(config.max_model_len, model_config)
        dtype = _choose_dtype(config, model_config, device)
        _choose_threads(config)
        _refuse_impossible(config, model_config, max_model_len, dtype, device)
    with phase("weights"):
        model = load_model(
            directory,
            model_config,
            dtype,
            max_model_len=max_model_len,
            load_format=config.load_format,
            backend=chosen.backend,
            device=device,
        )
        fingerprint = model_fingerprint(
            directory, model_config, dtype, max_model_len=max_model_len, load_format=config.load_format
        )
    _log_weights(model)
    with phase("KV pool"):
        runner = _make_runner(config, model, max_model_len, dtype, chosen)
    if chosen.name == "cpu":
        with phase("kernels"):
            compile_kernels(dtype)
    with phase("warm-up"):
        warm_up(runner, max_model_len)
    progress = StepProgress()
    for layer in model.layers:
        layer.register_forward_hook(progress.count_layer)
    description = ExecutorReady(
        rank=0,
        executor_incarnation=new_identity(),
        num_blocks=runner.num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        model_fingerprint=fingerprint,
    )
    return Executor(runner, description, progress)


def choose_max_model_len(requested: int | None, model_config: ModelDescription) -> int:
    """Return the longest sequence to serve. Raises ValueError if the model is not made for what is requested."""
    longest = model_config.longest_sequence_tokens
    if requested is not None and requested > longest:
        raise ValueError(f"max_model_len ({requested}) is beyond what the model is made for: {longest} tokens")
    return requested or model_config.default_max_model_len


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile the CPU's kernels for `dtype`, or load them from the user's cache, with a bar if it is a terminal."""
    with tqdm(warm_up_kernels(dtype), desc="kernels", unit=" kernels", disable=None, leave=False) as compiled:
        was_said = False
        for name, seconds in compiled:
            compiled.set_postfix_str(name)
            if seconds > SLOW_COMPILE_S and not was_said:
                logger.info("compiling kernels, as a first start does: about half a minute")
                was_said = True


def warm_up(runner: ModelRunner, max_model_len: int) -> None:
    """Run one small prompt and one decode step, so that kernels are compiled and pages touched before any request."""
    prompt = [0] * max(1, min(WARM_UP_TOKENS, max_model_len - 1))
    blocks = pack_ids(range(-(-(len(prompt) + 1) // runner.block_size)))
    sampling = SamplingParams(max_tokens=2, seed=0, temperature=1.0, top_p=0.5, num_logprobs=1)
    init = SequenceInit(sampling, pack_ids(prompt))
    runner.run(Step("", "", 1, [SequenceStep(0, 0, init.prompt_token_ids, (blocks,), True, init)]))
    if len(prompt) < max_model_len:
        runner.run(Step("", "", 2, [SequenceStep(0, len(prompt), b"", (blocks,), True)]))
    runner.reset()


def _choose_dtype(config: Config, model_config: ModelDescription, device: torch.device) -> torch.dtype:
    has_bfloat16 = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    dtype, reason = choose_dtype(config.dtype, model_config.dtype, device, has_bfloat16=has_bfloat16)
    logger.info("%s on %s (%s): %s", dtype, device, torch.backends.cpu.get_cpu_capability(), reason)
    return dtype


def _refuse_impossible(
    config: Config, model_config: ModelDescription, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError, before minutes of loading, for a KV pool that cannot be, whatever the weights take."""
    size_pool(config, block_bytes(model_config.kv_shapes, config.block_size, dtype), max_model_len, device)
    if device.type == "cpu" and config.gpu_memory_utilization != FIELDS["gpu_memory_utilization"].default:
        logger.warning("gpu_memory_utilization has no effect on the CPU: kv_cache_memory_bytes sets the pool's size")


def _choose_threads(config: Config) -> None:
    num_threads, reason = choose_num_threads(config.num_threads)
    kernels.cpu.set_num_threads(num_threads)
    logger.info("%d threads: %s", num_threads, reason)


def _log_weights(model: LoadedModel) -> None:
    num_bytes = sum(held.nbytes for held in (*model.parameters(), *model.products))
    logger.info("%.1f MiB of weights; products: %s", num_bytes / 2**20, model.products[0].form)


def _make_runner(
    config: Config, model: LoadedModel, max_model_len: int, dtype: torch.dtype, chosen: ChosenBackend
) -> ModelRunner:
    device = chosen.device
    shapes: list[KVShape] = model.kv_shapes
    pool = size_pool(config, block_bytes(shapes, config.block_size, dtype), max_model_len, device)
    kv_caches = allocate_kv_caches(shapes, pool.num_blocks, config.block_size, dtype, device)
    _log_pool(pool, config.block_size, max_model_len)
    return ModelRunner(model, kv_caches, chosen.backend, block_size=config.block_size, num_blocks=pool.num_blocks)


def _log_pool(pool: PoolSize, block_size: int, max_model_len: int) -> None:
    logger.info(
        "KV pool of %.1f MiB: %d blocks of %d tokens, room for %.1f sequences of %d tokens",
        pool.total_bytes / 2**20,
        pool.num_blocks,
        block_size,
        pool.num_blocks / -(-max_model_len // block_size),
        max_model_len,
    )
