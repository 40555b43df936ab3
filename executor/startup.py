"""From a Config to an executor that is ready for its first step, each phase logged with the time it took."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

import kernels
from executor.device import Device, device_of
from executor.dtypes import choose_dtype, choose_kv_dtype, has_bfloat16
from executor.fingerprint import model_fingerprint
from executor.graphs import DecodeGraphs, batch_sizes, table_widths
from executor.group import check_agreement, join_group, num_local_ranks, own_device
from executor.inputs import StepInputs
from executor.memory import KVShape, PoolSize, allocate_kv_caches, block_bytes, size_pool
from executor.models import LoadedModel, ModelDescription, TensorParallel, load_model, read_model_config
from executor.models.layers import ALONE
from executor.models.split import check_size, num_kv_heads_of_rank
from executor.runner import ModelRunner
from executor.server import StepProgress
from executor.threads import choose_num_threads
from kernels import Backend
from kernels.cpu import PackedGroupwise
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
    device = own_device(config, chosen.device)
    directory = Path(config.model)
    with phase("configuration"):
        if not config.model:
            raise ValueError("no model: set --model to its directory")
        model_config = read_model_config(directory, trust_remote_code=config.trust_remote_code)
        max_model_len = choose_max_model_len(config.max_model_len, model_config)
        dtype = _choose_dtype(config, model_config, device)
        _choose_threads(config)
        kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype, chosen.name)
        if config.rank == 0:  # which says it for all
            _refuse_impossible(config, model_config, max_model_len, kv_dtype, device)
        parallel = join_group(config, device)
    with phase("weights"):
        model = load_model(
            directory,
            model_config,
            dtype,
            max_model_len=max_model_len,
            load_format=config.load_format,
            quantization=config.quantization,
            backend=chosen.backend,
            parallel=parallel,
            device=device,
            progress=None if config.rank == 0 else False,
        )
        fingerprint = model_fingerprint(
            directory,
            model_config,
            dtype,
            max_model_len=max_model_len,
            load_format=config.load_format,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
        )
    _log_weights(model)
    with phase("KV pool"):
        check_agreement(parallel, fingerprint, config.block_size)
        runner = make_runner(config, model, max_model_len, kv_dtype, chosen.backend, device_of(device), parallel)
    if chosen.name == "cpu":
        with phase("kernels"):
            _compile_in_turn(dtype, _has_groupwise(model), parallel)
    with phase("warm-up"):
        warm_up(runner, max_model_len)
    if chosen.name == "triton" and device.type == "cuda" and not config.enforce_eager:
        with phase("CUDA graphs"):
            capture_graphs(runner, config.max_num_seqs, max_model_len)
    progress = StepProgress()
    for layer in model.layers:
        layer.register_forward_hook(progress.count_layer)
    description = ExecutorReady(
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


def compile_kernels(dtype: torch.dtype, has_groupwise: bool) -> None:
    """Compile the CPU's kernels for `dtype`, or load them from the user's cache, with a bar if it is a terminal."""
    with tqdm(
        warm_up_kernels(dtype, has_groupwise), desc="kernels", unit=" kernels", disable=None, leave=False
    ) as compiled:
        was_said = False
        for name, seconds in compiled:
            compiled.set_postfix_str(name)
            if seconds > SLOW_COMPILE_S and not was_said:
                logger.info("compiling kernels, as a first start does: about half a minute")
                was_said = True


def _compile_in_turn(dtype: torch.dtype, has_groupwise: bool, parallel: TensorParallel) -> None:
    """Let rank 0 fill the user's cache before the others read it, rather than all compile the same at once."""
    if parallel.rank > 0:
        parallel.wait()
    compile_kernels(dtype, has_groupwise)
    if parallel.rank == 0:
        parallel.wait()


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


def capture_graphs(runner: ModelRunner, max_num_seqs: int, max_model_len: int) -> None:
    """Record the runner's decode steps, with a bar if it is a terminal; this compiles what is left to be compiled.

    A model whose code (of transformers, or a checkpoint's own) asks for values on the way goes without.
    """
    widths = table_widths(max_model_len, runner.block_size)

    def run(inputs: StepInputs) -> Tensor:
        return runner.model.forward(inputs, runner.kv_caches)

    graphs = DecodeGraphs(run, runner.device, batch_sizes(max_num_seqs), widths)
    if not graphs.can_be_recorded():
        logger.warning("no CUDA graphs: this model's code waits for the device in each step; it is launched as it is")
        return
    with tqdm(graphs.capture(), "CUDA graphs", len(graphs), unit=" graphs", disable=None, leave=False) as captured:
        for num_seqs, table_blocks in captured:
            captured.set_postfix_str(f"{num_seqs} sequences of {table_blocks} blocks")
    runner.graphs = graphs


def largest_step(config: Config, max_model_len: int) -> Step:
    """Return a step as large as a scheduler may plan; all of it lies in block 0, so that its results are of no use."""
    num_seqs = config.max_num_seqs
    length, num_longer = divmod(config.max_num_batched_tokens, num_seqs)
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=1.0, top_p=0.5, num_logprobs=1)
    sequences = []
    for seq_id in range(num_seqs):
        num_tokens = min(length + (seq_id < num_longer), max_model_len)
        prompt, table = bytes(4 * num_tokens), bytes(4 * -(-num_tokens // config.block_size))
        sequences.append(SequenceStep(seq_id, 0, prompt, (table,), True, SequenceInit(sampling, prompt)))
    return Step("", "", 1, sequences)


def _choose_dtype(config: Config, model_config: ModelDescription, device: torch.device) -> torch.dtype:
    dtype, reason = choose_dtype(config.dtype, model_config.dtype, device, has_bfloat16=has_bfloat16(device))
    logger.info("%s on %s (%s): %s", dtype, device, torch.backends.cpu.get_cpu_capability(), reason)
    return dtype


def _refuse_impossible(
    config: Config, model_config: ModelDescription, max_model_len: int, kv_dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError, before minutes of loading, for a split of the model that cannot be, and for a KV pool that
    cannot be, whatever the weights take."""
    check_size(model_config, config.tensor_parallel_size)
    shapes = [
        (num_kv_heads_of_rank(num_kv_heads, config.tensor_parallel_size), key_size, value_size)
        for num_kv_heads, key_size, value_size in model_config.kv_shapes
    ]
    _size_pool(config, shapes, max_model_len, kv_dtype, device)
    if device.type == "cpu" and config.gpu_memory_utilization != FIELDS["gpu_memory_utilization"].default:
        logger.warning("gpu_memory_utilization has no effect on the CPU: kv_cache_memory_bytes sets the pool's size")
    if device.type == "cpu" and config.enforce_eager:
        logger.warning("enforce_eager has no effect on the CPU: there are no CUDA graphs")


def _choose_threads(config: Config) -> None:
    num_threads, reason = choose_num_threads(config.num_threads, num_sharing=num_local_ranks(config))
    kernels.cpu.set_num_threads(num_threads)
    logger.info("%d threads: %s", num_threads, reason)


def _has_groupwise(model: LoadedModel) -> bool:
    return any(isinstance(packed, PackedGroupwise) for packed in model.products)


def _log_weights(model: LoadedModel) -> None:
    held_bytes = Counter({"norms and plain embedding": sum(parameter.nbytes for parameter in model.parameters())})
    for packed in model.products:
        held_bytes[packed.form] += packed.nbytes
    listed = "; ".join(f"{form}: {num_bytes / 2**20:.1f} MiB" for form, num_bytes in held_bytes.most_common())
    logger.info("%.1f MiB of weights (%s)", held_bytes.total() / 2**20, listed)


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
