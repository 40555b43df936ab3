"""A dry run counts, without a weight, what a loaded model holds; and says which devices it would take."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from executor.dry_run import Machine, Plan, fits, make_plan, ranks_needed, report, this_machine
from executor.footprint import WeightForm, native_footprint, weight_form
from executor.models import TensorParallel, load_model, read_model_config
from executor.models.layers import Linear
from kernels import ChosenBackend, cpu
from protocol.config import Config
from tests.fakes.checkpoints import TINY, make_checkpoint

CPU = ChosenBackend("cpu", cpu, torch.device("cpu"))
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


def plan_of(directory: Path, config_json: dict[str, Any], **settings: object) -> Plan:
    (directory / "config.json").write_text(json.dumps(config_json))
    return make_plan(msgspec.structs.replace(Config(), model=str(directory), **settings), CPU)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_counted_is_what_a_loaded_model_holds(tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=tied, attention_bias=True)
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, max_model_len=8, backend=cpu, progress=False)
    products = [one for module in model.modules() if isinstance(module, Linear) for one in module.packed]
    biases = 3 * (64 + 2 * 32 + 64) * 4  # which `nbytes` leaves out
    held = sum(one.nbytes for one in (*model.parameters(), *products)) + biases
    footprint = native_footprint(config, cpu)
    assert footprint.weight_bytes(torch.float32) == held
    reference = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert footprint.num_parameters == reference.num_parameters()
    assert footprint.kv_shapes == model.kv_shapes


def test_llama_3_8b(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA_3_8B)
    assert plan.whole.num_parameters == 8_030_261_248
    assert plan.whole.weight_bytes(torch.bfloat16) == 2 * 8_030_261_248
    assert plan.whole.kv_bytes(torch.bfloat16) == 128 * KIB
    assert list(plan.footprints) == [1, 2, 4, 8, 16, 32]
    assert [ranks_needed(plan, 0.9 * size * GB) for size in (16, 24, 80)] == [2, 1, 1]
    assert ranks_needed(plan, 10**8) is None
    config = msgspec.structs.replace(Config(), model=str(tmp_path))
    machine = Machine("CPU", torch.bfloat16, "the checkpoint is bfloat16", 20 * GIB, 2 * GIB, "all")
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
    assert plan_of(tmp_path, config_json).whole.num_parameters == num_parameters


@pytest.mark.parametrize(
    ("usable_bytes", "room_bytes", "expected"),
    [(17 * GIB, 2 * GIB, True), (17 * GIB, GIB - 1, False), (16 * GIB, 2 * GIB, False)],
)
def test_a_sequence_must_fit_beside_the_weights(
    usable_bytes: int, room_bytes: int, expected: bool, tmp_path: Path
) -> None:
    machine = Machine("CPU", torch.bfloat16, "", usable_bytes, room_bytes, "")
    assert fits(plan_of(tmp_path, LLAMA_3_8B), machine) == expected


def test_a_shorter_sequence_needs_less(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA_3_8B, max_model_len=100)
    assert ranks_needed(plan, 2 * 8_030_261_248 + 100 * 128 * KIB) == 1
    assert ranks_needed(plan, 2 * 8_030_261_248 + 100 * 128 * KIB - 1) == 2
    with pytest.raises(ValueError, match="max_model_len"):
        plan_of(tmp_path, LLAMA_3_8B, max_model_len=10_000)


def test_this_machine_is_measured(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, LLAMA_3_8B | {"num_hidden_layers": 1, "vocab_size": 100})
    config = msgspec.structs.replace(Config(), dtype="float32", kv_cache_memory_bytes=GIB)
    machine = this_machine(config, plan, CPU.device)
    assert machine.usable_bytes > 0
    assert (machine.dtype, machine.room_bytes) == (torch.float32, GIB)


@pytest.mark.parametrize(
    ("quantization_config", "requested", "expected"),
    [
        (None, "auto", None),
        (None, "int8", 8.125),
        (None, "int4", 4.25),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "auto", 4.375),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "auto", 4.125),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}, "auto", 9.5),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "auto", 4),
        ({"quant_method": "fp8"}, "auto", None),
    ],
)
def test_bits_of_a_weight(quantization_config: dict[str, Any] | None, requested: str, expected: float | None) -> None:
    form = weight_form(quantization_config, requested)
    assert (form and form.bits) == expected


def test_quantized_weights_are_those_of_products(tmp_path: Path) -> None:
    """Embedding, head and norms stay as they are."""
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    plan = plan_of(tmp_path, LLAMA_3_8B | {"quantization_config": quantization})
    plain = 2 * 128256 * 4096 + 65 * 4096
    assert plan.form == WeightForm("awq of 4 bits", 4.375)
    assert plan.whole.num_plain == plain
    expected = 2 * plain + (8_030_261_248 - plain) * 4.375 / 8
    assert plan.whole.weight_bytes(torch.bfloat16, plan.form) == expected
    assert "products in awq of 4 bits (4.38 a weight" in report(
        Config(), plan, this_machine(Config(), plan, CPU.device)
    )
    with pytest.raises(ValueError, match="quant_method 'exotic' is not supported"):
        plan_of(tmp_path, LLAMA_3_8B | {"quantization_config": {"quant_method": "exotic"}})


def test_ranks_share_products_and_vocabulary(tmp_path: Path) -> None:
    config = read_model_config(make_checkpoint(tmp_path, vocab_size=321))
    whole, half = (native_footprint(config, cpu, TensorParallel(0, size)) for size in (1, 2))
    norms = 7 * 64
    assert 2 * (half.num_parameters - norms) == whole.num_parameters - norms + 2 * 64  # a row of zeros, twice
    assert half.kv_shapes == [(1, 16, 16)] * 3


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "GPTNeoXForCausalLM"])
def test_other_architectures_are_counted_by_transformers(architecture: str, tmp_path: Path) -> None:
    model_class = getattr(transformers, architecture)
    model_class.config_class(**TINY, architectures=[architecture], dtype="bfloat16").save_pretrained(tmp_path)
    plan = make_plan(msgspec.structs.replace(Config(), model=str(tmp_path)), CPU)
    reference = model_class(model_class.config_class(**TINY))
    assert (plan.architecture, plan.tier, plan.dtype) == (architecture, "transformers' modelling code", torch.bfloat16)
    assert plan.whole.num_parameters == reference.num_parameters()
    head = reference.get_output_embeddings().weight.numel() if reference.config.tie_word_embeddings else 0
    assert plan.whole.weight_bytes(torch.float32) == 4 * (reference.num_parameters() + head)
    assert len(plan.whole.kv_shapes) == TINY["num_hidden_layers"]
    assert ranks_needed(plan, 1) is None


def test_what_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        make_plan(msgspec.structs.replace(Config(), model=str(tmp_path)), CPU)
    with pytest.raises(ValueError, match="transformers cannot build it"):
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
