"""From a checkpoint directory to a model of transformers that is filled, packed, and tried out."""

import logging
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm

from octavo.executor.checkpoints.checkpoint import Checkpoint, checkpoint_files, listed
from octavo.executor.models.borrowed import attention
from octavo.executor.models.borrowed.attention import CurrentStep, UnsupportedModelError
from octavo.executor.models.borrowed.config import FAILURES, WIDENED, BorrowedConfig, line_of
from octavo.executor.models.borrowed.decoder import BorrowedDecoder, is_product, pack_products
from octavo.executor.models.borrowed.notices import quiet, silence_padding_notice
from octavo.executor.models.borrowed.quantized import StoredTensor, find_packed, pack_stored, state_to_load
from octavo.executor.models.borrowed.rotary import make_rotary_static
from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.kv_caches import allocate_kv_caches
from octavo.executor.models.plan import LoadPlan
from octavo.executor.models.progress_bars import tqdm_disable
from octavo.executor.models.weights import DummyWeights
from octavo.executor.shards import Shard
from octavo.kernels import reference

# T tokens, V vocabulary

logger = logging.getLogger(__name__)

TRIAL_BLOCK_SIZE = 4
# Relative deviation of logits, in the median over tokens: rounding stays far below, a mix-up of tokens far above.
TOLERANCE = {torch.float32: 0.01}
TOLERANCE_OF_SHORT_TYPES = 0.1


def load_borrowed(plan: LoadPlan, config: BorrowedConfig, *, rounded_bits: int | None) -> BorrowedDecoder:
    """Return the model of a plan whose config is `config`, as `executor.models.load_model` does.

    The weights of linear layers, except the head's, are rounded to `rounded_bits`. Raises ValueError as load_model
    does, and if the filled model computes something else than it computes with transformers' own attention.
    """
    current = CurrentStep(plan.backend)
    causal_model = _dummy(plan, config) if plan.load_format == "dummy" else _read(plan, config, current)
    make_rotary_static(causal_model, plan.max_model_len)
    silence_padding_notice(causal_model)
    num_products = sum(is_product(module) for module in causal_model.modules())
    with _bar("packing weights", num_products, plan.progress) as bar:
        pack_products(causal_model, current, rounded_bits=rounded_bits, progress=bar.update)
    if rounded_bits and (stacked := sum(weight.nbytes for weight in causal_model.parameters() if weight.ndim == 3)):
        logger.warning("%.1f MiB of stacked experts stay plain: only linear layers are rounded", stacked / 2**20)
    _try_out(plan, BorrowedDecoder(config, causal_model, CurrentStep(reference)))
    return BorrowedDecoder(config, causal_model, current)


def _try_out(plan: LoadPlan, trial: BorrowedDecoder) -> None:
    """Compare a filled model with itself; `trial` has the reference's attention, which needs no compilation."""
    deviation = assert_agrees(trial, plan.dtype, plan.max_model_len, plan.device)
    logger.info(
        "%s runs through transformers' modelling code; a trial deviates by %.1g from its own attention",
        trial.config.architecture,
        deviation,
    )


def assert_agrees(model: BorrowedDecoder, dtype: torch.dtype, max_model_len: int, device: torch.device) -> float:
    """Return by how much the logits of a few packed tokens deviate from those with transformers' own attention.

    Raises UnsupportedModelError if that is more than rounding: whatever else than attention reaches from token to
    token, or depends on the largest position of a batch, shows here.
    """
    near, far = min(6, max_model_len), min(3, max_model_len)
    # Of the middle of the vocabulary: the first ones may be padding, of which embedding and logits are zero.
    ids = (torch.arange(near + far, device=device) + model.vocab_size // 2) % model.vocab_size
    whole, tail = torch.arange(near, device=device), torch.arange(max_model_len - far, max_model_len, device=device)
    try:
        expected_TV = torch.cat([_eager_logits(model, ids[:near], whole), _eager_logits(model, ids[near:], tail)])
        logits_TV = _paged_logits(model, ids, whole, tail, dtype)
    except FAILURES as error:
        raise UnsupportedModelError(f"{model.config.architecture} is not supported: {line_of(error)}") from None
    error_T, size_T = (logits_TV - expected_TV).norm(dim=-1), expected_TV.norm(dim=-1)
    deviation: float = (error_T.median() / size_T.median()).item()
    if not deviation <= TOLERANCE.get(dtype, TOLERANCE_OF_SHORT_TYPES):
        raise UnsupportedModelError(
            f"{model.config.architecture} is not supported: with paged attention and several sequences in one batch its"
            f" logits deviate by {deviation:.2g} (relative) from those with transformers' own attention"
        )
    return deviation


def _dummy(plan: LoadPlan, config: BorrowedConfig) -> Any:
    """Return the model with random weights, the same for the same seed."""
    causal_model = config.build(plan.device, plan.dtype)
    source = DummyWeights(plan.seed)
    for name, parameter in causal_model.named_parameters():
        parameter.requires_grad_(False)
        parameter.data = torch.empty_like(parameter, dtype=plan.dtype)
        source.read(name, Shard(len(parameter)), parameter)
    return causal_model


def _read(plan: LoadPlan, config: BorrowedConfig, current: CurrentStep) -> Any:
    """Return the model with the directory's weights; weights of few bits are packed already."""
    read = _read_plain if config.quantization is None else _read_quantized
    return read(plan, config, current).to(plan.device).requires_grad_(False)


def _read_plain(plan: LoadPlan, config: BorrowedConfig, current: CurrentStep) -> Any:
    are_torchs = any(path.suffix == ".bin" for path in checkpoint_files(plan.directory))  # raises if a file is missing
    widening = {}
    if config.widened_from:
        logger.info("%s weights are widened to %s", config.widened_from, plan.dtype)
        widening = {"quantization_config": WIDENED[config.widened_from]}
    if not are_torchs:
        return _from_pretrained(plan, config, plan.directory, **widening)
    with Checkpoint(plan.directory) as checkpoint:  # takes nothing but tensors from a pickle
        stored = {name: StoredTensor(checkpoint, name) for name in checkpoint.names()}
        return _from_pretrained(plan, config, None, state_dict=stored, **widening)


def _read_quantized(plan: LoadPlan, config: BorrowedConfig, current: CurrentStep) -> Any:
    with Checkpoint(plan.directory, config.quantization) as checkpoint:
        skeleton = config.build("meta", plan.dtype)
        packed = find_packed(checkpoint, skeleton)
        state = state_to_load(checkpoint, packed, skeleton, plan.dtype)
        causal_model = _from_pretrained(plan, config, None, state_dict=state)
        with _bar("reading packed weights", len(packed), plan.progress) as bar:
            pack_stored(causal_model, checkpoint, packed, current, plan.device, bar.update)
    return causal_model


def _from_pretrained(plan: LoadPlan, config: BorrowedConfig, source: Path | None, **options: Any) -> Any:
    """Return what transformers makes of `source`, or of `options`: it knows which tensors are renamed or fused."""
    with quiet(plan.progress, "loading weights"):
        try:
            causal_model, found = config.model_class.from_pretrained(
                source,
                config=config.transformers_config,
                dtype=plan.dtype,
                attn_implementation=attention.PAGED,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_refuse_misfits` names them
                **options,
            )
        except (RuntimeError, OSError, SafetensorError) as error:
            raise ValueError(f"{plan.directory}: transformers cannot load the weights: {error}") from None
    _refuse_misfits(plan.directory, found)
    _warn_of_untied_head(plan.directory, causal_model)
    return causal_model


def _refuse_misfits(directory: Path, found: Any) -> None:
    """Raise ValueError, naming the tensors, if transformers found that checkpoint and model differ."""
    problems = []
    if missing := set(found["missing_keys"]):
        problems.append(f"lacks {listed(missing)}")
    if left_over := set(found["unexpected_keys"]):
        problems.append(f"has, of no use to the model, {listed(left_over)}")
    if mismatched := {f"{name} {tuple(there)} for {tuple(asked)}" for name, there, asked in found["mismatched_keys"]}:
        problems.append(f"has, of another shape than config.json asks for, {listed(mismatched)}")
    if problems:
        raise ValueError(f"the checkpoint {directory} {' and '.join(problems)}")


def _warn_of_untied_head(directory: Path, causal_model: Any) -> None:
    """Warn if the checkpoint has a head of its own where config.json ties the head: transformers uses it without a
    word."""
    embedding, head = causal_model.get_input_embeddings(), causal_model.get_output_embeddings()
    if causal_model.config.tie_word_embeddings and head is not None and head.weight is not embedding.weight:
        logger.warning(
            "config.json of %s ties the head to the embedding, but the checkpoint has both, and they differ: each is"
            " used as it is (tie_word_embeddings should be false)",
            directory,
        )


def _bar(title: str, total: int, progress: bool | None) -> Any:
    return tqdm(total=total, desc=title, unit="layer", disable=tqdm_disable(progress))


@torch.inference_mode()
def _eager_logits(model: BorrowedDecoder, ids_T: Tensor, positions_T: Tensor) -> Tensor:
    """Return logits_TV of one sequence with transformers' own attention."""
    causal_model: Any = model.causal_model
    causal_model.config._attn_implementation = "eager"
    try:
        output = causal_model(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False)
    finally:
        causal_model.config._attn_implementation = attention.PAGED
    logits_TV: Tensor = output.logits[0].float()
    return logits_TV


def _paged_logits(model: BorrowedDecoder, ids_T: Tensor, near_T: Tensor, far_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Return logits_TV of two sequences over a paged cache, the first in two chunks, the second beside one of them."""
    near, far = len(near_T), len(far_T)
    half = near - near // 2
    caches = allocate_kv_caches(model.kv_shapes, 3, TRIAL_BLOCK_SIZE, dtype, ids_T.device)
    far_slots_T = torch.arange(far, device=ids_T.device) + 2 * TRIAL_BLOCK_SIZE
    first_ids, first_positions = torch.cat([ids_T[:half], ids_T[near:]]), torch.cat([near_T[:half], far_T])
    first_slots = torch.cat([near_T[:half], far_slots_T])
    steps = [_inputs(first_ids, first_positions, first_slots, [half, far], [half, far], [[0, 1], [2, 0]])]
    if near > half:
        steps.append(_inputs(ids_T[half:near], near_T[half:], near_T[half:], [near - half], [near], [[0, 1]]))
    logits_TV = torch.cat([model.compute_logits(model(step, caches)) for step in steps])
    order = [*range(half), *range(half + far, near + far), *range(half, half + far)]
    return logits_TV[order]


def _inputs(
    ids_T: Tensor, positions_T: Tensor, slots_T: Tensor, counts: list[int], lengths: list[int], tables: list[list[int]]
) -> StepInputs:
    """Return the inputs of a step with `counts` tokens of each sequence, which then has `lengths` of them."""
    starts, lengths_S, tables_SM = (
        torch.tensor(numbers, dtype=torch.int32, device=ids_T.device)
        for numbers in ([0, *accumulate(counts)], lengths, tables)
    )
    return StepInputs(ids_T, positions_T, slots_T, starts, lengths_S, tables_SM)
