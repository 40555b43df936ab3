"""Weights in files that torch wrote (.bin) are read as tensors, mapped, and nothing else of such a file is."""

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.executor.checkpoints.torch_file import TorchFile
from octavo.executor.models import LoadPlan, load_model, read_model_config
from octavo.executor.start.dry_run import make_plan
from octavo.executor.start.fingerprint import model_fingerprint
from octavo.kernels import cpu
from octavo.kernels.choice import ChosenBackend
from octavo.models.checkpoint import require_checkpoint
from octavo.protocol.config import Config
from octavo.protocol.model_files.torch_archive import damage
from octavo.protocol.model_files.weight_files import BIN_FILE, BIN_INDEX_FILE
from tests.fakes.checkpoints import TINY, make_checkpoint
from tests.fakes.older_checkpoints import make_older
from tests.fakes.paged_decoding import PagedDecoding
from tests.fakes.quantized_checkpoints import awq
from tests.fakes.torch_files import as_torch_files

TOKEN_IDS = list(range(3, 260, 13))


def logits(directory: Path) -> Tensor:
    options: dict[str, Any] = {"max_model_len": 64, "backend": cpu, "progress": False}
    model = load_model(LoadPlan(directory, read_model_config(directory), torch.float32, **options))
    return PagedDecoding(model, 16, 4, torch.float32).score(TOKEN_IDS)


def check(directory: Path) -> None:
    require_checkpoint(directory, str(directory), trust_remote_code=False, needs_weights=True)


def baichuan(directory: Path) -> Path:
    original = make_checkpoint(directory / "llama", num_key_value_heads=TINY["num_attention_heads"])
    return make_older(directory / "baichuan", original, "baichuan")


MAKE: dict[str, Callable[[Path], Path]] = {
    "baichuan": baichuan,
    "llama": make_checkpoint,
    "tied": lambda directory: make_checkpoint(directory, tie_word_embeddings=True),
    "awq": lambda directory: awq(directory).quantized,
    "gemma": lambda directory: make_checkpoint(directory, "GemmaForCausalLM"),
}


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("name", MAKE)
def test_a_checkpoint_of_torchs_files_is_the_same_model(name: str, num_files: int, tmp_path: Path) -> None:
    directory = MAKE[name](tmp_path)
    expected = logits(directory)
    as_torch_files(directory, num_files)
    check(directory)
    assert torch.equal(logits(directory), expected)


def test_its_dtype_its_fingerprint_and_its_footprint_are_known(tmp_path: Path) -> None:
    directory = as_torch_files(make_checkpoint(tmp_path, dtype=torch.bfloat16, dtype_key=None), 2)
    config = read_model_config(directory)
    assert config.dtype == torch.bfloat16
    first = model_fingerprint(
        LoadPlan(directory, config, config.dtype, max_model_len=32, load_format="auto", backend=cpu)
    )
    plan = make_plan(Config(model=str(directory)), ChosenBackend("cpu", cpu, torch.device("cpu")))
    assert plan.checkpoint_dtype == torch.bfloat16
    path = directory / "pytorch_model-00001-of-00002.bin"
    tensors = torch.load(path, weights_only=True)
    tensors[next(iter(tensors))][0] += 1
    torch.save(tensors, path)
    assert (
        model_fingerprint(LoadPlan(directory, config, config.dtype, max_model_len=32, load_format="auto", backend=cpu))
        != first
    )


def test_safetensors_are_preferred_where_both_are_there(tmp_path: Path) -> None:
    expected = logits(make_checkpoint(tmp_path))
    (tmp_path / BIN_FILE).write_bytes(b"\x80 none of it is read")
    check(tmp_path)
    assert torch.equal(logits(tmp_path), expected)


class Trap:
    """What unpickles to a call of a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=str(path)) as refused:
        TorchFile(path)
    return str(refused.value)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_code_in_a_file_is_named_and_not_run(name: str, tmp_path: Path) -> None:
    directory = as_torch_files(MAKE[name](tmp_path / "model"))
    tensors = torch.load(directory / BIN_FILE, weights_only=True)
    torch.save(tensors | {"trap": Trap(tmp_path / "made")}, directory / BIN_FILE)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin holds posix\.mkdir, which is no tensor and could"):
        logits(directory)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.zeros(1)], "holds a list where tensors by name are expected"),
        ({"step": 5}, "holds 'step', an int where a tensor is expected"),
        ({"model": {"a": torch.zeros(1)}}, "holds 'model', a dict where a tensor is expected"),
        ({0: torch.zeros(1)}, "holds 0, a Tensor where a tensor is expected"),
        ({"a": torch.zeros(1).expand(2**20, 2**20)}, "holds 'a', a tensor without data of its own size"),
        ({"a": torch.eye(3).to_sparse()}, "holds 'a', a Tensor where a tensor is expected"),
    ],
    ids=["list", "number", "nested", "unnamed", "expanded", "sparse"],
)
def test_what_is_no_tensor_by_name_is_refused(content: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / BIN_FILE
    torch.save(content, path)
    assert said in refusal(path)


def written(path: Path, **options: Any) -> bytes:
    torch.save({"a": torch.arange(1000)}, path, **options)
    return path.read_bytes()


def compressed(path: Path) -> None:
    written(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def without_pickle(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "x")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(written(path)[:-100]), "is damaged or incomplete"),
    "begun": (lambda path: path.write_bytes(written(path)[:1000]), "is damaged or incomplete"),
    "old": (lambda path: written(path, _use_new_zipfile_serialization=False), "the form of torch before version 1.6"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "the form of torch before version 1.6"),
    "compressed": (compressed, "is compressed, which torch's own files are not"),
    "without": (without_pickle, "its data.pkl is absent"),
    "other": (lambda path: path.write_bytes(b"none"), "torch's files begin otherwise"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_is_not_whole_is_refused_before_torch_sees_it(name: str, tmp_path: Path) -> None:
    damaged, said = DAMAGES[name]
    path = tmp_path / BIN_FILE
    damaged(path)
    assert said in damage(path)
    assert said in refusal(path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=str(path)):
        check(tmp_path)


def test_a_pointer_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    directory = as_torch_files(make_checkpoint(tmp_path))
    (directory / BIN_FILE).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is only a pointer of Git LFS"):
        check(directory)


def test_a_missing_file_of_an_index_is_named(tmp_path: Path) -> None:
    directory = as_torch_files(make_checkpoint(tmp_path), 3)
    (directory / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(ModelError, match=r"lacks pytorch_model-00002-of-00003\.bin of .* \(1 of 3 files\)"):
        check(directory)
    with pytest.raises(ValueError, match=r"has no pytorch_model-00002-of-00003\.bin"):
        logits(directory)


@pytest.mark.parametrize("name", ["../other.bin", "model.safetensors", "training_args.pt"])
def test_an_index_names_torchs_files_of_its_directory_alone(name: str, tmp_path: Path) -> None:
    directory = as_torch_files(make_checkpoint(tmp_path), 2)
    (directory / BIN_INDEX_FILE).write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(ModelError, match=f"{BIN_INDEX_FILE} names '{name}', which is no"):
        check(directory)
