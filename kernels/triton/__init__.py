"""The kernels for GPUs, in Triton: NVIDIA's from compute capability 8.0 and AMD's; products of plain weights by torch.

The functions take the arguments of `kernels.backend`, in float16, bfloat16 or float32 and on one device, and never wait
for the device. Import this package only where it was chosen: it needs Triton. With TRITON_INTERPRET=1 everything runs
on the CPU, in numpy, for tests.
"""

import os

# Multiply-adds are fused. Triton 3.9 warns where the variable is not set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# isort: split
from octavo.kernels.reference import compilation_for, kv_dtypes, largest, program_of, rank, top_k
from octavo.kernels.triton.activations import silu_and_mul
from octavo.kernels.triton.attention import paged_attention
from octavo.kernels.triton.drawing import draw
from octavo.kernels.triton.edits import edit_logits
from octavo.kernels.triton.kv import rotate_and_store_kv, store_kv
from octavo.kernels.triton.masks import allow_tokens
from octavo.kernels.triton.norms import add_rms_norm, rms_norm
from octavo.kernels.triton.products import embedding, linear, pack_linear
from octavo.kernels.triton.sampling import scale_to_probs, uniform

__all__ = [
    "add_rms_norm",
    "allow_tokens",
    "can_be_recorded",
    "compilation_for",
    "draw",
    "edit_logits",
    "embedding",
    "kv_dtypes",
    "largest",
    "linear",
    "pack_linear",
    "paged_attention",
    "program_of",
    "rank",
    "rms_norm",
    "rotate_and_store_kv",
    "scale_to_probs",
    "silu_and_mul",
    "store_kv",
    "top_k",
    "uniform",
]


def can_be_recorded() -> bool:
    return True
