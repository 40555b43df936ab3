"""What a checkpoint's tensors are decides, where its config.json is silent or says another thing."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.executor.models import LoadPlan, ModelDescription, load_model, read_model_config
from octavo.kernels import cpu
from tests.fakes.checkpoints import TINY, make_checkpoint
from tests.fakes.older_checkpoints import make_older
from tests.fakes.paged_decoding import PagedDecoding
from tests.fakes.quantized_checkpoints import awq

NATIVE, BORROWED = "LlamaForCausalLM", "GemmaForCausalLM"
BOTH_TIERS = pytest.mark.parametrize("architecture", [NATIVE, BORROWED])
TOKEN_IDS = list(range(3, 260, 13))
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def logits(directory: Path) -> Tensor:
    options = {"max_model_len": 64, "backend": cpu, "progress": False}
    model = load_model(LoadPlan(directory, read_model_config(directory), torch.float32, **options))
    return PagedDecoding(model, 16, 4, torch.float32).score(TOKEN_IDS)


@torch.inference_mode()
def reference_log_probabilities(directory: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model(torch.tensor([TOKEN_IDS])).logits[0].log_softmax(-1)


def read_both(directory: Path, **keys: object) -> ModelDescription:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return read_model_config(directory)


@BOTH_TIERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_config_without_dtype_has_that_of_the_tensors(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, architecture, dtype=dtype, dtype_key=None, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert read_model_config(tmp_path).dtype == dtype
    assert read_both(tmp_path, torch_dtype=None).dtype == dtype


@BOTH_TIERS
def test_a_few_norms_of_another_type_do_not_decide(architecture: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, dtype_key=None)
    norms = [name for name in load_file(directory / "model.safetensors") if "norm" in name]
    rewrite(directory, lambda tensors: tensors.update({name: tensors[name].float() for name in norms}))
    assert read_model_config(directory).dtype == torch.bfloat16


def test_scales_tell_the_dtype_of_packed_weights(tmp_path: Path) -> None:
    directory = awq(tmp_path, dtype_key=None).quantized
    halves = {torch.float32: torch.float16}
    rewrite(
        directory, lambda tensors: tensors.update({k: v.to(halves.get(v.dtype, v.dtype)) for k, v in tensors.items()})
    )
    assert read_model_config(directory).dtype == torch.float16


@BOTH_TIERS
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_what_config_says_of_the_dtype_counts(architecture: str, key: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, dtype_key=key)
    assert read_model_config(tmp_path).dtype == torch.bfloat16
    assert read_both(tmp_path, **{key: "float32"}).dtype == torch.float32


@BOTH_TIERS
def test_without_weights_an_unsaid_dtype_is_assumed_aloud(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (make_checkpoint(tmp_path, architecture, dtype_key=None) / "model.safetensors").unlink()
    assert read_model_config(tmp_path).dtype == torch.float32
    assert caplog.messages == [
        f"{tmp_path}/config.json says no dtype, and no weights are here that do: float32 is assumed"
    ]


def other_head(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(9)
    tensors[HEAD] = torch.randn(tensors[EMBEDDING].shape, generator=generator)


@BOTH_TIERS
def test_a_tied_head_that_differs_in_the_file_is_used(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = rewrite(make_checkpoint(tmp_path, architecture, tie_word_embeddings=True), other_head)
    with caplog.at_level(logging.WARNING):
        found = logits(directory).log_softmax(-1)
    torch.testing.assert_close(found, reference_log_probabilities(directory), atol=2e-3, rtol=0)
    [said] = [message for message in caplog.messages if "ties" in message]
    assert "they differ: each is used as it is (tie_word_embeddings should be false)" in said


@BOTH_TIERS
def test_a_tied_head_may_be_in_the_file_twice_or_under_its_own_name_alone(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_checkpoint(tmp_path, architecture, tie_word_embeddings=True)
    expected = logits(directory)
    rewrite(directory, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert torch.equal(logits(directory), expected)
    rewrite(directory, lambda tensors: tensors.pop(EMBEDDING))
    assert torch.equal(logits(directory), expected)
    assert not [message for message in caplog.messages if "ties" in message]


def test_a_tied_head_of_another_name_is_compared_too(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "llama", num_key_value_heads=TINY["num_attention_heads"])
    expected = logits(original)
    directory = make_older(
        tmp_path / "baichuan", original, "baichuan", tie_word_embeddings=True, vocab_size=TINY["vocab_size"]
    )
    assert torch.equal(logits(directory), expected)


def test_a_tensor_in_two_files_is_that_of_the_file_that_the_index_names(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, max_shard_size="100KB")
    expected = logits(directory)
    file_of = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    for name in sorted(set(file_of.values()) - {file_of[HEAD]}):
        tensors = load_file(directory / name)
        save_file(tensors | {HEAD: torch.zeros(TINY["vocab_size"], TINY["hidden_size"])}, directory / name)
    assert torch.equal(logits(directory), expected)
