"""Vectors: what decoders and encoders make of prompts, against transformers and plain arithmetic."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from octavo.executor.models import LoadPlan, load_model, read_model_config
from octavo.executor.models.kv_caches import allocate_kv_caches
from octavo.executor.models.pooling import Pooling, max_seq_length, read_pooling
from octavo.executor.step.runner import ModelRunner
from octavo.kernels import cpu
from octavo.protocol.messages import SequenceInit, SequenceResult, SequenceStep, Step, pack_ids
from octavo.protocol.sampling import Sampling
from tests.fakes.checkpoints import make_checkpoint, randomize

CPU = torch.device("cpu")
BLOCK_SIZE = 4
PROMPTS = [[5, 9, 200, 17, 30, 31, 32], [7], [11, 250, 12, 13, 14]]
ENCODER = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ENCODERS = {
    "BertModel": ENCODER,
    "BertForMaskedLM": ENCODER,
    "RobertaModel": ENCODER | {"pad_token_id": 1},
    "XLMRobertaModel": ENCODER | {"pad_token_id": 1},
    "DistilBertModel": {"vocab_size": 320, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "ElectraModel": ENCODER | {"embedding_size": 16},
    "ModernBertModel": ENCODER | {"local_attention": 6, "pad_token_id": 0},
}


def write_encoder(directory: Path, architecture: str) -> Path:
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**ENCODERS[architecture]))
    randomize(model, seed=0)
    model.save_pretrained(directory)
    return directory


def write_pooling(directory: Path, pooling: dict[str, Any], *modules: str) -> None:
    """Write the files with which a checkpoint of sentence-transformers says how it pools."""
    listed = ["Transformer", "Pooling", *modules]
    paths = {"Transformer": ""} | {name: f"{index}_{name}" for index, name in enumerate(listed) if index}
    kinds = [{"type": f"sentence_transformers.models.{name}", "path": paths[name]} for name in listed]
    (directory / "modules.json").write_text(json.dumps(kinds))
    (directory / paths["Pooling"]).mkdir(exist_ok=True)
    (directory / paths["Pooling"] / "config.json").write_text(json.dumps(pooling))


def runner_of(directory: Path, pooling: Pooling, dtype: torch.dtype = torch.float32) -> ModelRunner:
    plan = LoadPlan(directory, read_model_config(directory), dtype, max_model_len=56, backend=cpu)
    model = load_model(plan)
    caches = allocate_kv_caches(model.kv_shapes, 32, BLOCK_SIZE, dtype, CPU)
    sizes = {"block_size": BLOCK_SIZE, "num_blocks": 32}
    from octavo.executor.step.device import device_of

    return ModelRunner(model, caches, cpu, **sizes, device=device_of(CPU), pooling=pooling)


def embed(runner: ModelRunner, prompts: list[list[int]], chunk: int = 100) -> list[np.ndarray]:
    """Return the vector of each prompt; each step has the next `chunk` tokens of all of them."""
    results: dict[int, SequenceResult] = {}
    for number, start in enumerate(range(0, max(map(len, prompts)), chunk)):
        shares = [
            SequenceStep(
                seq_id,
                start,
                pack_ids(prompt[start : start + chunk]),
                pack_ids(range(seq_id * 8, seq_id * 8 + 8)),
                False,
                SequenceInit(Sampling(max_tokens=0, seed=0), len(prompt), task="embed") if start == 0 else None,
            )
            for seq_id, prompt in enumerate(prompts)
            if start < len(prompt)
        ]
        result = runner.run(Step("", "", number + 1, shares))
        for share, given in zip(shares, result.sequences, strict=True):
            assert given.token_ids == []
            if given.embedding:
                assert share.seq_id not in results
                results[share.seq_id] = given
    return [np.frombuffer(results[index].embedding, np.float32) for index in range(len(prompts))]


@torch.inference_mode()
def hidden_states(directory: Path, prompt: list[int]) -> Tensor:
    """Return transformers' hidden_TE of a prompt alone."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model(input_ids=torch.tensor([prompt])).last_hidden_state[0]


def pooled(hidden_TE: Tensor, kind: str, *, normalizes: bool = True) -> np.ndarray:
    vector_E = {"last": hidden_TE[-1], "cls": hidden_TE[0], "mean": hidden_TE.mean(0)}[kind]
    return (vector_E / vector_E.norm() if normalizes else vector_E).numpy()


@pytest.mark.parametrize("architecture", ENCODERS)
def test_encoders_give_the_vectors_of_transformers(architecture: str, tmp_path: Path) -> None:
    directory = write_encoder(tmp_path, architecture)
    for prompts in (PROMPTS, [PROMPTS[0], PROMPTS[0][::-1]]):  # of different lengths, and of the same
        vectors = embed(runner_of(directory, Pooling("mean")), prompts)
        for prompt, vector in zip(prompts, vectors, strict=True):
            np.testing.assert_allclose(vector, pooled(hidden_states(directory, prompt), "mean"), atol=1e-5)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
@pytest.mark.parametrize("normalizes", [True, False])
def test_decoders_give_the_vectors_of_transformers(kind: Any, chunk: int, normalizes: bool, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    vectors = embed(runner_of(directory, Pooling(kind, normalizes=normalizes)), PROMPTS, chunk)
    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        expected = pooled(hidden_states(directory, prompt), kind, normalizes=normalizes)
        np.testing.assert_allclose(vector, expected, atol=1e-4)


def test_a_prompt_is_embedded_beside_one_that_generates(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path)
    runner = runner_of(directory, Pooling("mean"))
    [alone] = embed(runner, PROMPTS[:1])
    params = Sampling(max_tokens=3, seed=0, temperature=0.0, num_logprobs=1)
    both = [
        SequenceStep(7, 0, pack_ids(PROMPTS[2]), pack_ids([9, 10]), True, SequenceInit(params, len(PROMPTS[2]))),
        SequenceStep(
            8,
            0,
            pack_ids(PROMPTS[0]),
            pack_ids([1, 2]),
            False,
            SequenceInit(Sampling(max_tokens=0, seed=0), len(PROMPTS[0]), task="embed"),
        ),
    ]
    generated, embedded = runner.run(Step("", "", 1, both)).sequences
    assert len(generated.token_ids) == 1
    assert generated.embedding == b""
    np.testing.assert_allclose(np.frombuffer(embedded.embedding, np.float32), alone, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_a_checkpoint_says_how_it_pools(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    write_pooling(tmp_path, config | {"word_embedding_dimension": 32})
    pooling = read_pooling(tmp_path, "auto", CPU)
    assert (pooling.kind, pooling.normalizes, pooling.size(32)) == (kind, False, 32)
    assert read_pooling(tmp_path, "cls", CPU).kind == "cls"
    write_pooling(tmp_path, config, "Normalize")
    assert read_pooling(tmp_path, "auto", CPU).normalizes


def test_a_decoder_without_such_files_takes_the_last_token(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, "auto", CPU) == Pooling("last", (), True)


def test_a_dense_module_is_applied_before_the_length(tmp_path: Path) -> None:
    write_pooling(tmp_path, {"pooling_mode_mean_tokens": True}, "Dense", "Normalize")
    weight = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text(
        json.dumps({"activation_function": "torch.nn.modules.linear.Identity"})
    )
    save_file(
        {"linear.weight": weight, "linear.bias": torch.tensor([0.0, 1.0])}, tmp_path / "2_Dense/model.safetensors"
    )
    pooling = read_pooling(tmp_path, "auto", CPU)
    vector = pooling.vector(pooling.add(None, torch.tensor([[1.0, 0.0, 0.0], [1.0, 2.0, 4.0]])), 2)
    expected = torch.tensor([3.0, 4.0])
    assert pooling.size(3) == 2
    torch.testing.assert_close(vector, expected / expected.norm())


@pytest.mark.parametrize(
    ("config", "modules", "complaint"),
    [
        ({"pooling_mode_max_tokens": True}, (), "pooling_mode_max_tokens is not supported"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, (), "is not supported"),
        ({"pooling_mode_mean_tokens": True}, ("LSTM",), "'LSTM' is not supported"),
    ],
)
def test_another_pooling_is_refused_by_name(
    config: dict[str, Any], modules: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    write_pooling(tmp_path, config, *modules)
    with pytest.raises(ValueError, match=complaint):
        read_pooling(tmp_path, "auto", CPU)


@pytest.mark.parametrize("path", ["../elsewhere", "/etc"])
def test_a_module_outside_the_directory_is_refused(path: str, tmp_path: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": path}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="leads out"):
        read_pooling(tmp_path, "auto", CPU)


def test_texts_are_as_long_as_the_checkpoint_says(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path, "BertModel")
    assert read_model_config(directory).default_max_model_len == 64
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 24}))
    assert max_seq_length(directory) == 24
    config = read_model_config(directory)
    assert (config.default_max_model_len, config.longest_sequence_tokens) == (24, 64)


def test_positions_of_roberta_begin_after_that_of_padding(tmp_path: Path) -> None:
    config = read_model_config(write_encoder(tmp_path, "RobertaModel"))
    assert config.longest_sequence_tokens == 62


def test_quantization_of_an_encoder_is_refused(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path, "BertModel")
    config = read_model_config(directory)
    plan = LoadPlan(directory, config, torch.float32, max_model_len=24, backend=cpu, quantization="int8")
    with pytest.raises(ValueError, match="leave out --quantization"):
        load_model(plan)


def test_a_missing_weight_of_an_encoder_is_named(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path, "BertModel")
    model = transformers.AutoModel.from_pretrained(directory)
    left = {name: tensor for name, tensor in model.state_dict().items() if "layer.1.output.dense" not in name}
    save_file(left, directory / "model.safetensors", metadata={"format": "pt"})
    plan = LoadPlan(directory, read_model_config(directory), torch.float32, max_model_len=24, backend=cpu)
    with pytest.raises(ValueError, match=r"lacks encoder\.layer\.1\.output\.dense"):
        load_model(plan)
