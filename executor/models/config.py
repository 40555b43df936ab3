"""What a checkpoint's config.json says about its architecture, read once: an architecture is a row."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch

from octavo.executor.checkpoints.checkpoint import stored_dtype
from octavo.executor.dtypes import DTYPES
from octavo.executor.models.keys import refuse_other_models
from octavo.executor.models.kv_caches import KVShape
from octavo.executor.models.older import Traits, Translated, translate_baichuan, translate_chatglm, translate_qwen
from octavo.executor.models.rotary import Rope, rotary_frequencies, without_effect
from octavo.executor.quantization import Quantization, read_quantization
from octavo.executor.wrong_values import WrongValueError, converted
from octavo.protocol.model_files.bounded import read_bounded

logger = logging.getLogger(__name__)

# More than any tensor has along a dimension, and more layers than any model. A file with more is damaged or a trap.
Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NumLayers = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
FORM_HINT = (
    "A model's config.json is not of this form: download the model again, or, if it is your own, let transformers'"
    " save_pretrained write it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A row: how one architecture's forward pass differs from Llama's without biases."""

    qkv_bias: bool = False
    reads_attention_bias: bool = False  # config.json's attention_bias: biases of q, k, v and o
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: Literal["none", "all", "layer_types"] = "none"
    partial_rotary_factor: float = 1.0  # of a head's components, the first ones
    renaming: str | None = None  # of `executor.models.renaming`, where weights have other names
    translate: Callable[[dict[str, Any]], Translated] | None = None  # of a config.json with other keys


BAICHUAN = Architecture(renaming="baichuan", translate=translate_baichuan)
CHATGLM = Architecture(partial_rotary_factor=0.5, renaming="chatglm", translate=translate_chatglm)
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Architecture(sliding_window="all"),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, sliding_window="layer_types"),
    "Qwen3ForCausalLM": Architecture(reads_attention_bias=True, qk_norm=True, sliding_window="layer_types"),
    "BaichuanForCausalLM": BAICHUAN,
    "BaiChuanForCausalLM": BAICHUAN,  # Baichuan-7B spells it so
    "ChatGLMModel": CHATGLM,
    "ChatGLMForConditionalGeneration": CHATGLM,
    "QWenLMHeadModel": Architecture(qkv_bias=True, renaming="qwen", translate=translate_qwen),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family; every optional key of config.json is resolved here."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    alibi: bool  # attention by distance (Press et al., arXiv:2108.12409) in the place of rotation
    sliding_windows: tuple[int | None, ...]  # a layer's, in tokens; None attends to everything
    dtype: torch.dtype  # the checkpoint's
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    normalized_head: bool  # rows of lm_head have length 1
    renaming: str | None
    quantization: Quantization | None = None  # how the checkpoint stores its weights, if not plainly

    @property
    def default_max_model_len(self) -> int:
        """Return the longest sequence, in tokens, that is served unless the settings ask for more."""
        return max(self.max_position_embeddings, self.rope.stretched_tokens if self.rope.rope_type == "yarn" else 0)

    @property
    def longest_sequence_tokens(self) -> int:
        """Return the longest sequence the model can be made to serve.

        Checkpoints with linear or dynamic scaling do not say whether `max_position_embeddings` is the length before or
        after it, so both are allowed; dynamic scaling changes the frequencies of all sequences beyond the first.
        """
        return max(self.max_position_embeddings, self.rope.stretched_tokens)

    @property
    def kv_shapes(self) -> list[KVShape]:
        """Return each layer's (num_kv_heads, key_head_size, value_head_size), of the whole model."""
        return [(self.num_kv_heads, self.head_dim, self.head_dim)] * self.num_layers

    def frequencies(self, max_model_len: int) -> str:
        """Return the rotary frequencies for `max_model_len` as text, for a fingerprint."""
        inv_freq, attention_factor = rotary_frequencies(self.rope, self.rotary_dim, max_model_len)
        return repr((inv_freq.tolist(), attention_factor))


class _Architectures(msgspec.Struct):
    architectures: list[str]


class _Checkpoint(msgspec.Struct):
    """config.json as transformers 4 and 5 write it. Keys that are not listed have no effect here."""

    architectures: list[str]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: NumLayers
    num_attention_heads: Size
    max_position_embeddings: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=0)] = 1e-6
    tie_word_embeddings: bool | None = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = 4096
    use_sliding_window: bool | None = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float = 10000.0
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None


def read_architecture(directory: Path) -> str:
    """Return the name of a checkpoint directory's architecture. Raises ValueError if it does not name one."""
    path = directory / "config.json"
    try:
        architectures = converted(msgspec.json.decode(read_bounded(path)), _Architectures).architectures
        if len(architectures) != 1:
            raise ValueError(f"architectures names {len(architectures)} of them; one is needed")
    except FileNotFoundError:
        raise ValueError(f"{directory} has no config.json: it is not a model directory") from None
    except (msgspec.DecodeError, WrongValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}. {FORM_HINT}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return architectures[0]


def read_native_config(directory: Path, architecture: str) -> ModelConfig:
    """Return the ModelConfig of a directory whose `architecture` is one of ARCHITECTURES.

    Raises ValueError, naming it, for what is not supported.
    """
    path = directory / "config.json"
    try:
        row = ARCHITECTURES[architecture]
        keys: dict[str, Any] = msgspec.json.decode(read_bounded(path))
        if row.translate is None:
            refuse_other_models(keys)
        keys, traits = row.translate(keys) if row.translate else (keys, Traits())
        checkpoint = converted(keys, _Checkpoint)
        quantization = read_quantization(directory, checkpoint.quantization_config)
        return replace(_resolve(architecture, row, checkpoint, quantization, directory), **traits)
    except (msgspec.DecodeError, WrongValueError) as error:
        raise ValueError(f"{path}: {error}. {FORM_HINT}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _resolve(
    architecture: str, row: Architecture, checkpoint: _Checkpoint, quantization: Quantization | None, directory: Path
) -> ModelConfig:
    _refuse_unsupported(checkpoint)
    attention_bias = row.reads_attention_bias and checkpoint.attention_bias
    head_dim = checkpoint.head_dim or checkpoint.hidden_size // checkpoint.num_attention_heads
    config = ModelConfig(
        architecture=architecture,
        vocab_size=checkpoint.vocab_size,
        hidden_size=checkpoint.hidden_size,
        intermediate_size=checkpoint.intermediate_size,
        num_layers=checkpoint.num_hidden_layers,
        num_heads=checkpoint.num_attention_heads,
        num_kv_heads=checkpoint.num_key_value_heads or checkpoint.num_attention_heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * row.partial_rotary_factor),
        rms_norm_eps=checkpoint.rms_norm_eps,
        max_position_embeddings=checkpoint.max_position_embeddings,
        rope=_rope(checkpoint, directory / "config.json"),
        alibi=False,
        sliding_windows=_sliding_windows(row, checkpoint),
        dtype=_dtype(checkpoint, directory),
        tie_word_embeddings=bool(checkpoint.tie_word_embeddings),
        qkv_bias=row.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=row.reads_mlp_bias and checkpoint.mlp_bias,
        qk_norm=row.qk_norm,
        normalized_head=False,
        renaming=row.renaming,
        quantization=quantization,
    )
    _check_heads(config)
    return config


def _refuse_unsupported(checkpoint: _Checkpoint) -> None:
    if checkpoint.hidden_act != "silu":
        raise ValueError(f"hidden_act {checkpoint.hidden_act!r} is not supported; supported: silu")


def _check_heads(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_attention_heads ({config.num_heads}) is no multiple of num_key_value_heads ({config.num_kv_heads})"
        )
    if config.head_dim % 2 or config.rotary_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd: rotary embeddings need pairs")
    if config.rope.rope_type == "dynamic" and config.rotary_dim == 2:
        raise ValueError("rope_type 'dynamic' needs more than one frequency, and so a head_dim of more than 2")


def unsaid_dtype(directory: Path) -> torch.dtype:
    """Return the type of a checkpoint whose config.json names none: the type of the weights that are here."""
    if (stored := stored_dtype(directory)) is not None:
        return stored
    logger.warning("%s says no dtype, and no weights are here that do: float32 is assumed", directory / "config.json")
    return torch.float32


def _dtype(checkpoint: _Checkpoint, directory: Path) -> torch.dtype:
    name = (checkpoint.dtype or checkpoint.torch_dtype or "auto").removeprefix("torch.")
    if name == "auto":
        return unsaid_dtype(directory)
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def _rope(checkpoint: _Checkpoint, path: Path) -> Rope:
    """Return the rotary parameters; transformers 5 writes all of them to `rope_parameters`."""
    written = checkpoint.rope_scaling or checkpoint.rope_parameters or {}
    if nested := [key for key, value in written.items() if isinstance(value, dict)]:
        raise ValueError(f"rotary parameters that differ by layer ({', '.join(nested)}) are not supported")
    values = {"rope_type": written.get("type", "default"), "rope_theta": checkpoint.rope_theta} | written
    if (values.get("partial_rotary_factor", checkpoint.partial_rotary_factor) or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    trained_tokens = checkpoint.original_max_position_embeddings or values.get("original_max_position_embeddings")
    values["original_max_position_embeddings"] = trained_tokens or checkpoint.max_position_embeddings
    values["max_position_embeddings"] = checkpoint.max_position_embeddings
    if said := without_effect(written):
        logger.warning("%s: %s", path, said)
    try:
        rope = converted(values, Rope)
    except WrongValueError as error:
        raise WrongValueError(f"rotary parameters: {error}") from None
    rope.check()
    return rope


def _sliding_windows(row: Architecture, checkpoint: _Checkpoint) -> tuple[int | None, ...]:
    """Return each layer's window. A checkpoint may name a window that its architecture does not use."""
    num_layers = checkpoint.num_hidden_layers
    slides = [row.sliding_window == "all"] * num_layers
    if row.sliding_window == "layer_types":
        slides = [bool(checkpoint.use_sliding_window) and sliding for sliding in _sliding_layers(checkpoint)]
    window = checkpoint.sliding_window
    if any(slides) and window is not None and window < 1:
        raise ValueError(f"sliding_window {window} is not supported; supported: 1 and more")
    return tuple(window if slide else None for slide in slides)


def _sliding_layers(checkpoint: _Checkpoint) -> list[bool]:
    num_layers = checkpoint.num_hidden_layers
    if checkpoint.layer_types is None:
        return [layer >= checkpoint.max_window_layers for layer in range(num_layers)]
    if len(checkpoint.layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(checkpoint.layer_types)} entries for {num_layers} layers")
    if unknown := set(checkpoint.layer_types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer types {unknown} are not supported; supported: full_attention, sliding_attention")
    return [layer_type == "sliding_attention" for layer_type in checkpoint.layer_types]
