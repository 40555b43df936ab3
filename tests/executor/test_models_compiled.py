"""The compiled decoder gives the bits of the decoder that is the truth, whatever a checkpoint's options."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.bench.step.floor import ATTENTION, KV_STORE, NORMS
from octavo.executor.models import Decoder, LoadPlan, load_model, read_model_config
from octavo.executor.models.compiled import Written, compile_decoder
from octavo.executor.models.config import ModelConfig
from octavo.executor.quantization import round_weight
from octavo.executor.step.progress import StepProgress
from octavo.kernels import cpu, reference
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.paged_decoding import PagedDecoding

DTYPES = [torch.float32, torch.bfloat16]
MAX_MODEL_LEN = 700  # more than one partition of attention
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "norms of heads": {"qk_norm": True, "num_kv_heads": 1, "num_heads": 6},
    "windows": {"sliding_windows": (5, None, 600)},
    "distances": {"alibi": True, "num_heads": 6},
    "partial rotation": {"rotary_dim": 8, "num_kv_heads": 4},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    read = read_model_config(make_checkpoint(tmp_path_factory.mktemp("tiny")))
    assert isinstance(read, ModelConfig)
    return read


def load(config: ModelConfig, dtype: torch.dtype, quantization: str = "int4", **others: Any) -> Decoder:
    given = {"backend": cpu, "load_format": "dummy", "quantization": quantization, **others}
    model = load_model(LoadPlan(Path(), config, dtype, max_model_len=MAX_MODEL_LEN, **given))
    assert isinstance(model, Decoder)
    return model


def logits(model: Decoder, dtype: torch.dtype, block_size: int) -> list[Tensor]:
    """Return the logits of a prompt in chunks, of decode steps beside other prompts, and of some sequences' steps."""
    decoding = PagedDecoding(model, 3 * MAX_MODEL_LEN // block_size, block_size, dtype)
    ids = [(7 * i + i * i) % 317 for i in range(MAX_MODEL_LEN)]
    steps: list[dict[int, list[int]]] = [{0: ids[:1]}, {0: ids[1:530]}, {0: [3]}, {0: [4], 1: ids[:40]}, {1: [5]}]
    steps += [{0: [6], 1: ids[40:43], 2: ids[9:11]}, {2: [7], 0: [8], 1: [9]}, {0: [10], 1: [11]}]
    return [decoding.step(chunks) for chunks in steps]


def assert_same_bits(model: Decoder, dtype: torch.dtype) -> None:
    for block_size in (4, 16):
        model.compiled = None
        expected = logits(model, dtype, block_size)
        model.compiled = compile_decoder(model)
        assert model.compiled is not None
        for number, (step, right) in enumerate(zip(logits(model, dtype, block_size), expected, strict=True)):
            assert torch.equal(step, right), f"step {number}"
        assert not torch.equal(expected[2], expected[-1][:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_bits_for_every_option(config: ModelConfig, options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_same_bits(load(replace(config, **options), dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_for_parts_of_different_forms(config: ModelConfig, dtype: torch.dtype) -> None:
    model = load(replace(config, qkv_bias=True), dtype)
    generator = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        for linear, sizes in ((layer.self_attn.qkv_proj, (64, 32, 32)), (layer.mlp.gate_up_proj, (96, 96))):
            linear.packed = [
                cpu.pack_linear(round_weight(torch.randn(size, 64, generator=generator), bits), torch.randn(size))
                for size, bits in zip(sizes, (4, 8, 4), strict=False)
            ]
    assert_same_bits(model, dtype)


def test_layers_are_counted(config: ModelConfig) -> None:
    model = load(config, torch.float32)
    for form in (None, compile_decoder(model)):
        model.compiled, progress = form, StepProgress()
        model.watch_layers(progress.count_layers)
        PagedDecoding(model, 4, 4, torch.float32).step({0: [1, 2, 3]})
        assert progress.layers_done == 3


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_profile_is_that_of_a_step_and_names_its_parts(config: ModelConfig, options: dict[str, Any]) -> None:
    model = load(replace(config, **options), torch.float32)
    compiled = model.compiled = compile_decoder(model)
    assert compiled is not None
    decoding = PagedDecoding(model, 4, 4, torch.float32)
    inputs, kv_caches = decoding._inputs({0: [1, 2, 3]}), decoding._kv_caches
    start_ns = time.perf_counter_ns()
    hidden_TE, times_ns = compiled.profile(inputs, kv_caches)
    end_ns = time.perf_counter_ns()
    hidden_TE = hidden_TE.clone()
    assert torch.equal(hidden_TE, model.forward(inputs, kv_caches))
    products = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert times_ns.keys() == {"embedding", ATTENTION, KV_STORE, NORMS, "activation", *products}
    assert min(times_ns.values()) > 0
    assert sum(times_ns.values()) <= end_ns - start_ns


def test_each_operation_belongs_to_a_part(config: ModelConfig) -> None:
    """With norms of heads, and parts of a layer that are multiplied one by one and copied side by side."""
    model = load(replace(config, qk_norm=True), torch.float32)
    for layer in model.model.layers:
        packed = [cpu.pack_linear(round_weight(torch.randn(size, 64), 4)) for size in (64, 32, 32)]
        layer.self_attn.qkv_proj.packed = packed
    kv_caches = PagedDecoding(model, 4, 4, torch.float32)._kv_caches
    written = Written(cpu.Program(1, torch.float32), model.model, kv_caches)
    layer_parts = [NORMS, *6 * ["qkv_proj"], NORMS, NORMS, KV_STORE, KV_STORE, ATTENTION, "o_proj"]
    layer_parts += [NORMS, "gate_up_proj", "activation", "down_proj"]
    assert written.parts == [*2 * ["embedding"], *3 * layer_parts, NORMS]


@pytest.mark.parametrize("others", [{"quantization": "auto"}, {"backend": reference}], ids=["plain", "reference"])
def test_other_forms_and_backends_have_no_program(config: ModelConfig, others: dict[str, Any]) -> None:
    assert compile_decoder(load(config, torch.float32, **others)) is None
