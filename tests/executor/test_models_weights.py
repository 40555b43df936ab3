"""Weights: none missing, none left over, only the slices of one's own rank, and clear words for broken files."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.executor.checkpoints.checkpoint import Checkpoint
from octavo.executor.models import LoadPlan, TensorParallel, load_model, read_model_config
from octavo.executor.models.decoder import Decoder
from octavo.executor.models.rotary import rotary_table
from octavo.executor.models.weights import load_weights
from octavo.executor.shards import Shard
from octavo.executor.start.fingerprint import model_fingerprint
from octavo.kernels import cpu
from tests.fakes.checkpoints import make_checkpoint

CPU = torch.device("cpu")
LAYER = "model.layers.0.self_attn"


def load(directory: Path, **options: object) -> Decoder:
    options = {"max_model_len": 32, "progress": False} | options
    return load_model(LoadPlan(directory, read_model_config(directory), torch.float32, backend=cpu, **options))


def logits(model: Decoder) -> Tensor:
    return model.compute_logits(torch.linspace(-1, 1, 64)[None])


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    rewrite(make_checkpoint(tmp_path), lambda tensors: tensors.pop(f"{LAYER}.k_proj.weight"))
    with pytest.raises(ValueError, match=rf"lacks 1 tensor: {LAYER}\.k_proj\.weight\. It is"):
        load(tmp_path)


def test_a_tensor_left_over_is_named(tmp_path: Path) -> None:
    rewrite(make_checkpoint(tmp_path), lambda tensors: tensors.update({f"{LAYER}.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(ValueError, match=rf"of no use to the model, 1 tensor: {LAYER}\.q_proj\.bias\. It is"):
        load(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    rewrite(
        make_checkpoint(tmp_path), lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name]
    )
    with pytest.raises(ValueError, match=r"lacks 9 tensors: .* and 4 more\. It is"):
        load(tmp_path)


def test_stored_frequencies_and_a_tied_head_are_skipped(tmp_path: Path) -> None:
    expected = logits(load(make_checkpoint(tmp_path, tie_word_embeddings=True)))
    unneeded = {f"{LAYER}.rotary_emb.inv_freq": torch.zeros(8)}
    rewrite(
        tmp_path,
        lambda tensors: tensors.update(unneeded | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    assert torch.equal(logits(load(tmp_path)), expected)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    rewrite(make_checkpoint(tmp_path), lambda tensors: tensors.update({f"{LAYER}.o_proj.weight": torch.zeros(64, 32)}))
    with pytest.raises(ValueError, match=r"o_proj\.weight has shape \[64, 32\], but config\.json asks for \[64, 64\]"):
        load(tmp_path)


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    packed = {f"{LAYER}.o_proj.weight": torch.zeros(64, 64, dtype=torch.int8)}
    rewrite(make_checkpoint(tmp_path), lambda tensors: tensors.update(packed))
    with pytest.raises(ValueError, match=r"o_proj\.weight has type I8"):
        load(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 5, 100, -1])
def test_a_truncated_file_is_named(tmp_path: Path, kept_bytes: int) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or incomplete"):
        load(tmp_path)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "whole")
    split = make_checkpoint(tmp_path / "split", max_shard_size="100KB")
    assert len(list(split.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(split)), logits(load(whole)))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, max_shard_size="100KB")
    lost = sorted(directory.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"has no {lost.name}"):
        load(directory)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 5}', "{"])
def test_a_broken_index_is_named(tmp_path: Path, index: str) -> None:
    (make_checkpoint(tmp_path) / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is not an index"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/hostname", "..", "x" * 5000])
def test_an_index_that_leaves_its_directory_is_refused(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path / "other")
    index = {"weight_map": {"model.norm.weight": name}}
    (make_checkpoint(tmp_path / "tiny") / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which is not a file of its directory"):
        load(tmp_path / "tiny")


@pytest.mark.parametrize("vocab_size", [2**24, 2**31 - 1])
def test_no_memory_is_spent_on_what_the_file_lacks(tmp_path: Path, vocab_size: int) -> None:
    """An embedding of 4 GiB, or of 512: more than there is."""
    directory = make_checkpoint(tmp_path)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"vocab_size": vocab_size}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"embed_tokens.weight(: \d+ bytes of memory are not available| has shape)"):
        load(directory)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (make_checkpoint(tmp_path) / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load(tmp_path)


def test_dummy_weights_are_repeatable_and_read_no_file(tmp_path: Path) -> None:
    (make_checkpoint(tmp_path) / "model.safetensors").unlink()
    first, same, other = (logits(load(tmp_path, load_format="dummy", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert first.isfinite().all()


class RecordedSlices:
    """A checkpoint that remembers what was read of it, by tensor and part."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.parts: dict[str, dict[Shard, Tensor]] = {}

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        self._checkpoint.check(needed, unneeded)

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        self._checkpoint.read(name, shard, part)
        self.parts.setdefault(name, {})[shard] = part.clone()

    def read_groupwise(self, name: str, shard: Shard, shape: list[int]) -> None:
        assert self._checkpoint.read_groupwise(name, shard, shape) is None


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_slices_of_all_ranks_make_up_each_tensor(tmp_path: Path, world_size: int) -> None:
    """With 2 KV heads and 4 ranks, two ranks hold the same head; a vocabulary of 319 does not divide."""
    directory = make_checkpoint(tmp_path, attention_bias=True, mlp_bias=True, vocab_size=319)
    config = read_model_config(directory)
    with Checkpoint(directory) as checkpoint:
        slices = RecordedSlices(checkpoint)
        for rank in range(world_size):
            model = Decoder(
                config, rotary_table(config.rope, config.head_dim, 32), cpu, TensorParallel(rank, world_size)
            )
            load_weights(model, slices, torch.float32, CPU, tied=model.tied, progress=False)
            assert model.kv_shapes[0][0] == max(1, 2 // world_size)
    for name, tensor in load_file(directory / "model.safetensors").items():
        parts = sorted(slices.parts[name].items(), key=lambda item: item[0].index)
        assert torch.equal(torch.cat([part for _, part in parts], dim=parts[0][0].dim), tensor), name
        if name.endswith("proj.weight"):
            assert len(parts) == (2 if "k_proj" in name or "v_proj" in name else world_size)


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", 6), ("intermediate_size", 98)])
def test_what_ranks_cannot_share_is_refused(tmp_path: Path, key: str, value: int) -> None:
    directory = make_checkpoint(tmp_path)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(ValueError, match=f"{value}.* cannot be divided among 4 ranks"):
        load(directory, parallel=TensorParallel(0, 4))


def fingerprint(directory: Path, dtype: torch.dtype = torch.float32, max_model_len: int = 32, **options: object) -> str:
    options = {"load_format": "auto", "backend": cpu} | options
    return model_fingerprint(
        LoadPlan(directory, read_model_config(directory), dtype, max_model_len=max_model_len, **options)
    )


def test_the_fingerprint_names_what_is_computed(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    one = make_checkpoint(tmp_path / "one", rope_parameters=scaling)
    copy = make_checkpoint(tmp_path / "copy", rope_parameters=scaling)
    assert fingerprint(one) == fingerprint(copy) == fingerprint(one, max_model_len=256)
    different = [
        fingerprint(one),
        fingerprint(one, torch.bfloat16),
        fingerprint(one, max_model_len=512),
        fingerprint(one, load_format="dummy", seed=0),
        fingerprint(one, load_format="dummy", seed=1),
        fingerprint(make_checkpoint(tmp_path / "larger", rope_parameters=scaling, vocab_size=321)),
        fingerprint(make_checkpoint(tmp_path / "split", rope_parameters=scaling, max_shard_size="100KB")),
    ]
    assert len(set(different)) == len(different)


def test_the_fingerprint_of_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str], progress: bool) -> None:
    make_checkpoint(tmp_path)
    capsys.readouterr()
    load(tmp_path, progress=progress)
    assert ("loading weights: 100%" in capsys.readouterr().err) == progress
