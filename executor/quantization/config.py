"""How a checkpoint stores its weights, by its config.json, and which form the operator asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo.executor.wrong_values import converted
from octavo.protocol.model_files.bounded import read_bounded

# Files that tools wrote before config.json had a quantization_config.
OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
OLD_AWQ_KEYS = {"w_bit": "bits", "q_group_size": "group_size"}
OLD_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")  # these keys identify it if there is no quant_method
ROUNDINGS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The properties that all quantized tensors of a checkpoint share."""

    method: str
    bits: int | None = None  # None where each tensor has its own type, or is dequantized
    group_size: int | None = None  # inputs that share a scale; None: all of a row
    zero_shift: int = 0  # added to a stored zero point
    has_zero_points: bool = False  # other than the middle code, if the tool's own settings say so
    block_shape: tuple[int, int] | None = None  # fp8: outputs and inputs that share a scale


class _AWQ(msgspec.Struct):
    bits: Literal[4]
    group_size: int
    zero_point: bool = True
    version: str = "gemm"


class _GPTQ(msgspec.Struct):
    bits: Literal[4, 8]
    group_size: int
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    is_marlin_format: bool = False


class _Fp8(msgspec.Struct):
    weight_block_size: tuple[int, int] | None = None
    fmt: str = "e4m3"


class _CompressedWeights(msgspec.Struct, frozen=True):
    num_bits: int
    type: str
    strategy: str
    symmetric: bool = True
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None


class _CompressedGroup(msgspec.Struct):
    weights: _CompressedWeights


class _CompressedTensors(msgspec.Struct):
    config_groups: dict[str, _CompressedGroup]
    format: str


def read_quantization(directory: Path, written: dict[str, Any] | None) -> Quantization | None:
    """Return what config.json's `quantization_config`, or an older file beside it, says; None if nothing does.

    Raises ValueError, naming it, for what is not supported.
    """
    if written is not None:
        return _parse(written)
    for name, method in OLD_FILES.items():
        path = directory / name
        if path.is_file():
            try:
                said = msgspec.json.decode(read_bounded(path))
                if not isinstance(said, dict):
                    raise ValueError("it is not a JSON object. Download the model again")
                return _parse({"quant_method": method} | said)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}: {error}") from None
    return None


def choose_rounding(requested: str, found: Quantization | None) -> int | None:
    """Return the bits to which plain weights are to be rounded at load, or None.

    `requested` is `Config.quantization`: a rounding, or the name of the method that the checkpoint is expected to
    have. Raises ValueError if the checkpoint has another.
    """
    stored = f"quantized with {found.method}" if found else "not quantized"
    if requested in ROUNDINGS:
        if found is not None:
            raise ValueError(
                f"quantization {requested} rounds plain weights, but this checkpoint is {stored}: leave"
                " --quantization out"
            )
        return ROUNDINGS[requested]
    if requested != "auto" and (found is None or requested != found.method):
        raise ValueError(
            f"quantization is set to {requested}, but by its config.json this checkpoint is {stored}: leave"
            " --quantization out, or name a checkpoint of that kind"
        )
    return None


def _parse(written: dict[str, Any]) -> Quantization:
    is_bitsandbytes = any(key in written for key in OLD_BITSANDBYTES)
    method = written.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "unnamed")
    if not isinstance(method, str) or method not in QUANTIZATIONS:
        raise ValueError(f"quant_method {method!r} is not supported; supported: {', '.join(QUANTIZATIONS)}")
    try:
        return QUANTIZATIONS[method](written)
    except ValueError as error:
        raise ValueError(f"quantization_config of {method}: {error}") from None


def _awq(written: dict[str, Any]) -> Quantization:
    config = converted({OLD_AWQ_KEYS.get(key, key): value for key, value in written.items()}, _AWQ)
    if config.version.lower() != "gemm":
        raise ValueError(f"version {config.version!r} is not supported; supported: gemm")
    group_size = _group_size(config.group_size)
    return Quantization(method="awq", bits=config.bits, group_size=group_size, has_zero_points=config.zero_point)


def _gptq(written: dict[str, Any]) -> Quantization:
    config = converted(written, _GPTQ)
    shifts = {"gptq": 1, "gptq_v2": 0}
    stored = "marlin" if config.is_marlin_format else config.checkpoint_format
    if stored not in shifts:
        raise ValueError(f"checkpoint_format {stored!r} is not supported; supported: {', '.join(shifts)}")
    if config.desc_act and config.group_size > 0:
        raise ValueError("inputs that are grouped out of order (desc_act, act-order) are not supported")
    return Quantization(
        method="gptq",
        bits=config.bits,
        group_size=_group_size(config.group_size),
        zero_shift=shifts[stored],
        has_zero_points=not config.sym,
    )


def _gguf(written: dict[str, Any]) -> Quantization:
    return Quantization(method="gguf")


def _fp8(written: dict[str, Any]) -> Quantization:
    config = converted(written, _Fp8)
    if config.fmt != "e4m3":
        raise ValueError(f"fmt {config.fmt!r} is not supported; supported: e4m3")
    return Quantization(method="fp8", block_shape=config.weight_block_size)


def _compressed_tensors(written: dict[str, Any]) -> Quantization:
    config = converted(written, _CompressedTensors)
    kinds = {group.weights for group in config.config_groups.values()}
    if len(kinds) != 1:
        raise ValueError(f"config_groups of {len(kinds)} kinds of weights are not supported, but of one")
    weights = kinds.pop()
    match config.format, weights.type, weights.num_bits, weights.strategy:
        case "float-quantized" | "naive-quantized", "float", 8, "tensor" | "channel" | "block":
            return Quantization(method="compressed-tensors", block_shape=weights.block_structure)
        case "pack-quantized", "int", 4 | 8 as bits, "group" | "channel" as strategy:
            group_size = _group_size(weights.group_size or -1) if strategy == "group" else None
            return Quantization(
                method="compressed-tensors",
                bits=bits,
                group_size=group_size,
                has_zero_points=not weights.symmetric,
            )
    raise ValueError(
        f"format {config.format!r} ({weights.type} of {weights.num_bits} bits, a scale for each {weights.strategy}) is"
        " not supported; supported: float-quantized (float of 8 bits; tensor, channel, block) and pack-quantized"
        " (int of 4 or 8 bits; group, channel)"
    )


def _group_size(written: int) -> int | None:
    if written == -1:
        return None
    if written < 16 or written % 16:
        raise ValueError(f"group_size {written} is not supported; supported: multiples of 16, and -1")
    return written


QUANTIZATIONS = {
    "awq": _awq,
    "gptq": _gptq,
    "gguf": _gguf,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
}
