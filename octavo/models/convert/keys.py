"""Each key of a GGUF file that changes text, ends or tensors is read, or refused by name.

The keys are those of ggml's docs/gguf.md and of llama.cpp (`LLM_KV_NAMES` in src/llama-arch.cpp). A key in none of
these tables is new, or of somebody's own making: the log names it.
"""

import fnmatch
import logging
import math
from typing import Any

from octavo.errors import ModelError
from octavo.models.convert.metadata import GGUFFile
from octavo.protocol.process import paragraph

logger = logging.getLogger(__name__)

# Read by this package; ARCH stands for the architecture's name.
READ = {
    *("general.architecture", "general.alignment", "split.count"),
    *("general.sampling.temp", "general.sampling.top_k", "general.sampling.top_p", "general.sampling.min_p"),
    "general.sampling.penalty_repeat",
    *("ARCH.context_length", "ARCH.embedding_length", "ARCH.block_count", "ARCH.feed_forward_length"),
    *("ARCH.attention.head_count", "ARCH.attention.head_count_kv", "ARCH.attention.key_length"),
    *("ARCH.attention.layer_norm_rms_epsilon", "ARCH.expert_count"),
    *("ARCH.rope.dimension_count", "ARCH.rope.freq_base", "ARCH.rope.scale_linear"),
    *("ARCH.rope.scaling.type", "ARCH.rope.scaling.factor", "ARCH.rope.scaling.original_context_length"),
    *("ARCH.rope.scaling.yarn_beta_fast", "ARCH.rope.scaling.yarn_beta_slow"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"),
    *("tokenizer.ggml.scores", "tokenizer.ggml.merges", "tokenizer.chat_template"),
    *("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"),
    *("tokenizer.ggml.eom_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id"),
    *("tokenizer.ggml.fim_pad_token_id", "tokenizer.ggml.fim_rep_token_id", "tokenizer.ggml.fim_sep_token_id"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"),
}

# The values with which a key changes nothing. With any other value the file is refused: its model computes in a way,
# or its vocabulary splits text in a way, that is not known here.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (2,),  # of the blocks that are read
    "ARCH.attention.causal": (True,),
    "ARCH.attention.clamp_kqv": (0,),
    "ARCH.attention.max_alibi_bias": (0,),
    "ARCH.attention.output_scale": (0, 1),
    "ARCH.attention.shared_kv_layers": (0,),
    "ARCH.attention.sliding_window": (0,),  # and what is as long as the context, too
    "ARCH.attention.sliding_window_pattern": (0,),
    "ARCH.attention.temperature_length": (0,),
    "ARCH.attention.temperature_scale": (0,),
    "ARCH.attention.kv_lora_rank": (0,),
    "ARCH.attention.q_lora_rank": (0,),
    "ARCH.attn_logit_softcapping": (0,),
    "ARCH.final_logit_softcapping": (0,),
    "ARCH.logit_scale": (0, 1),
    "ARCH.embedding_scale": (0, 1),
    "ARCH.residual_scale": (0, 1),
    "ARCH.activation_sparsity_scale": (0,),
    "ARCH.expert_used_count": (0,),
    "ARCH.expert_shared_count": (0,),
    "ARCH.n_deepstack_layers": (0,),
    "ARCH.nextn_predict_layers": (0,),
    "ARCH.pooling_type": (0,),  # the other values make a vector of a text
    "ARCH.swin_norm": (False,),
    "ARCH.use_parallel_residual": (False,),
    "ARCH.rope.dimension_sections": (),
    "ARCH.rope.dimension_count_swa": (),
    "ARCH.rope.freq_base_swa": (),
    "ARCH.rope.scaling.alpha": (0, 1),
    "ARCH.rope.scaling.attn_factor": (1,),
    "ARCH.rope.scaling.yarn_attn_factor": (1,),
    "ARCH.rope.scaling.yarn_ext_factor": (1, -1),  # -1: as the type has it
    "ARCH.rope.scaling.yarn_log_multiplier": (0,),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.normalizer.lowercase": (False,),
}

# The origin of a model, settings of other programs and of other kinds of models, and what other keys say too.
HARMLESS = (
    "general.*",
    *("split.no", "split.tensors.count", "imatrix.*", "quantize.*", "training.*"),
    *("ARCH.vocab_size", "ARCH.tensor_data_layout", "ARCH.rope.scaling.finetuned", "ARCH.attention.layer_norm_epsilon"),
    *("ARCH.attention.value_length", "ARCH.attention.scale"),  # checked below
    *("ARCH.leading_dense_block_count", "ARCH.expert_*", "ARCH.moe_*"),  # without experts
    *("tokenizer.chat_templates", "tokenizer.chat_template.*"),  # the names of named templates, which are read
    *("tokenizer.huggingface.json", "tokenizer.rwkv.world", "tokenizer.ggml.added_tokens"),
    *("tokenizer.ggml.token_type_count", "tokenizer.ggml.mask_token_id", "tokenizer.ggml.cls_token_id"),
    "tokenizer.ggml.seperator_token_id",
    *("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"),  # of Unigram vocabularies
    *("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.fim_mid_token_id"),
    *("tokenizer.ggml.prefix_token_id", "tokenizer.ggml.suffix_token_id", "tokenizer.ggml.middle_token_id"),
)
# The parts of the recommended sampling that no request can ask for here. The other parts are read.
NO_SAMPLING = (
    *("general.sampling.sequence", "general.sampling.penalty_last_n", "general.sampling.xtc_*"),
    "general.sampling.mirostat*",
)
LONGEST_SHOWN = 10  # keys, in one line of the log


def check_keys(file: GGUFFile, head_dim: int) -> None:
    """Raise ModelError for a key whose value asks for something unsupported. The log names keys without effect."""
    for key, allowed in NEUTRAL.items():
        name = _named(key, file)
        value = file.get(name, Any)
        if value is not None and value not in allowed and not _is_no_window(file, key, value):
            raise ModelError(
                f"{file.path} has {name} {_shown(value)}, which is not supported"
                + (f"; supported: {', '.join(map(str, allowed))}" if allowed else "")
                + ". Give the model's Hugging Face id or directory instead."
            )
    _check_heads(file, head_dim)
    ignored = [key for key in file.keys if _matches(key, NO_SAMPLING, file)]
    known = (*READ, *NEUTRAL, *HARMLESS)
    ignored += [key for key in file.keys if not _matches(key, known, file)]
    if ignored:
        more = f" and {len(ignored) - LONGEST_SHOWN} more" if len(ignored) > LONGEST_SHOWN else ""
        shown = ", ".join(paragraph(key[:80]) for key in ignored[:LONGEST_SHOWN])
        logger.warning("%s has keys that are not known here, and have no effect: %s%s", file.path, shown, more)


def _check_heads(file: GGUFFile, head_dim: int) -> None:
    """Raise ModelError for values of another size than keys, and for scores that are scaled by another factor."""
    value_length = file.get(f"{file.architecture}.attention.value_length", int, head_dim)
    scale = file.get(f"{file.architecture}.attention.scale", float, 0.0)
    if value_length != head_dim:
        raise ModelError(f"{file.path} has values of {value_length} and keys of {head_dim}, which is not supported.")
    if scale and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-4):
        raise ModelError(f"{file.path} has {file.architecture}.attention.scale {scale}, which is not supported.")


def _is_no_window(file: GGUFFile, key: str, value: object) -> bool:
    longest = file.get(f"{file.architecture}.context_length", int, 0)
    return key == "ARCH.attention.sliding_window" and isinstance(value, int) and value >= longest


def _matches(key: str, patterns: tuple[str, ...], file: GGUFFile) -> bool:
    return any(fnmatch.fnmatchcase(key, _named(pattern, file)) for pattern in patterns)


def _named(key: str, file: GGUFFile) -> str:
    return key.replace("ARCH", file.architecture)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
