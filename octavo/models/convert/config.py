"""A GGUF file's metadata as config.json."""

from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.models.convert.keys import check_keys
from octavo.models.convert.metadata import Count, GGUFFile, Positive
from octavo.models.convert.weights import read_tensor

if TYPE_CHECKING:
    import numpy as np

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Llama 3.1's scaling of rotary frequencies. A GGUF file stores only the resulting factor of each frequency;
# every Llama 3.1, 3.2 and 3.3 uses these three numbers and differs in `factor` alone.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def model_config(file: GGUFFile) -> dict[str, Any]:
    """The content of config.json. Raises ModelError for what the Llama family's decoders cannot express."""
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} has the GGUF architecture {architecture!r}, which is not supported. Supported: "
            f"{', '.join(ARCHITECTURES)} (Mistral is stored as llama). "
            "Give the model's Hugging Face id or directory instead."
        )
    if file.get(f"{architecture}.expert_count", int):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported as a GGUF file.")

    hidden_size = file.require(f"{architecture}.embedding_length", Count)
    num_attention_heads = file.require(f"{architecture}.attention.head_count", Count)
    head_dim = file.get(f"{architecture}.attention.key_length", Count, hidden_size // num_attention_heads)
    check_keys(file, head_dim)
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": file.require(f"{architecture}.feed_forward_length", Count),
        "num_hidden_layers": _num_layers(file),
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": file.get(f"{architecture}.attention.head_count_kv", Count, num_attention_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.require(f"{architecture}.context_length", Count),
        "rms_norm_eps": file.require(f"{architecture}.attention.layer_norm_rms_epsilon", Positive),
        "rope_theta": file.get(f"{architecture}.rope.freq_base", Positive, 10000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": _vocab_size(file),
    }
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: file.token_id(name) for key, name in ids.items()}
    return config | {key: token_id for key, token_id in found.items() if token_id is not None}


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no embedding (token_embd.weight): it is not a whole language model.")
    num_tokens = len(file.require("tokenizer.ggml.tokens", list[str]))
    if num_tokens > embedding.shape[0]:
        raise ModelError(f"{file.path} is damaged: it has {num_tokens} tokens, and embeddings of {embedding.shape[0]}.")
    return embedding.shape[0]


def _num_layers(file: GGUFFile) -> int:
    num_layers: int = file.require(f"{file.architecture}.block_count", Count)
    if num_layers > len(file.tensors):
        raise ModelError(f"{file.path} is damaged: it has {num_layers} layers, but only {len(file.tensors)} tensors.")
    return num_layers


def _rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    """config.json's `rope_scaling`, from the metadata or from the tensor of frequency factors."""
    prefix = f"{file.architecture}.rope"
    if file.get(f"{prefix}.dimension_count", int, head_dim) != head_dim:
        raise ModelError(f"{file.path} rotates only a part of each head, which is not supported as a GGUF file.")
    factor = file.get(f"{prefix}.scaling.factor", Positive, file.get(f"{prefix}.scale_linear", Positive, 1.0))
    kind = file.get(f"{prefix}.scaling.type", str, "linear")  # llama.cpp reads a factor without a type in this way
    if "rope_freqs.weight" in file.tensors:
        if kind != "none" and factor != 1:
            raise ModelError(
                f"{file.path} scales its rotary frequencies twice ({prefix}.scaling.factor and rope_freqs.weight),"
                " which is not supported."
            )
        return _llama3_scaling(file, head_dim)
    match kind:
        case "none":
            return None
        case "linear":
            return None if factor == 1 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            betas = {name: file.get(f"{prefix}.scaling.yarn_{name}", Positive) for name in ("beta_fast", "beta_slow")}
            return {
                "rope_type": "yarn",
                "factor": file.require(f"{prefix}.scaling.factor", Positive),
                "original_max_position_embeddings": file.require(f"{prefix}.scaling.original_context_length", Count),
                **{name: value for name, value in betas.items() if value is not None},
            }
        case other:
            raise ModelError(f"{file.path} scales its rotary frequencies by {other!r}, which is not supported.")


def _llama3_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Llama 3's parameters, recovered from the factors and proven by computing the factors again."""
    import numpy as np

    stored = read_tensor(file.path, file.tensors["rope_freqs.weight"]).astype(np.float64)
    factor = float(stored.max(initial=1.0))
    theta = file.get(f"{file.architecture}.rope.freq_base", Positive, 10000.0)
    expected = _llama3_factors(factor, theta, head_dim)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ModelError(
            f"{file.path} scales its rotary frequencies (rope_freqs.weight) in a way that is not Llama 3's. "
            "Give the model's Hugging Face id or directory instead."
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def _llama3_factors(factor: float, theta: float, head_dim: int) -> "np.ndarray":
    """By how much each frequency is divided: 1 for short wavelengths, `factor` for long ones, smooth between."""
    import numpy as np

    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
