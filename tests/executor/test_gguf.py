"""GGUF files are read as they are: the values are those of the `gguf` package, bit for bit, in their own size."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.executor.checkpoints.gguf import GGUFWeights, read_index
from octavo.executor.models import Decoder, LoadPlan, TensorParallel, load_model, read_model_config
from octavo.executor.models.layers import packed_weights
from octavo.executor.shards import Shard
from octavo.executor.start.fingerprint import model_fingerprint
from octavo.kernels import cpu, reference
from octavo.models.convert import link_gguf
from octavo.models.convert.metadata import GGUFFile
from octavo.models.convert.weights import plan_weights
from octavo.models.demo import demo_gguf
from octavo.models.resolve import resolve_model
from octavo.protocol.model_files.gguf_index import GGUF_TYPES
from tests.fakes.loading_process import loading_bytes
from tests.fakes.paged_decoding import PagedDecoding, assert_near, assert_rounded
from tests.fakes.tiny_gguf import tiny_model, write_gguf

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
TOKEN_IDS = list(range(3, 260, 13))
# Bits that a weight takes once it is loaded.
HELD_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q5_0": 8.5,
    "Q5_1": 9,
    "Q8_0": 8.5,
    "Q4_K": 6,
    "Q5_K": 10,
    "Q6_K": 10,
}
# As llama.cpp mixes types in a Q4_K_M file, and a matrix that is not quantized among those of one layer.
MIXED = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "blk.1.attn_k.weight": "F16", "": "Q4_K"}


def linked(path: Path) -> Path:
    directory = path.with_suffix("")
    link_gguf(path, directory)
    return directory


def dequantized(path: Path) -> Path:
    """Return a checkpoint of the file's values in float32, as the `gguf` package computes them."""
    directory = path.with_suffix(".plain")
    directory.mkdir()
    config = json.loads((path.with_suffix("") / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    weights = plan_weights(GGUFFile(path), config)
    tensors = {weight.name: torch.from_numpy(np.array(weight.read())) for weight in weights}
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory: Path, **options: Any) -> Decoder:
    options = {"dtype": torch.float32, "max_model_len": 64, "backend": cpu, "progress": False} | options
    return load_model(LoadPlan(directory, read_model_config(directory), **options))


def logits(model: Decoder) -> Tensor:
    return PagedDecoding(model, 16, 4, torch.float32).score(TOKEN_IDS)


@pytest.mark.parametrize("kind", HELD_BITS)
def test_each_types_values_are_those_of_gguf(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2", **SIZES), kinds=kind)
    [source] = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_down.weight"]
    assert source.tensor_type.name == kind
    expected = torch.from_numpy(gguf.dequantize(source.data, source.tensor_type))
    weights, name = GGUFWeights(linked(path)), "model.layers.1.mlp.down_proj.weight"
    held = weights.read_groupwise(name, Shard(256), [256, 512])
    assert held is not None
    assert torch.equal(held.dequantize(), expected)
    assert 8 * held.nbytes / expected.numel() == HELD_BITS[kind]
    columns = weights.read_groupwise(name, Shard(512, 1, 1, 4), [256, 512])  # half a block of 256
    rows = weights.read_groupwise(name, Shard(256, 0, 2, 4), [256, 512])
    assert columns is not None
    assert rows is not None
    assert torch.equal(columns.dequantize(), expected[:, 128:256])
    assert torch.equal(rows.dequantize(), expected[128:192])
    assert columns.nbytes == rows.nbytes == held.nbytes // 4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [("llama", "Q4_1"), ("llama", MIXED), ("qwen3", "Q8_0"), ("llama", "BF16"), ("qwen2", "F16"), ("llama", "F32")],
)
def test_a_file_computes_what_it_stands_for(architecture: str, kinds: Any, tied: bool, tmp_path: Path) -> None:
    """With llama's order of rows, biases of Qwen2, norms of Qwen3."""
    model = tiny_model(architecture, **SIZES, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "tiny.gguf", model, kinds=kinds)
    directory = linked(path)
    loaded, expected_TV = load(directory), logits(load(dequantized(path)))
    assert_near(logits(load(directory, backend=reference)), expected_TV)
    assert_rounded(logits(loaded), expected_TV)
    if tied and loaded.model.embed_tokens.packed is not None:
        assert loaded.lm_head.packed == [loaded.model.embed_tokens.packed]


def test_a_layer_of_several_forms_is_several_products(tmp_path: Path) -> None:
    model = load(linked(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **SIZES), kinds=MIXED)))
    forms = [[packed.form[:5] for packed in layer.self_attn.qkv_proj.packed] for layer in model.model.layers]
    assert forms == [["4-bit", "8-bit"], ["4-bit", "float", "8-bit"]]
    assert len(model.model.layers[0].mlp.gate_up_proj.packed) == 1


def test_activations_have_the_dtype_that_was_chosen(tmp_path: Path) -> None:
    model = tiny_model("llama", **SIZES, tie_word_embeddings=True)
    directory = linked(write_gguf(tmp_path / "tiny.gguf", model, kinds="Q4_1"))
    expected_TV = logits(load(directory))
    half = load(directory, dtype=torch.bfloat16)
    assert half.model.embed_tokens(torch.tensor([5])).dtype == torch.bfloat16
    logits_TV = PagedDecoding(half, 16, 4, torch.bfloat16).score(TOKEN_IDS)
    assert not torch.equal(logits_TV, expected_TV)
    assert_rounded(logits_TV, expected_TV)


@pytest.mark.parametrize(("kinds", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("Q4_0", torch.bfloat16)])
def test_the_dtype_is_that_of_plain_weights(kinds: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = linked(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), kinds=kinds))
    assert read_model_config(directory).dtype == dtype


def test_groups_that_ranks_cannot_share_are_refused_with_what_they_can(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    directory = linked(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", **sizes), kinds="Q8_0"))
    with pytest.raises(
        ValueError, match=r"down_proj\.weight \(Q8_0\) of .*96 inputs in groups of 32 .* 2 ranks .*, but among 1, 3$"
    ):
        load(directory, parallel=TensorParallel(0, 2))


def test_the_fingerprint_is_the_files(tmp_path: Path) -> None:
    def fingerprint(name: str, kinds: str) -> str:
        directory = linked(write_gguf(tmp_path / name, tiny_model("llama"), kinds=kinds))
        config = read_model_config(directory)
        return model_fingerprint(
            LoadPlan(directory, config, torch.float32, max_model_len=32, load_format="auto", backend=cpu)
        )

    assert fingerprint("one.gguf", "Q8_0") == fingerprint("copy.gguf", "Q8_0") != fingerprint("other.gguf", "Q4_0")


def test_a_file_that_is_not_the_indexed_one_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    directory, content = linked(path), path.read_bytes()
    for other in (content[:-1], content[:100] + b"?" + content[101:]):
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"tiny\.gguf is damaged, or not the file that"):
            load(directory)
    path.unlink()
    with pytest.raises(ValueError, match=r"model\.gguf is missing"):
        load(directory)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"type":"Q8_0"', '"type":"IQ2_XS"', "type IQ2_XS, which is not supported; supported: F32"),
        ('"shape":[64,96]', '"shape":[64,95]', r"down_proj\.weight of .* shape \[64, 95\].* asks for \[64, 96\]"),
        ("down_proj.weight", "other.weight", r"lacks 2 tensors: model\.layers\.0\.mlp\.down_proj"),
        ('"offset_bytes":', '"offset_bytes":9', r"index\.json is not an index of a GGUF file: .* beyond the file"),
        ("tensors", "tensor", r"index\.json is not an index"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    directory = linked(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), kinds="Q8_0"))
    index = directory / "model.gguf.index.json"
    assert old in index.read_text()
    index.write_text(index.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_a_process_holds_no_more_than_the_file() -> None:
    """The demo's 135 million weights would take 269 MB in bfloat16; the file has 98 MB."""
    assert 80e6 < loading_bytes(resolve_model(None).directory) < 160e6


def test_the_demos_tensors_are_those_of_gguf_and_its_head_is_its_embedding() -> None:
    directory = resolve_model(None).directory
    tensors, weights = read_index(directory).tensors, GGUFWeights(directory)
    for name, kind in (("model.embed_tokens.weight", "Q8_0"), ("model.layers.7.mlp.down_proj.weight", "Q4_1")):
        tensor = tensors[name]
        elements, num_bytes = GGUF_TYPES[kind]
        row_bytes = tensor.shape[1] // elements * num_bytes
        stored = np.memmap(demo_gguf(), mode="r", offset=tensor.offset_bytes, shape=(tensor.shape[0], row_bytes))
        held = weights.read_groupwise(name, Shard(tensor.shape[0]), tensor.shape)
        assert held is not None
        assert tensor.type == kind
        expected = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
        assert torch.equal(held.dequantize(), torch.from_numpy(expected))
    model = load(directory)
    assert model.lm_head.packed == [model.model.embed_tokens.packed]
    assert len(packed_weights(model)) == 30 * 4 + 1
