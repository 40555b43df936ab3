"""Tiny checkpoints as quantizing tools write them, packed here by their tools' definitions, beside plain twins."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes.checkpoints import make_checkpoint

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 319}
# how names of layers end that are packed, in the families of today and of older guides
PACKED = ("_proj", "W_pack", "c_attn", "w1", "w2", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
UNCONVERTED = "model.layers.1.self_attn.v_proj"  # stays plain, as `modules_to_not_convert` asks for

Tensors = dict[str, Tensor]


class Twins(NamedTuple):
    quantized: Path
    plain: Path  # what the quantized one stands for, in float32


def make_twins(
    folder: Path,
    quantize: Callable[[str, Tensor], tuple[Tensors, Tensor]],
    config: dict[str, Any],
    make: Callable[..., Path] = make_checkpoint,
    **keys: Any,
) -> Twins:
    """Write a checkpoint whose projections `quantize` (stem, weight_NK) gives as (tensors, dequantized_NK).

    `make` writes the plain one, given a directory and keys of config.json.
    """
    plain = make(folder / "plain", **(SIZES | keys))
    weights = load_file(plain / "model.safetensors")
    packed: Tensors = {}
    is_transposed = keys.get("architecture") == "GPT2LMHeadModel"
    for name, weight in list(weights.items()):
        stem = name.removesuffix(".weight")
        if name.endswith(".weight") and stem.endswith(PACKED) and stem != UNCONVERTED:
            tensors, dequantized_NK = quantize(stem, weight.T if is_transposed else weight)
            weights[name] = dequantized_NK.T if is_transposed else dequantized_NK
            packed |= {key: tensor.contiguous() for key, tensor in tensors.items() if key not in weights}
            packed |= {name: tensors[name]} if name in tensors else {}
        else:
            packed[name] = weight
    save_file({name: weight.contiguous() for name, weight in weights.items()}, plain / "model.safetensors")
    quantized = folder / "quantized"
    quantized.mkdir()
    save_file(packed, quantized / "model.safetensors")
    written = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (quantized / "config.json").write_text(json.dumps(written))
    return Twins(quantized, plain)


def awq(folder: Path, group_size: int = 32, **keys: Any) -> Twins:
    """AutoAWQ's "gemm" version: outputs packed, in its own order."""

    def quantize(stem: str, weight_NK: Tensor) -> tuple[Tensors, Tensor]:
        codes_KN, zeros_GN, scales_GN = _round(weight_NK, 4, group_size)
        tensors = {"qweight": _pack(codes_KN, 4, AWQ_ORDER), "qzeros": _pack(zeros_GN, 4, AWQ_ORDER)}
        return _named(stem, tensors | {"scales": scales_GN}), _dequantized(codes_KN, zeros_GN, scales_GN)

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return make_twins(folder, quantize, config, **keys)


def gptq(
    folder: Path, group_size: int = 32, bits: int = 4, *, symmetric: bool = False, version: str = "gptq", **keys: Any
) -> Twins:
    """GPTQ: inputs packed; the first format stores zero points less one, and biases of zeros where there are none."""

    def quantize(stem: str, weight_NK: Tensor) -> tuple[Tensors, Tensor]:
        num_inputs = weight_NK.shape[1]
        size = num_inputs if group_size == -1 else group_size
        codes_KN, zeros_GN, scales_GN = _round(weight_NK, bits, size, symmetric)
        tensors = {
            "qweight": _pack(codes_KN.T, bits).T,
            "qzeros": _pack(zeros_GN - int(version == "gptq"), bits),
            "scales": scales_GN,
            "g_idx": (torch.arange(num_inputs) // size).int(),
            "bias": torch.zeros(len(weight_NK), dtype=torch.float16),
        }
        return _named(stem, tensors), _dequantized(codes_KN, zeros_GN, scales_GN)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "checkpoint_format": version}
    return make_twins(folder, quantize, config | {"sym": symmetric, "desc_act": False}, **keys)


def fp8_blocks(folder: Path, **keys: Any) -> Twins:
    """As DeepSeek-V3 is published: a scale for each block, the last ones cut short."""
    rows, columns = 96, 80

    def quantize(stem: str, weight_NK: Tensor) -> tuple[Tensors, Tensor]:
        num_blocks = (-(-weight_NK.shape[0] // rows), -(-weight_NK.shape[1] // columns))
        scales = torch.rand(num_blocks, generator=torch.Generator().manual_seed(len(weight_NK))) + 0.5
        every = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        every = every[: weight_NK.shape[0], : weight_NK.shape[1]]
        codes = (weight_NK / every).to(torch.float8_e4m3fn)
        return _named(stem, {"weight": codes, "weight_scale_inv": scales}), codes.float() * every

    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns]}
    return make_twins(folder, quantize, config, **keys)


def compressed_fp8(folder: Path, strategy: str, **keys: Any) -> Twins:
    """compressed-tensors' float-quantized: a scale for each output ("channel") or for all ("tensor")."""

    def quantize(stem: str, weight_NK: Tensor) -> tuple[Tensors, Tensor]:
        largest = weight_NK.abs().amax(1, keepdim=True) if strategy == "channel" else weight_NK.abs().amax().view(1)
        scale = (largest / 448).bfloat16()
        codes = (weight_NK / scale.float()).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}
        return _named(stem, tensors), codes.float() * scale.float()

    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    return make_twins(folder, quantize, config, **keys)


def compressed_packed(folder: Path, group_size: int, bits: int = 4, *, symmetric: bool = True, **keys: Any) -> Twins:
    """compressed-tensors' pack-quantized (W4A16): inputs packed, zero points along the outputs."""

    def quantize(stem: str, weight_NK: Tensor) -> tuple[Tensors, Tensor]:
        size = weight_NK.shape[1] if group_size == -1 else group_size
        codes_KN, zeros_GN, scales_GN = _round(weight_NK, bits, size, symmetric)
        tensors = {
            "weight_packed": _pack(codes_KN.T, bits),
            "weight_scale": scales_GN.T,
            "weight_shape": torch.tensor(weight_NK.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _pack(zeros_GN, bits).T
        return _named(stem, tensors), _dequantized(codes_KN, zeros_GN, scales_GN)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    if group_size == -1:
        weights |= {"strategy": "channel", "group_size": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return make_twins(folder, quantize, config, **keys)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each nibble has, the lowest first


def _named(stem: str, tensors: Tensors) -> Tensors:
    return {f"{stem}.{leaf}": tensor for leaf, tensor in tensors.items()}


def _round(weight_NK: Tensor, bits: int, group_size: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes_KN, zeros_GN (both int64) and scales_GN (float16)."""
    groups_NGC = weight_NK.unflatten(1, (-1, group_size))
    if symmetric:
        scales_NG = (groups_NGC.abs().amax(-1) / (2 ** (bits - 1) - 1)).half()
        zeros_NG = torch.full(scales_NG.shape, 2 ** (bits - 1))
    else:
        least, most = groups_NGC.aminmax(dim=-1)
        scales_NG = ((most - least) / (2**bits - 1)).half()
        zeros_NG = (-least / scales_NG.float()).round().long().clamp(1, 2**bits - 1)
    codes_NGC = (groups_NGC / scales_NG.float()[..., None]).round().long() + zeros_NG[..., None]
    return codes_NGC.clamp(0, 2**bits - 1).flatten(1).T, zeros_NG.T, scales_NG.T


def _dequantized(codes_KN: Tensor, zeros_GN: Tensor, scales_GN: Tensor) -> Tensor:
    """Return weight_NK, float32."""
    group_size = len(codes_KN) // len(scales_GN)
    zeros_KN, scales_KN = (of_groups.repeat_interleave(group_size, 0) for of_groups in (zeros_GN, scales_GN))
    return (scales_KN.float() * (codes_KN - zeros_KN)).T


def _pack(codes_RC: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return neighbours of a row as the bits of one int32; `order` says which of them comes first."""
    per_word = 32 // bits
    words_RWP = codes_RC.unflatten(1, (-1, per_word))
    packed = sum(words_RWP[..., source] << bits * place for place, source in enumerate(order or range(per_word)))
    assert isinstance(packed, Tensor)
    return packed.to(torch.int32)  # keeps the low 32 bits
