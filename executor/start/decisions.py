"""What is decided before any weight is read: the model, its length, the dtypes, the number of threads."""

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from octavo.executor.dtypes import choose_dtype, choose_kv_dtype
from octavo.executor.machine.threads import choose_num_threads
from octavo.executor.models import ModelConfig, ModelDescription, read_model_config
from octavo.executor.models.kv_caches import block_bytes
from octavo.executor.models.split import check_size, num_kv_heads_of_rank
from octavo.executor.parallel import TensorParallel
from octavo.executor.start.footprint import borrowed_footprint, choose_forms, native_footprint
from octavo.executor.start.group import num_local_ranks
from octavo.executor.start.pool import refuse_too_large, size_pool
from octavo.kernels import cpu
from octavo.kernels.choice import ChosenBackend
from octavo.protocol.config import FIELDS, Config

logger = logging.getLogger(__name__)


class Decisions(NamedTuple):
    """What is decided before any weight is read."""

    model_config: ModelDescription
    max_model_len: int
    dtype: torch.dtype  # of weights and activations
    kv_dtype: torch.dtype


def decide(config: Config, chosen: ChosenBackend, device: torch.device) -> Decisions:
    """Read config.json and decide what follows from it; set the number of threads.

    Raises ValueError, before minutes of loading, for a model that cannot be served with these settings.
    """
    if not config.model:
        raise ValueError("no model: set --model to its directory")
    model_config = read_model_config(Path(config.model), trust_remote_code=config.trust_remote_code)
    max_model_len = choose_max_model_len(config.max_model_len, model_config)
    if not model_config.kv_shapes:
        max_model_len = _within_a_step(max_model_len, config)
    dtype, reason = choose_dtype(config.dtype, model_config.dtype, device)
    logger.info("%s on %s (%s): %s", dtype, device, torch.backends.cpu.get_cpu_capability(), reason)
    _set_num_threads(config)
    decided = Decisions(model_config, max_model_len, dtype, choose_kv_dtype(config.kv_cache_dtype, dtype, chosen))
    if config.rank == 0:  # which reports it for all ranks
        _refuse_impossible(config, decided, device)
        _refuse_too_large(config, decided, chosen, device)
        _warn_of_no_effect(config, device)
    return decided


def choose_max_model_len(requested: int | None, model_config: ModelDescription) -> int:
    """Return the longest sequence to serve. Raises ValueError if the model is not made for the requested length."""
    longest = model_config.longest_sequence_tokens
    if requested is not None and requested > longest:
        raise ValueError(
            f"max_model_len ({requested}) is beyond what the model is made for: {longest} tokens. Set --max-model-len"
            f" to {longest} or less, or leave it out; rope_scaling, which stretches a model, belongs in its config.json"
        )
    return requested or model_config.default_max_model_len


def _within_a_step(max_model_len: int, config: Config) -> int:
    """Return how long a text of an encoder may be: one step computes it. Raises ValueError if more was asked for."""
    most = config.max_num_batched_tokens
    if config.max_model_len is not None and config.max_model_len > most:
        raise ValueError(
            f"max_model_len ({config.max_model_len}) is more than max_num_batched_tokens ({most}), and an encoder"
            f" computes a text in one step: set --max-num-batched-tokens to {config.max_model_len} or more"
        )
    if max_model_len > most:
        logger.info("texts have at most %d tokens, as a step has (--max-num-batched-tokens)", most)
    return min(max_model_len, most)


def _set_num_threads(config: Config) -> None:
    num_threads, reason = choose_num_threads(config.num_threads, num_sharing=num_local_ranks(config))
    cpu.set_num_threads(num_threads)
    logger.info("%d threads: %s", num_threads, reason)


def _refuse_impossible(config: Config, decided: Decisions, device: torch.device) -> None:
    """Raise ValueError if the model cannot be split so, or if the KV pool would be too small even without weights."""
    check_size(decided.model_config, config.tensor_parallel_size)
    shapes = [
        (num_kv_heads_of_rank(num_kv_heads, config.tensor_parallel_size), key_size, value_size)
        for num_kv_heads, key_size, value_size in decided.model_config.kv_shapes
    ]
    num_bytes = block_bytes(shapes, config.block_size, decided.kv_dtype)
    size_pool(config, num_bytes, decided.max_model_len, device, num_sharing=num_local_ranks(config))


def _refuse_too_large(config: Config, decided: Decisions, chosen: ChosenBackend, device: torch.device) -> None:
    """Raise ValueError if this rank has not enough memory for its weights."""
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
