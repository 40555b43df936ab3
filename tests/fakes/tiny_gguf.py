"""Small random GGUF files, made from transformers models as llama.cpp's converter makes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 64, 2, 4, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<think>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "2 3", "o Ġ"]
CHAT_TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"


def vocabulary() -> tuple[list[str], list[int]]:
    """Tokens and their types: control, every byte, the merges' results, a user-defined and a filler token."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    normal = sorted(pre_tokenizers.ByteLevel.alphabet()) + merged
    tokens = CONTROL + normal + USER_DEFINED + ["[PAD0]"]
    return tokens, [3] * len(CONTROL) + [1] * len(normal) + [4] * len(USER_DEFINED) + [5]


def tiny_model(architecture: str, **config: Any) -> Any:
    """A random transformers model whose weights are exact in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(vocabulary()[0]),
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **(sizes | config)))
    with torch.no_grad():  # norms and biases too, which transformers sets to one and zero
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter).mul(0.3).bfloat16())
    return model.eval()


def write_gguf(
    path: Path,
    model: Any,
    *,
    pre: str | None = "smollm",
    sentencepiece: bool = False,
    kinds: Mapping[str, str] | str | None = None,
    renamed: Mapping[str, str] | None = None,
    control_types: list[int] | None = None,
    bos: bool = True,
    eos: bool = True,
    **keys: Any,
) -> Path:
    """Write `model` as llama.cpp would. `keys` are further metadata, with double underscores for dots.

    `kinds` is the type of all matrices, or of those whose GGUF name ends in a key; the rest, and vectors, are float32.
    `renamed` tokens have another text, `control_types` are of the first three; without `bos` and `eos` the file does
    not say these ids.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    _add_config(writer, config)
    if sentencepiece:
        _add_sentencepiece(writer)
    else:
        _add_byte_level_bpe(writer, pre, renamed or {}, control_types or [], "tokenizer__chat_template" not in keys)
    if bos:
        writer.add_bos_token_id(1)
    if eos:
        writer.add_eos_token_id(2)
    for key, value in keys.items():
        _add_value(writer, key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(_architecture(config.model_type), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if config.model_type == "llama":
            values = _permute(name, values, config)
        _add_tensor(writer, names.get_name(name, try_suffixes=(".weight", ".bias")), values, kinds)
    if (factors := rope_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rope_factors(config: Any) -> np.ndarray | None:
    """By how much Llama 3's scaling divides each rotary frequency, from transformers' own frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if config.rope_parameters["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    factors: np.ndarray = ((1 / config.rope_parameters["rope_theta"] ** dims) / scaled).numpy()
    return factors


def _architecture(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(config.head_dim)


def _add_byte_level_bpe(
    writer: gguf.GGUFWriter, pre: str | None, renamed: Mapping[str, str], control_types: list[int], has_template: bool
) -> None:
    tokens, types = vocabulary()
    tokens = [renamed.get(token, token) for token in tokens]
    types[: len(control_types)] = control_types
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    if has_template:
        writer.add_chat_template(CHAT_TEMPLATE)


def _add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    """Llama 2's kind: no merges but scores, and a token for each byte that has no other."""
    pieces = ["▁", "h", "e", "l", "o", "w", "he", "ll", "hell", "hello", "▁hello", "▁w"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces)])
    writer.add_token_scores([*[0.0] * 259, *(-1000.0 * (len(piece) == 1) - i for i, piece in enumerate(pieces))])
    writer.add_unk_token_id(0)


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
        case list():
            writer.add_array(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)


def _permute(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for layer, num_heads in heads.items():
        if f".{layer}." in name:
            halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kinds: Mapping[str, str] | str | None) -> None:
    by_ending = {"": kinds} if isinstance(kinds, str) else kinds or {}
    kind = next((kind for ending, kind in by_ending.items() if name.endswith(ending)), "F32")
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
    else:
        encoded = _random_blocks(values.shape, kind) if kind in K_TYPES else gguf.quantize(values, _type(kind))
        writer.add_tensor(name, encoded, raw_dtype=_type(kind))


def _type(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind]


def _random_blocks(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Blocks of a type that `gguf` reads and does not write: random bytes, with scales that keep values small."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[_type(kind)]
    generator = np.random.default_rng(len(kind) + shape[0])
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // block_elements, block_bytes), dtype=np.uint8)
    for start, largest in K_TYPES[kind].items():
        scales = generator.uniform(largest / 2, largest, blocks.shape[:-1]).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


# Where a block has its float16 factors, and how large they are here.
K_TYPES = {
    "Q2_K": {80: 1e-2, 82: 1e-2},
    "Q4_K": {0: 2e-4, 2: 1e-3},
    "Q5_K": {0: 1e-4, 2: 1e-3},
    "Q6_K": {208: 5e-5},
}
