"""Quantized checkpoints of the second tier and of older guides; `test_quantization.py` says what is near."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo.executor.checkpoints.checkpoint import Checkpoint
from octavo.executor.models import LoadedModel, read_model_config
from octavo.executor.models.borrowed.attention import CurrentStep
from octavo.executor.models.borrowed.decoder import pack_products
from octavo.executor.models.renaming import renamed
from octavo.executor.models.weights import DummyWeights
from octavo.executor.quantization import round_weight
from octavo.executor.shards import Shard
from octavo.kernels import reference
from octavo.kernels.groupwise import GroupwiseWeight
from tests.fakes.borrowed_checkpoints import CASES, load
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.older_checkpoints import make_older
from tests.fakes.paged_decoding import PagedDecoding, assert_near, assert_rounded
from tests.fakes.quantized_checkpoints import Twins, awq, compressed_fp8, compressed_packed, fp8_blocks, gptq

TOKEN_IDS = list(range(3, 300, 13))
OLDER: dict[str, dict[str, Any]] = {
    "baichuan": {"architecture": "LlamaForCausalLM", "num_key_value_heads": 4},
    "chatglm": {"architecture": "GlmForCausalLM", "head_dim": 32, "attention_bias": True},
    "qwen": {"architecture": "Qwen2ForCausalLM", "num_key_value_heads": 4},
}


def logits(model: LoadedModel) -> Tensor:
    return PagedDecoding(model, 16, 4, torch.float32).score(TOKEN_IDS)


def of_case(name: str) -> dict[str, Any]:
    return {"architecture": CASES[name].architecture, **CASES[name].config}


def older(make: Callable[..., Twins], folder: Path, family: str, **keys: Any) -> Twins:
    """Write a checkpoint of an older guide, its stacked projections packed as they are."""

    def make_plain(directory: Path, **config: Any) -> Path:
        return make_older(directory, make_checkpoint(folder / "original", **config), family)

    return make(folder, make=make_plain, **OLDER[family], **keys)


PACKED: dict[str, tuple[Callable[[Path], Twins], float]] = {
    "Gemma 2 in GPTQ": (lambda folder: gptq(folder, 32, **of_case("gemma2")), 4 + 48 / 32),
    "Granite in AWQ": (lambda folder: awq(folder, 64, **of_case("granite")), 4 + 48 / 64),
    "StarCoder 2 in compressed-tensors": (
        lambda folder: compressed_packed(folder, 32, **of_case("starcoder2")),
        4 + 16 / 32,
    ),
    "GPT-2 in GPTQ of 8 bits": (lambda folder: gptq(folder, 32, 8, symmetric=True, **of_case("gpt2")), 8 + 16 / 32),
    "Baichuan in AWQ": (lambda folder: older(awq, folder, "baichuan", group_size=128), 4 + 48 / 128),
    "ChatGLM in GPTQ": (lambda folder: older(gptq, folder, "chatglm"), 4 + 48 / 32),
    "Qwen in GPTQ": (lambda folder: older(gptq, folder, "qwen", symmetric=True), 4 + 16 / 32),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_compute_what_they_stand_for_in_their_own_size(name: str, tmp_path: Path) -> None:
    make, expected_bits = PACKED[name]
    twins = make(tmp_path)
    expected_TV = logits(load(twins.plain))
    assert_near(logits(load(twins.quantized, backend=reference)), expected_TV)
    assert_rounded(logits(load(twins.quantized)), expected_TV)

    model = load(twins.quantized, backend=reference)
    packed = [product for product in model.products if "-bit" in product.form]
    stored = load_file(twins.quantized / "model.safetensors")
    stems = {name.rpartition(".")[0] for name in stored if name.endswith((".qweight", ".weight_packed"))}
    num_weights = sum(load_file(twins.plain / "model.safetensors")[f"{stem}.weight"].numel() for stem in stems)
    assert 8 * sum(product.nbytes for product in packed) / num_weights == pytest.approx(expected_bits, rel=1e-9)
    raw_bytes, plain_raw_bytes = (
        sum(parameter.nbytes for parameter in of.parameters()) for of in (model, load(twins.plain, backend=reference))
    )
    assert raw_bytes == plain_raw_bytes, "embeddings and norms, nothing of what is packed"


FLOATS: dict[str, Callable[[Path], Twins]] = {
    "DeepSeek-V3, blocks": lambda folder: fp8_blocks(folder, **of_case("deepseek-v3")),
    "Qwen3-MoE, channels": lambda folder: compressed_fp8(folder, "channel", **of_case("qwen3-moe")),
    "Mixtral, channels": lambda folder: compressed_fp8(folder, "channel", **of_case("mixtral")),
    "Phi-3, tensors": lambda folder: compressed_fp8(folder, "tensor", **of_case("phi3")),
}


@pytest.mark.parametrize("name", FLOATS)
def test_8_bit_floats_are_multiplied_out(name: str, tmp_path: Path) -> None:
    """Also those of experts, which transformers stacks."""
    twins = FLOATS[name](tmp_path)
    assert_near(logits(load(twins.quantized)), logits(load(twins.plain)))


def test_packed_experts_are_refused_with_the_reason(tmp_path: Path) -> None:
    directory = gptq(tmp_path, **of_case("qwen3-moe")).quantized
    with pytest.raises(
        ValueError,
        match=r"Qwen3MoeForCausalLM is not supported .*stacks a layer's experts\): 24 tensors: .*experts\.0\.",
    ):
        load(directory)


def test_the_second_tier_knows_how_its_checkpoints_are_quantized(tmp_path: Path) -> None:
    quantized, plain = awq(tmp_path, **of_case("granite"))
    found = read_model_config(quantized).quantization
    assert found is not None
    assert (found.method, found.bits, found.group_size) == ("awq", 4, 32)
    for directory, asked, words in (
        (quantized, "gptq", "set to gptq, but .* quantized with awq"),
        (quantized, "int8", "int8 rounds plain weights, but this checkpoint is quantized with awq"),
        (plain, "fp8", "set to fp8, but .* not quantized"),
    ):
        with pytest.raises(ValueError, match=words):
            load(directory, quantization=asked)
    (quantized / "model.safetensors").unlink()
    model = load(quantized, load_format="dummy")
    assert sum("4-bit" in product.form for product in model.products) == 2 * 7


class Chooser(nn.Module):
    """A layer with as many experts as a small product has outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Module()
        self.router.layer = nn.Linear(64, 64)
        self.gate_proj = nn.Linear(64, 64)
        self.few = nn.Linear(64, 31)

    def get_output_embeddings(self) -> None:
        return None


def test_what_chooses_experts_stays_plain() -> None:
    model: Any = Chooser()
    pack_products(model, CurrentStep(reference), rounded_bits=8, progress=lambda: None)
    forms = [layer.packed.form.startswith("8-bit") for layer in (model.router.layer, model.gate_proj, model.few)]
    assert forms == [False, True, False]


LAYER = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize("case", ["deepseek-v3", None], ids=["second tier", "first tier"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{LAYER}.weight_scale_inv": torch.ones(1, 7)}, rf"{LAYER}\.weight of .*: scales have shape \[1, 7\]"),
        ({f"{LAYER}.weight_scale_inv": None}, rf"{LAYER}\.weight of .* has type F8_E4M3, but there is no {LAYER}"),
        ({"lm_head.weight_scale": torch.ones(1)}, r"of no use to the model, 1 tensor: lm_head\.weight_scale"),
    ],
    ids=["another shape", "missing", "beside a plain weight"],
)
def test_scales_must_fit(case: str | None, changed: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    directory = fp8_blocks(tmp_path, **(of_case(case) if case else {})).quantized
    stored = load_file(directory / "model.safetensors") | changed
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(directory)


@pytest.mark.parametrize("make", [awq, gptq])
def test_ranks_read_their_part_of_a_packed_stack(make: Callable[..., Twins], tmp_path: Path) -> None:
    """Rotary rows come out in our order: codes, scales and offsets alike."""
    quantized, plain = older(make, tmp_path, "chatglm")
    config = read_model_config(quantized)
    with Checkpoint(quantized, config.quantization) as packed, Checkpoint(plain) as dequantized:
        ours, theirs = renamed(packed, config), renamed(dequantized, config)
        for leaf, num_rows in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64)):
            for rank in range(2):
                name, shard = f"model.layers.1.self_attn.{leaf}.weight", Shard(num_rows, 0, rank, 2)
                expected_NK = torch.empty(num_rows // 2, 128)
                theirs.read(name, shard, expected_NK)
                weight = ours.read_groupwise(name, shard, [num_rows, 128])
                assert weight is not None
                assert torch.allclose(weight.dequantize(), expected_NK, atol=1e-6)


class PackedWeights(DummyWeights):
    """Random ones, all of them packed."""

    def read_groupwise(self, name: str, shard: Shard, shape: list[int]) -> GroupwiseWeight | None:
        return round_weight(torch.ones(shape), 8)


def test_a_packed_head_cannot_be_normalized(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", num_hidden_layers=1, num_key_value_heads=4)
    config = read_model_config(make_older(tmp_path / "older", original, "baichuan", z_loss_weight=0))
    with pytest.raises(ValueError, match=r"lm_head\.weight is quantized, but its rows are to be normalized"):
        renamed(PackedWeights(0), config).read_groupwise("lm_head.weight", Shard(319), [319, 64])
