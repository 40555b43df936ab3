"""A dry run counts, without a weight, what a loaded model holds; and says which devices it would take."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from octavo.executor.models import LoadPlan, TensorParallel, load_model, read_model_config
from octavo.executor.start.dry_run import (
    Machine,
    Plan,
    fits,
    look_at_machine,
    make_plan,
    ranks_needed,
    report,
    this_machine,
)
from octavo.executor.start.footprint import native_footprint
from octavo.kernels import cpu, reference
from octavo.kernels.choice import ChosenBackend
from octavo.models.convert import link_gguf
from octavo.protocol.config import Config
from tests.fakes.borrowed_checkpoints import CASES, write
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.quantized_checkpoints import Twins, awq, compressed_packed, gptq
from tests.fakes.tiny_gguf import tiny_model, write_gguf

CPU = ChosenBackend("cpu", cpu, torch.device("cpu"))
BF16 = torch.bfloat16
GB, KIB, GIB = 10**9, 2**10, 2**30
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
MIXED = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q8_0", "blk.1.attn_k.weight": "F16", "": "Q4_K"}


def configured(directory: Path, **settings: object) -> Config:
    return msgspec.structs.replace(Config(), model=str(directory), **settings)


def plan_of(directory: Path, config_json: dict[str, Any] | None = None, **settings: object) -> Plan:
    """Return the plan of a directory, to which `config_json` is written first."""
    if config_json is not None:
        (directory / "config.json").write_text(json.dumps(config_json))
    return make_plan(configured(directory, **settings), CPU)


def machine_of(usable_bytes: int, room_bytes: int) -> Machine:
    return Machine("CPU", BF16, "the checkpoint is bfloat16", BF16, usable_bytes, room_bytes, "all")


def held_bytes(directory: Path, **options: Any) -> int:
    """Return what a loaded model holds in float32, biases of products excepted."""
    config = read_model_config(directory)
    options = {"max_model_len": 8, "backend": reference, "progress": False} | options
    model = load_model(LoadPlan(directory, config, torch.float32, **options))
    products = {id(packed): packed.nbytes for packed in model.products}  # a tied one once
    return sum(parameter.nbytes for parameter in model.parameters()) + sum(products.values())


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_counted_is_what_a_loaded_model_holds(tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=tied, attention_bias=True)
    footprint = plan_of(tmp_path).own
    biases = 3 * (64 + 2 * 32 + 64) * 4
    assert footprint.weight_bytes(torch.float32) == held_bytes(tmp_path) + biases
    assert footprint.num_parameters == transformers.LlamaForCausalLM.from_pretrained(tmp_path).num_parameters()
    assert footprint.kv_shapes == [(2, 16, 16)] * 3
    rounded = plan_of(tmp_path, quantization="int4").own.weight_bytes(torch.float32)
    assert rounded == held_bytes(tmp_path, quantization="int4") + biases


@pytest.mark.parametrize(
    ("make", "bits"),
    [
        (awq, 4 + 48 / 32),
        (partial(gptq, group_size=64, symmetric=True), 4 + 16 / 64),
        (partial(gptq, bits=8), 8 + 48 / 32),
        (partial(compressed_packed, group_size=-1), 4 + 16 / 128),
    ],
    ids=["awq", "gptq-symmetric", "gptq-8-bits", "pack-quantized-channels"],
)
def test_quantized_projections_are_counted_as_they_are_held(
    make: Callable[[Path], Twins], bits: float, tmp_path: Path
) -> None:
    directory = make(tmp_path).quantized
    own = plan_of(directory).own
    assert own.quantized_bits == bits
    unconverted = 64 * 128  # weights of a module that the tool has left plain, of which config.json does not tell
    assert own.weight_bytes(torch.float32) + unconverted * (4 - bits / 8) == held_bytes(directory)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_files_types_are_counted_exactly(tied: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": tied}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **sizes), kinds=MIXED)
    link_gguf(path, tmp_path / "linked")
    plan = plan_of(tmp_path / "linked")
    assert plan.own.weight_bytes(torch.float32) == held_bytes(tmp_path / "linked")
    assert plan.form == "weights as the GGUF file has them"
    dummy = plan_of(tmp_path / "linked", load_format="dummy").own.weight_bytes(torch.float32)
    assert dummy == held_bytes(tmp_path / "linked", load_format="dummy")


def test_llama_3_8b(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA_3_8B)
    assert plan.own.num_parameters == 8_030_261_248
    assert plan.own.weight_bytes(torch.bfloat16) == 2 * 8_030_261_248
    assert plan.own.kv_bytes(torch.bfloat16) == 128 * KIB
    assert list(plan.footprints) == [1, 2, 4, 8, 16, 32]
    assert [ranks_needed(plan, 0.9 * size * GB) for size in (16, 24, 80)] == [2, 1, 1]
    assert ranks_needed(plan, 10**8) is None
    config = configured(tmp_path)
    machine = machine_of(usable_bytes=20 * GIB, room_bytes=2 * GIB)
    said = report(config, plan, machine)
    assert fits(plan, machine)
    for line in (
        "LlamaForCausalLM (native), 8.03 billion parameters",
        "  weights                   14.96 GiB",
        "  KV cache of a token       128.00 KiB",
        "  KV cache of 8,192 tokens  1.00 GiB",
        "2.00 GiB (all): 16,384 tokens, 2.0 sequences of max_model_len",
        "  16 GB   2",
        "  141 GB  1",
        "ranks can be 1, 2, 4, 8, 16, 32",
    ):
        assert line in said


@pytest.mark.parametrize(
    ("config_json", "num_parameters"),
    [
        (
            {
                "architectures": ["ChatGLMModel"],
                "add_qkv_bias": True,
                "ffn_hidden_size": 13696,
                "hidden_size": 4096,
                "kv_channels": 128,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "num_attention_heads": 32,
                "num_layers": 28,
                "padded_vocab_size": 65024,
                "seq_length": 8192,
            },
            6_243_584_000,
        ),
        (
            {
                "architectures": ["QWenLMHeadModel"],
                "hidden_size": 4096,
                "intermediate_size": 22016,
                "kv_channels": 128,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "seq_length": 8192,
                "vocab_size": 151936,
            },
            7_721_324_544,
        ),
        (
            {
                "architectures": ["BaichuanForCausalLM"],
                "hidden_size": 5120,
                "intermediate_size": 13696,
                "model_max_length": 4096,
                "num_attention_heads": 40,
                "num_hidden_layers": 40,
                "vocab_size": 125696,
            },
            13_896_668_160,
        ),
    ],
    ids=["chatglm3-6b", "qwen-7b", "baichuan2-13b"],
)
def test_older_models_have_the_parameters_they_were_published_with(
    config_json: dict[str, Any], num_parameters: int, tmp_path: Path
) -> None:
    assert plan_of(tmp_path, config_json).own.num_parameters == num_parameters


@pytest.mark.parametrize(
    ("usable_bytes", "room_bytes", "expected"),
    [(17 * GIB, 2 * GIB, True), (17 * GIB, GIB - 1, False), (16 * GIB, 2 * GIB, False)],
)
def test_a_sequence_must_fit_beside_the_weights(
    usable_bytes: int, room_bytes: int, expected: bool, tmp_path: Path
) -> None:
    machine = machine_of(usable_bytes, room_bytes)
    assert fits(plan_of(tmp_path, LLAMA_3_8B), machine) == expected


def test_a_shorter_sequence_needs_less(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA_3_8B, max_model_len=100)
    assert ranks_needed(plan, 2 * 8_030_261_248 + 100 * 128 * KIB) == 1
    assert ranks_needed(plan, 2 * 8_030_261_248 + 100 * 128 * KIB - 1) == 2
    with pytest.raises(ValueError, match="max_model_len"):
        plan_of(tmp_path, LLAMA_3_8B, max_model_len=10_000)


def test_this_machine_is_measured(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA_3_8B | {"num_hidden_layers": 1, "vocab_size": 100})
    config = configured(tmp_path, dtype="float32", kv_cache_memory_bytes=GIB)
    machine = this_machine(config, plan, CPU)
    assert machine.usable_bytes > 0
    assert (machine.dtype, machine.room_bytes) == (torch.float32, GIB)


def test_an_fp8_cache_takes_half_and_the_cpu_has_none(tmp_path: Path) -> None:
    """What this machine cannot do is said beside what others can."""
    plan = plan_of(tmp_path, LLAMA_3_8B, kv_cache_dtype="fp8")
    assert plan.own.kv_bytes(plan.kv_dtype) == 64 * KIB
    config = configured(tmp_path, kv_cache_dtype="fp8")
    said = report(config, plan, look_at_machine(config, plan, CPU))
    assert "  KV cache of 8,192 tokens  512.00 MiB" in said
    assert "  fits  no: kv_cache_dtype fp8 is not supported by the cpu kernels" in said
    assert "  16 GB   2" in said


def test_quantized_weights_are_those_of_projections(tmp_path: Path) -> None:
    """Embedding, head and norms stay as they are."""
    plan = plan_of(tmp_path, LLAMA_3_8B | {"quantization_config": AWQ})
    plain = 2 * 128256 * 4096 + 65 * 4096
    assert plan.own.weight_bytes(BF16) == 2 * plain + (8_030_261_248 - plain) * 4.375 / 8
    said = report(configured(tmp_path), plan, machine_of(20 * GIB, 2 * GIB))
    assert ", projections in awq (4.38 bits each, with scales)" in said
    assert plan_of(tmp_path, LLAMA_3_8B | {"quantization_config": {"quant_method": "fp8"}}).own.num_quantized == 0


@pytest.mark.parametrize(
    ("quantization_config", "settings", "said"),
    [
        ({"quant_method": "exotic"}, {}, "quant_method 'exotic' is not supported"),
        (AWQ, {"quantization": "int4"}, "int4 rounds plain weights, but this checkpoint is quantized with awq"),
        (AWQ, {"quantization": "gptq"}, "quantization is set to gptq"),
        (AWQ, {"tensor_parallel_size": 3}, "can be split among 1, 2, 4, 8 or 16"),
        (AWQ | {"group_size": 1024}, {"tensor_parallel_size": 8}, "whole groups, but among 1, 2, 4"),
    ],
)
def test_what_a_start_refuses_is_refused(
    quantization_config: dict[str, Any], settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        plan_of(tmp_path, LLAMA_3_8B | {"quantization_config": quantization_config}, **settings)


def test_ranks_share_products_vocabulary_and_memory(tmp_path: Path) -> None:
    config = read_model_config(make_checkpoint(tmp_path, vocab_size=321))
    whole = native_footprint(config, cpu)
    plan = plan_of(tmp_path, tensor_parallel_size=2)
    half, norms = plan.own, 7 * 64
    assert half == native_footprint(config, cpu, TensorParallel(0, 2))
    assert 2 * (half.num_parameters - norms) == whole.num_parameters - norms + 2 * 64  # a row of zeros, twice
    assert half.kv_shapes == [(1, 16, 16)] * 3
    settings = configured(tmp_path, tensor_parallel_size=2)
    said = report(settings, plan, look_at_machine(settings, plan, CPU))
    assert f"{whole.num_parameters / 1e6:.2f} million parameters" in said
    assert "On this machine (CPU, each of 2 ranks, float32" in said


@pytest.mark.parametrize(
    ("name", "quantization", "kv_shape"),
    [
        ("gemma", "int8", (2, 16, 16)),  # its head is tied
        ("gpt2", "auto", (4, 16, 16)),  # its weights are transposed
        ("deepseek-v3", "int4", (4, 32, 16)),
    ],
)
def test_the_second_tier_is_counted_on_the_meta_device(
    name: str, quantization: str, kv_shape: tuple[int, int, int], tmp_path: Path
) -> None:
    write(tmp_path, CASES[name])
    plan = plan_of(tmp_path, quantization=quantization)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    linears = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    biases = [module.bias for module in model.modules() if isinstance(module, linears) and module.bias is not None]
    held = held_bytes(tmp_path, quantization=quantization) + sum(bias.nbytes for bias in biases)
    assert plan.tier == "transformers' modelling code"
    assert plan.own.num_parameters == model.num_parameters()
    assert plan.own.weight_bytes(torch.float32) == held
    assert plan.own.kv_shapes == [kv_shape] * 2
    assert ranks_needed(plan, 1) is None
    with pytest.raises(ValueError, match="cannot be split"):
        plan_of(tmp_path, tensor_parallel_size=2)


def test_what_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        plan_of(tmp_path)
    with pytest.raises(ValueError, match="NobodyForCausalLM is not supported"):
        plan_of(tmp_path, {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"quantization_config": 5}, "quantization_config"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": "x"}}, "group_size"),
        ({"architectures": [["x"]]}, "architectures"),
        ({"architectures": 5}, "architectures"),
    ],
)
def test_what_has_the_wrong_type_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(tmp_path, LLAMA_3_8B | keys)
