"""config.json of the models of older guides, which came with code of their own, in the keys of today.

Each function translates one kind of file. A key with which the model's own code would compute in another way is refused
by name. That code was read, and is never run.
"""

from typing import Any, NamedTuple, TypedDict

import msgspec

from octavo.executor.wrong_values import converted


class Traits(TypedDict, total=False):
    """What no key of today says, by the names of ModelConfig."""

    alibi: bool
    normalized_head: bool
    qkv_bias: bool


class Translated(NamedTuple):
    keys: dict[str, Any]  # as `executor.models.config` reads them
    traits: Traits


class _Baichuan(msgspec.Struct):
    vocab_size: int
    model_max_length: int
    max_position_embeddings: int | None = None
    z_loss_weight: float | None = None


class _ChatGLM(msgspec.Struct):
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    kv_channels: int
    ffn_hidden_size: int
    padded_vocab_size: int
    seq_length: int
    multi_query_group_num: int
    layernorm_epsilon: float = 1e-5
    add_qkv_bias: bool = False
    rope_ratio: float = 1.0


class _Qwen(msgspec.Struct):
    hidden_size: int
    num_attention_heads: int
    kv_channels: int
    intermediate_size: int
    vocab_size: int
    seq_length: int
    layer_norm_epsilon: float = 1e-6
    rotary_emb_base: float = 10000.0


# of a file as ours: these mean the same in all of them
KEPT = (
    "architectures",
    "num_hidden_layers",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "vocab_size",
    "quantization_config",
)
BAICHUAN2_VOCAB_SIZE = 125_696
ROPE_THETA = 10_000.0


def translate_baichuan(raw: dict[str, Any]) -> Translated:
    """Translate Baichuan and Baichuan 2, of 7 and 13 billion parameters.

    Those of 13 billion have ALiBi and, having no table of positions, no `max_position_embeddings`. The head of
    Baichuan 2 is normalized; its configuration brought `z_loss_weight`.
    """
    said = converted(raw, _Baichuan)
    keys = raw | {"max_position_embeddings": said.max_position_embeddings or said.model_max_length}
    has_normalized_head = said.vocab_size == BAICHUAN2_VOCAB_SIZE or said.z_loss_weight is not None
    return Translated(keys, {"alibi": said.max_position_embeddings is None, "normalized_head": has_normalized_head})


def translate_chatglm(raw: dict[str, Any]) -> Translated:
    """Translate ChatGLM2, ChatGLM3 and of GLM-4 in the same format."""
    if raw.get("position_encoding_2d"):
        raise ValueError("the first ChatGLM-6B (position_encoding_2d) is not supported; ChatGLM2 and later are")
    _require(
        raw,
        rmsnorm=True,
        post_layer_norm=True,
        multi_query_attention=True,
        add_bias_linear=False,
        apply_residual_connection_post_layernorm=False,
        interleaved_qkv=False,
        quantization_bit=0,
        pre_seq_len=None,
        vision_config=None,
    )
    said = converted(raw, _ChatGLM)
    if said.rope_ratio != 1 and "chatglm2" in str(raw.get("_name_or_path")).lower():
        raise ValueError("rope_ratio of ChatGLM2, which stretched positions and not the base, is not supported")
    keys = {key: raw[key] for key in KEPT if key in raw} | {
        "vocab_size": said.padded_vocab_size,
        "hidden_size": said.hidden_size,
        "intermediate_size": said.ffn_hidden_size,
        "num_hidden_layers": said.num_layers,
        "num_attention_heads": said.num_attention_heads,
        "num_key_value_heads": said.multi_query_group_num,
        "head_dim": said.kv_channels,
        "max_position_embeddings": said.seq_length,
        "rms_norm_eps": said.layernorm_epsilon,
        "rope_theta": ROPE_THETA * said.rope_ratio,
    }
    return Translated(keys, {"qkv_bias": said.add_qkv_bias})


def translate_qwen(raw: dict[str, Any]) -> Translated:
    """Translate the first Qwen.

    Its longest sequence is that of its training (`seq_length`): beyond, its code changes frequencies with the length
    of the sequence (`use_dynamic_ntk`) and scales queries by position (`use_logn_attn`).
    """
    _require(raw, no_bias=True, scale_attn_weights=True, rotary_pct=1.0, use_cache_quantization=False, visual=None)
    said = converted(raw, _Qwen)
    keys = {key: raw[key] for key in KEPT if key in raw} | {
        "hidden_size": said.hidden_size,
        "intermediate_size": said.intermediate_size // 2,  # of gate and up together
        "num_attention_heads": said.num_attention_heads,
        "head_dim": said.kv_channels,
        "max_position_embeddings": said.seq_length,
        "rms_norm_eps": said.layer_norm_epsilon,
        "rope_theta": said.rotary_emb_base,
    }
    return Translated(keys, {})


def _require(raw: dict[str, Any], **expected: object) -> None:
    """Raise ValueError if a key that is there has another value than the one whose meaning is built in."""
    for key, value in expected.items():
        if key in raw and raw[key] != value:
            raise ValueError(f"{key} {raw[key]!r} is not supported with this architecture; supported: {value!r}")
