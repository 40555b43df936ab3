"""Keys of config.json by which a model computes in another way than the native decoder: refused by name.

transformers' classes of these architectures do not read these keys. A checkpoint with another value was made for other
code (a fork, or an architecture of another name), and would silently compute wrong results. All other keys are read
(`executor.models.config`), or do not concern the forward pass.
"""

from collections.abc import Mapping
from typing import Any

# the values with which a key changes nothing
NEUTRAL: dict[str, tuple[object, ...]] = {
    # attention
    "add_cross_attention": (None, False),
    "alibi": (None, False),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None, 0),
    "clip_qkv": (None,),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "kv_lora_rank": (None, 0),
    "no_rope_layers": (None, []),
    "pruned_heads": (None, {}),
    "query_pre_attn_scalar": (None,),
    "use_alibi": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "use_sinks": (None, False),
    # factors on hidden states and logits
    "attn_output_multiplier": (None, 1),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None, 0),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "residual_multiplier": (None, 1),
    "scale_depth": (None,),
    "scale_emb": (None, 1),
    # layers
    "n_routed_experts": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "parallel_attn": (None, False),
    "use_parallel_residual": (None, False),
    # adapters that were not merged, and other inputs
    "adapter_config": (None,),
    "audio_config": (None,),
    "lora_rank": (None, 0),
    "vision_config": (None,),
}


def refuse_other_models(keys: Mapping[str, Any]) -> None:
    """Raise ValueError, naming it, for a key that means another forward pass."""
    for key, neutral in NEUTRAL.items():
        if key in keys and keys[key] not in neutral:
            shown = repr(keys[key])[:80]
            raise ValueError(
                f"{key} {shown} is not supported with this architecture, whose code has no such thing; supported:"
                f" {' or '.join(map(str, neutral))}, or no {key}"
            )
