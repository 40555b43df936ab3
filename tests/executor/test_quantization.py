"""Quantized checkpoints: the logits of what they stand for, from weights that stay as small as they came.

Logits of the reference kernels are within 1e-4 of the largest of those of a model of the dequantized float32 weights:
only the order of sums differs. The CPU's kernels round their inputs besides.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.executor.models import Decoder, LoadPlan, TensorParallel, load_model, read_model_config
from octavo.executor.models.layers import packed_weights
from octavo.executor.quantization import round_weight
from octavo.executor.start.fingerprint import model_fingerprint
from octavo.executor.start.startup import start_executor
from octavo.kernels import cpu, reference
from octavo.protocol.config import Config
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.loading_process import loading_bytes
from tests.fakes.paged_decoding import PagedDecoding, assert_near, assert_rounded
from tests.fakes.quantized_checkpoints import (
    SIZES,
    UNCONVERTED,
    Twins,
    awq,
    compressed_fp8,
    compressed_packed,
    fp8_blocks,
    gptq,
)

TOKEN_IDS = list(range(3, 300, 13))
LAYER = "model.layers.0.self_attn.o_proj"


def load(directory: Path, **options: Any) -> Decoder:
    options = {"max_model_len": 64, "progress": False, "backend": cpu} | options
    return load_model(LoadPlan(directory, read_model_config(directory), torch.float32, **options))


def logits(model: Decoder) -> Tensor:
    return PagedDecoding(model, 16, 4, torch.float32).score(TOKEN_IDS)


def bits_a_weight(directory: Path) -> float:
    """Return what a weight of the quantized projections takes in memory, everything that belongs to it included."""
    model = load(directory, backend=reference)
    num_bytes = sum(packed.nbytes for packed in packed_weights(model)) - model.lm_head.packed[0].nbytes
    weights = load_file(directory.parent / "plain" / "model.safetensors")
    plain_bytes = sum(weight.nbytes for name, weight in weights.items() if UNCONVERTED in name)
    num_weights = sum(weight.numel() for name, weight in weights.items() if "_proj" in name and UNCONVERTED not in name)
    return 8 * (num_bytes - plain_bytes) / num_weights


def change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


def change_tensors(directory: Path, **changed: Tensor | None) -> None:
    """Replace parts of LAYER, or remove them."""
    tensors = load_file(directory / "model.safetensors")
    for leaf, tensor in changed.items():
        tensors.pop(f"{LAYER}.{leaf}", None)
        if tensor is not None:
            tensors[f"{LAYER}.{leaf}"] = tensor
    save_file(tensors, directory / "model.safetensors")


CHECKPOINTS: dict[str, tuple[Callable[[Path], Twins], float]] = {
    "AWQ, groups of 32": (lambda folder: awq(folder, 32), 4 + 48 / 32),
    "AWQ, groups of 64": (lambda folder: awq(folder, 64), 4 + 48 / 64),
    "AWQ, groups of 128": (lambda folder: awq(folder, 128), 4 + 48 / 128),
    "GPTQ, groups of 32": (lambda folder: gptq(folder, 32), 4 + 48 / 32),
    "GPTQ, groups of 64, second format": (lambda folder: gptq(folder, 64, version="gptq_v2"), 4 + 48 / 64),
    "GPTQ, groups of 128, symmetric": (lambda folder: gptq(folder, 128, symmetric=True), 4 + 16 / 128),
    "GPTQ, 8 bits, symmetric": (lambda folder: gptq(folder, 32, bits=8, symmetric=True), 8 + 16 / 32),
    "GPTQ, no groups": (lambda folder: gptq(folder, -1), 4 + 48 / 128),
    "compressed-tensors, groups of 32": (lambda folder: compressed_packed(folder, 32), 4 + 16 / 32),
    "compressed-tensors, zero points": (
        lambda folder: compressed_packed(folder, 128, symmetric=False),
        4 + 48 / 128,
    ),
    "compressed-tensors, 8 bits, channels": (lambda folder: compressed_packed(folder, -1, bits=8), 8 + 16 / 128),
    "fp8, blocks": (fp8_blocks, 32),
    "fp8, channels": (lambda folder: compressed_fp8(folder, "channel"), 32),
    "fp8, tensors": (lambda folder: compressed_fp8(folder, "tensor"), 32),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_quantized_model_computes_what_it_stands_for_in_its_own_size(name: str, tmp_path: Path) -> None:
    """One projection is left plain, among quantized ones that are fused with it."""
    make, expected_bits = CHECKPOINTS[name]
    twins = make(tmp_path)
    expected_TV = logits(load(twins.plain))
    assert_near(logits(load(twins.quantized, backend=reference)), expected_TV)
    assert_rounded(logits(load(twins.quantized)), expected_TV)
    assert bits_a_weight(twins.quantized) == pytest.approx(expected_bits, rel=1e-9)


def test_biases_are_those_of_the_parts(tmp_path: Path) -> None:
    """A fused layer whose parts are products of their own has its bias in parts, too."""
    twins = awq(tmp_path, architecture="Qwen2ForCausalLM")
    expected_TV = logits(load(twins.plain))
    assert_near(logits(load(twins.quantized, backend=reference)), expected_TV)
    assert_rounded(logits(load(twins.quantized)), expected_TV)


def test_older_tools_describe_their_checkpoint_in_a_file_of_its_own(tmp_path: Path) -> None:
    for make, name in ((awq, "quant_config.json"), (gptq, "quantize_config.json")):
        twins = make(tmp_path / name)
        expected_TV = logits(load(twins.quantized))
        described = json.loads((twins.quantized / "config.json").read_text())["quantization_config"]
        change_config(twins.quantized, lambda config: config.pop("quantization_config"))
        old = {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True} if make is awq else described
        (twins.quantized / name).write_text(json.dumps(old))
        assert torch.equal(logits(load(twins.quantized)), expected_TV)


def test_groups_that_ranks_cannot_share_are_refused_with_what_they_can(tmp_path: Path) -> None:
    directory = awq(tmp_path, 64).quantized
    with pytest.raises(
        ValueError, match=rf"{LAYER} \(awq\) of .*128 inputs in groups of 64 .* among 4 ranks .*, but among 1, 2$"
    ):
        load(directory, parallel=TensorParallel(0, 4))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scales": None}, r"o_proj \(gptq\) of .*quantized: scales is missing"),
        ({"qweight": torch.zeros(8, 128, dtype=torch.int32)}, r"qweight has shape \[8, 128\] .* \[16, 128\] of I32"),
        ({"qzeros": torch.zeros(4, 16)}, r"qzeros has .* type F32, but \[4, 16\] of I32"),
        ({"g_idx": torch.arange(128).int() % 4}, r"act-order"),
        ({"bias": torch.ones(128)}, r"of no use to the model, 1 tensor: .*o_proj\.bias"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changed: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    directory = gptq(tmp_path, 32).quantized
    change_tensors(directory, **changed)
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_a_float8_weight_without_its_scale_is_named(tmp_path: Path) -> None:
    directory = fp8_blocks(tmp_path).quantized
    change_tensors(directory, weight_scale_inv=torch.ones(3, 3))
    with pytest.raises(ValueError, match=rf"{LAYER}\.weight of .*scales have shape \[3, 3\]"):
        load(directory)
    change_tensors(directory, weight_scale_inv=None)
    with pytest.raises(ValueError, match=rf"{LAYER}\.weight of .* there is no {LAYER}\.weight_scale or"):
        load(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "gptq: .*3"),
        ({"desc_act": True}, r"grouped out of order \(desc_act, act-order\)"),
        ({"group_size": 24}, "group_size 24"),
        ({"group_size": 256}, "128 inputs do not divide into groups of 256"),
        ({"bits": 8}, r"qweight has shape \[16, 128\] .* \[32, 128\]"),
        ({"checkpoint_format": "marlin"}, "'marlin' is not supported; supported: gptq, gptq_v2"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported; supported: awq, gptq, gguf, fp8"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"0": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}},
            },
            r"'nvfp4-pack-quantized' \(float of 4 bits, a scale for each tensor_group\) is not supported; supported:",
        ),
    ],
)
def test_descriptions_that_are_not_supported_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = gptq(tmp_path, 32).quantized
    change_config(directory, lambda config: config["quantization_config"].update(change))
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_what_an_operator_names_must_be_what_the_checkpoint_is(tmp_path: Path) -> None:
    quantized, plain = awq(tmp_path)
    load(quantized, quantization="awq")
    for directory, asked, words in (
        (quantized, "gptq", "set to gptq, but .* quantized with awq"),
        (quantized, "int8", "int8 rounds plain weights, but this checkpoint is quantized with awq"),
        (plain, "awq", "set to awq, but .* not quantized"),
    ):
        with pytest.raises(ValueError, match=words):
            start_executor(Config(model=str(directory), quantization=asked))


@pytest.mark.parametrize(("bits", "step"), [(8, 1 / 127), (4, 1 / 7)])
@pytest.mark.parametrize("num_inputs", [128, 64, 96])
def test_rounding_is_to_the_nearest_code(bits: int, step: float, num_inputs: int) -> None:
    """Within half a step of a group's range, and a little more for scales and offsets in float16."""
    weight = torch.randn(40, num_inputs, generator=torch.Generator().manual_seed(0))
    weight[0] *= 1e-6  # too small for a scale in float16
    weight[1] = 0.25  # nothing to scale
    for part in (weight, weight[1:]):
        rounded = round_weight(part, bits)
        assert rounded is not None
        assert rounded.group_size == {128: 128, 64: 64, 96: 32}[num_inputs]
        assert rounded.scales_NG.dtype == (torch.float32 if part is weight else torch.float16)
        largest = part.unflatten(1, (-1, rounded.group_size)).abs().amax(-1)
        error = (rounded.dequantize() - part).unflatten(1, (-1, rounded.group_size)).abs().amax(-1)
        assert (error <= 0.51 * step * largest).all()


def test_inputs_that_are_no_groups_stay_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert round_weight(torch.ones(4, 48), 8) is None
    directory = make_checkpoint(tmp_path, intermediate_size=80)
    model = load(directory, quantization="int8")
    assert "layers.0.mlp.down_proj.weight stays plain: 80 inputs" in caplog.text
    forms = [packed.form for packed in packed_weights(model)]
    assert sum("8-bit" in form for form in forms) == 3 * 3  # all but each layer's down_proj and the head


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.125), ("int4", 4.25)])
def test_a_plain_model_is_rounded_at_load(quantization: str, bits: float, tmp_path: Path) -> None:
    """All projections are; embedding and head stay plain."""
    plain = make_checkpoint(tmp_path / "plain", **SIZES)
    model = load(plain, quantization=quantization, backend=reference)
    projections = [packed for packed in packed_weights(model) if packed not in model.lm_head.packed]
    weights = load_file(plain / "model.safetensors")
    num_weights = sum(weight.numel() for name, weight in weights.items() if "_proj" in name)
    assert 8 * sum(packed.nbytes for packed in projections) / num_weights == pytest.approx(bits)

    for name, weight in weights.items():
        if "_proj" in name:
            rounded = round_weight(weight, int(quantization.removeprefix("int")))
            assert rounded is not None
            weights[name] = rounded.dequantize()
    before_TV = logits(load(plain))
    save_file(weights, plain / "model.safetensors")
    expected_TV = logits(load(plain))
    assert not torch.allclose(expected_TV, before_TV, rtol=1e-4, atol=1e-4)
    assert_near(logits(model), expected_TV)


def test_dummy_weights_take_what_the_checkpoints_would(tmp_path: Path) -> None:
    twins = awq(tmp_path, 128)
    (twins.quantized / "model.safetensors").unlink()
    model = load(twins.quantized, load_format="dummy")
    assert sum("4-bit" in packed.form for packed in packed_weights(model)) == 2 * 4


def test_the_fingerprint_says_how_weights_are_rounded(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    config = read_model_config(directory)
    found = {
        model_fingerprint(
            LoadPlan(
                directory, config, torch.float32, max_model_len=32, load_format="auto", backend=cpu, quantization=mode
            )
        )
        for mode in ("auto", "int8", "int4")
    }
    assert len(found) == 3


def test_the_start_says_what_is_held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        start_executor(Config(model=str(awq(tmp_path).quantized), num_threads=1, kv_cache_memory_bytes=1 << 20))
    [line] = [record.message for record in caplog.records if "of weights" in record.message]
    assert "4-bit" in line
    assert "float32 weights" in line


@pytest.mark.parametrize("write", [awq, gptq])
def test_a_process_holds_no_more_than_the_packed_weights(write: Callable[..., Twins], tmp_path: Path) -> None:
    """31 million weights: 22 MB as they are packed, 63 MB in bfloat16, 126 MB in float32; libraries take some 30 MB."""
    twins = write(tmp_path, 32, hidden_size=1024, intermediate_size=4096)
    quantized, plain = loading_bytes(twins.quantized), loading_bytes(twins.plain)
    assert 20e6 < quantized < 60e6
    assert plain - quantized > 95e6
