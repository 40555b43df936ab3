"""Encoders: models whose tokens attend to all tokens of their text. They make vectors and generate nothing.

They run through transformers' modelling code, all texts of a step in one row without padding. Attention is ours: it
keeps the texts apart. There is no KV cache. A filled model proves itself against transformers' own attention.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from octavo.executor.models.borrowed.attention import UnsupportedModelError
from octavo.executor.models.borrowed.config import DTYPES, FAILURES, line_of
from octavo.executor.models.borrowed.notices import quiet
from octavo.executor.models.config import unsaid_dtype
from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.interface import watch_each
from octavo.executor.models.kv_caches import KVCaches, KVShape
from octavo.executor.models.plan import LoadPlan
from octavo.executor.models.pooling import max_seq_length
from octavo.executor.models.weights import DummyWeights
from octavo.executor.quantization import Quantization
from octavo.executor.shards import Shard
from octavo.kernels.backend import PackedLinear

# T tokens of this step, S texts, L tokens of each text, H heads, D head size, E hidden size

PACKED = "octavo_packed"  # no mask is registered under this name: transformers then builds none
TRIAL_TOKENS = (7, 5)  # of two texts in one step; the first is longer than a window of attention
TOLERANCE = {torch.float32: 1e-3}  # relative deviation of hidden states
TOLERANCE_OF_SHORT_TYPES = 0.1

logger = logging.getLogger(__name__)


def is_encoder(architecture: str) -> bool:
    """Return whether transformers has the architecture as an encoder of text, with or without its head of training."""
    kinds = MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return architecture in kinds.values() or architecture in {MODEL_MAPPING_NAMES.get(kind) for kind in kinds}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """An encoder of transformers: what our side needs to know of it."""

    architecture: str
    model_class: Any  # a PreTrainedModel: the encoder alone
    transformers_config: Any  # its PreTrainedConfig
    dtype: torch.dtype  # the checkpoint's
    vocab_size: int
    default_max_model_len: int
    longest_sequence_tokens: int
    first_position: int  # of a text
    quantization: Quantization | None = None
    kv_shapes: list[KVShape] = field(default_factory=list)

    def frequencies(self, max_model_len: int) -> str:
        """Return "": nothing of an encoder depends on `max_model_len`."""
        return ""

    def build(self, device: str | torch.device, dtype: torch.dtype) -> Any:
        """Return the model on a device, its parameters not filled."""
        with torch.device(device), no_init_weights():
            config = copy.deepcopy(self.transformers_config)
            return self.model_class._from_config(config, dtype=dtype, attn_implementation=PACKED).eval()


def read_encoder_config(directory: Path, architecture: str) -> EncoderConfig:
    """Return the EncoderConfig of a checkpoint directory. Raises ValueError, with the reason, for other models."""
    AttentionInterface.register(PACKED, _attention)
    with quiet(None):
        try:
            config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        except (OSError, *FAILURES) as error:
            _refuse(architecture, f"transformers cannot read {directory / 'config.json'}: {line_of(error)}")
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        _refuse(architecture, "it is a decoder as well")
    if getattr(config, "quantization_config", None):
        _refuse(architecture, "encoders are read in plain types only")
    config.dtype = config.dtype or unsaid_dtype(directory)
    if config.dtype not in DTYPES:
        _refuse(architecture, f"its dtype {config.dtype} is not one of float32, bfloat16, float16")
    model_class = getattr(transformers, MODEL_MAPPING_NAMES[config.model_type])
    try:
        with torch.device("meta"), no_init_weights():
            model = model_class._from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=PACKED)
    except FAILURES as error:
        _refuse(architecture, f"its attention cannot be replaced: {line_of(error)}")
    first_position = _first_position(model)
    longest = _count(architecture, config, "max_position_embeddings") - first_position
    return EncoderConfig(
        architecture=architecture,
        model_class=model_class,
        transformers_config=config,
        dtype=config.dtype,
        vocab_size=_count(architecture, config, "vocab_size"),
        default_max_model_len=min(longest, max_seq_length(directory) or longest),
        longest_sequence_tokens=longest,
        first_position=first_position,
    )


class PackedAttention:
    """Attention of each text of a step to itself."""

    def __init__(self) -> None:
        self.bounds: list[int] = []  # where the texts begin and end; S + 1 numbers

    def __call__(
        self, module: nn.Module, q_1HTD: Tensor, k_1HTD: Tensor, v_1HTD: Tensor, _: object, **keywords: Any
    ) -> tuple[Tensor, None]:
        scale, window = keywords.get("scaling"), keywords.get("sliding_window")
        lengths = {end - start for start, end in pairwise(self.bounds)}
        if len(lengths) == 1:
            [length] = lengths
            q_SHLD, k_SHLD, v_SHLD = (
                x.reshape(x.shape[1], -1, length, x.shape[3]).transpose(0, 1) for x in (q_1HTD, k_1HTD, v_1HTD)
            )
            mask_LL = _mask(length, window, q_1HTD.device)
            out_SHLD = scaled_dot_product_attention(q_SHLD, k_SHLD, v_SHLD, mask_LL, scale=scale)
            return out_SHLD.transpose(1, 2).reshape(1, q_1HTD.shape[2], q_1HTD.shape[1], v_1HTD.shape[3]), None
        parts = [
            scaled_dot_product_attention(
                q_1HTD[:, :, start:end],
                k_1HTD[:, :, start:end],
                v_1HTD[:, :, start:end],
                _mask(end - start, window, q_1HTD.device),
                scale=scale,
            )
            for start, end in pairwise(self.bounds)
        ]
        return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which tokens see each other, if some do not: those `window` tokens apart or further."""
    if window is None or length <= window:
        return None
    places_L = torch.arange(length, device=device)
    return (places_L[:, None] - places_L).abs() < window


class Encoder(nn.Module):
    """An encoder of transformers as the runner sees it."""

    def __init__(self, config: EncoderConfig, model: Any) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.vocab_size = config.vocab_size
        self.hidden_size: int = model.config.hidden_size
        self.kv_shapes: list[KVShape] = []
        self._attention = PackedAttention()
        self.layers = [module for module in model.modules() if _is_layer(module)]
        self.num_layers = len(self.layers)
        for module in model.modules():
            module.paged = self._attention

    @property
    def products(self) -> list[PackedLinear]:
        """Return nothing: products are torch's own, since no sequence goes on from a vector's bits."""
        return []

    def watch_layers(self, count_layers: Callable[[int], object]) -> None:
        """Call `count_layers` in each forward pass with the number of layers that were just done."""
        watch_each(self.layers, count_layers)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        """Return hidden_TE of the last layer. `inputs` has whole texts, and `kv_caches` nothing."""
        self._attention.bounds = inputs.cu_seqlens_q.tolist()
        output = self.model(
            input_ids=inputs.token_ids_T.unsqueeze(0),
            position_ids=inputs.positions_T.unsqueeze(0) + self.config.first_position,
        )
        hidden_TE: Tensor = output.last_hidden_state[0]
        return hidden_TE

    def compute_logits(self, hidden_SE: Tensor) -> Tensor:
        """An encoder generates nothing."""
        raise NotImplementedError(f"{self.config.architecture} generates nothing")


def load_encoder(plan: LoadPlan, config: EncoderConfig) -> Encoder:
    """Return the model of a plan whose config is `config`, as `executor.models.load_model` does.

    Raises ValueError as load_model does, and if the filled model computes something else than it computes with
    transformers' own attention.
    """
    if plan.rounded_bits is not None:
        _refuse(config.architecture, "encoders are held in plain types only: leave out --quantization")
    model = _dummy(plan, config) if plan.load_format == "dummy" else _read(plan, config)
    expected = [_alone(model, ids_T) for ids_T in _trial_ids(config, plan.device)]
    encoder = Encoder(config, model)
    _try_out(plan, encoder, expected)
    return encoder


def _read(plan: LoadPlan, config: EncoderConfig) -> Any:
    with quiet(plan.progress, "loading weights"):
        try:
            model, found = config.model_class.from_pretrained(
                plan.directory,
                config=config.transformers_config,
                dtype=plan.dtype,
                attn_implementation=PACKED,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{plan.directory}: transformers cannot load the weights: {line_of(error)}") from None
    # A pooler that a checkpoint lacks is not used here; heads of training that it has are left out.
    if missing := sorted(name for name in found["missing_keys"] if not name.startswith("pooler.")):
        raise ValueError(f"the checkpoint {plan.directory} lacks {', '.join(missing[:5])}")
    return model.to(plan.device).requires_grad_(False).eval()


def _dummy(plan: LoadPlan, config: EncoderConfig) -> Any:
    """Return the model with random weights, the same for the same seed."""
    model = config.build(plan.device, plan.dtype)
    source = DummyWeights(plan.seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.data = torch.empty_like(parameter, dtype=plan.dtype)
        source.read(name, Shard(len(parameter)), parameter)
    return model


def _trial_ids(config: EncoderConfig, device: torch.device) -> list[Tensor]:
    """Return two texts, from the middle of the vocabulary: the first tokens may be padding."""
    window = getattr(config.transformers_config, "sliding_window", None) or 0
    lengths = [min(length, config.longest_sequence_tokens) for length in (TRIAL_TOKENS[0] + window, TRIAL_TOKENS[1])]
    ids_T = (torch.arange(sum(lengths), device=device) + config.vocab_size // 2) % config.vocab_size
    return list(torch.split(ids_T, lengths))


@torch.inference_mode()
def _alone(model: Any, ids_T: Tensor) -> Tensor:
    """Return hidden_TE of one text with transformers' own attention and positions."""
    model.config._attn_implementation = "eager"
    try:
        hidden_TE: Tensor = model(input_ids=ids_T[None], attention_mask=torch.ones_like(ids_T[None])).last_hidden_state[
            0
        ]
        return hidden_TE
    except FAILURES as error:
        raise UnsupportedModelError(f"{type(model).__name__} is not supported: {line_of(error)}") from None
    finally:
        model.config._attn_implementation = PACKED


def _try_out(plan: LoadPlan, trial: Encoder, expected: Iterable[Tensor]) -> None:
    """Compare two packed texts with each of them alone: whatever else reaches from text to text shows here."""
    architecture, texts = trial.config.architecture, _trial_ids(trial.config, plan.device)
    lengths = torch.tensor([0, *map(len, texts)], dtype=torch.int32, device=plan.device)
    positions_T = torch.cat([torch.arange(len(ids_T), device=plan.device) for ids_T in texts])
    nothing = torch.empty(0, dtype=torch.int64, device=plan.device)
    bounds = lengths.cumsum(0, dtype=torch.int32)
    inputs = StepInputs(torch.cat(texts), positions_T, nothing, bounds, lengths[1:], nothing)
    try:
        hidden_TE = trial(inputs, [])
    except FAILURES as error:
        _refuse(architecture, line_of(error))
    expected_TE = torch.cat(list(expected))
    deviation = ((hidden_TE - expected_TE).norm() / expected_TE.norm()).item()
    if not deviation <= TOLERANCE.get(plan.dtype, TOLERANCE_OF_SHORT_TYPES):
        _refuse(
            architecture,
            f"with several texts in one step its hidden states deviate by {deviation:.2g} (relative) from those of each"
            " text alone",
        )
    logger.info("%s makes vectors; a trial deviates by %.1g from transformers' own attention", architecture, deviation)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any) -> Any:
    return module.paged(module, query, key, value, attention_mask, **keywords)


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module is one layer: transformers names the classes so."""
    return type(module).__name__.endswith(("Layer", "Block", "EncoderLayer")) and any(module.children())


def _first_position(model: Any) -> int:
    """Return the position of a text's first token: RoBERTa's positions begin after that of padding."""
    embeddings: Any = getattr(model, "embeddings", None)
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        return int(embeddings.padding_idx) + 1
    return 0


def _count(architecture: str, config: Any, name: str) -> int:
    count = getattr(config, name, None)
    if not isinstance(count, int) or count < 1:
        _refuse(architecture, f"its configuration does not say {name}")
    return count


def _refuse(architecture: str, reason: str) -> NoReturn:
    raise UnsupportedModelError(f"{architecture} is not supported: {reason}")
