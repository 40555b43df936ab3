"""How a model of the second tier is loaded, what it says meanwhile, and what is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.dynamic_module_utils
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.executor.models import LoadPlan, TensorParallel, load_model, read_model_config
from octavo.executor.quantization import round_weight
from octavo.executor.start.startup import start_executor
from octavo.kernels import cpu, reference
from octavo.protocol.config import Config
from tests.fakes.borrowed_checkpoints import CASES, Case, load, random_prompts, write
from tests.fakes.checkpoints import TINY, make_checkpoint
from tests.fakes.paged_decoding import PagedDecoding, assert_greedy, assert_near, greedy_tokens
from tests.fakes.runner_driver import init, share, step

REMOTE_CODE = """
import torch
from torch import nn
from transformers import LlamaForCausalLM


class OwnForCausalLM(LlamaForCausalLM):
    pass


class LeakyForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, inputs, output: output + output.mean(1, keepdim=True))


class Attention(nn.Module):
    def forward(self, hidden_states, **_):
        return hidden_states.cumsum(1), None


class SelfMadeForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = Attention()
"""


def test_an_executor_starts_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write(tmp_path, CASES["gemma2"])
    with caplog.at_level(logging.INFO):
        executor = start_executor(
            Config(model=str(directory), dtype="bfloat16", max_model_len=40, kv_cache_memory_bytes=1 << 20)
        )
    assert executor.description.max_model_len == 40
    assert executor.description.vocab_size == TINY["vocab_size"]
    assert executor.runner.num_blocks == (1 << 20) // (2 * 2 * 2 * 16 * 16 * 2)  # layers, K and V, heads, size, tokens
    assert "Gemma2ForCausalLM runs through transformers' modelling code" in caplog.text
    assert "MiB of weights (" in caplog.text
    executor.progress.layers_done = 0
    executor.runner.run(step(1, share(1, 0, [5, 9], [3], init=init([5, 9]))))
    assert executor.progress.layers_done == 2


def test_it_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = write(tmp_path, CASES["gpt-oss"])
    capfd.readouterr()
    load(directory)
    assert capfd.readouterr() == ("", "")


def test_progress_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = write(tmp_path, CASES["glm"])
    capfd.readouterr()
    load(directory, progress=True)
    bars = capfd.readouterr().err
    assert "loading weights: 100%" in bars
    assert "packing weights: 100%" in bars


def test_random_weights_are_those_of_the_seed(tmp_path: Path) -> None:
    """For trials of speed: nothing but config.json is read, and the same seed gives the same model."""
    write(tmp_path, CASES["mixtral"])
    (tmp_path / "model.safetensors").unlink()
    outputs = [
        greedy_tokens(load(tmp_path, load_format="dummy", seed=seed), random_prompts(9), [8], chunk_size=9)
        for seed in (1, 1, 2)
    ]
    assert outputs[0] == outputs[1] != outputs[2]


def test_mxfp4_experts_are_widened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The form of OpenAI's own checkpoints: equal to the checkpoint that holds the widened values."""
    directory = write(tmp_path / "mxfp4", Case("GptOssForCausalLM", CASES["gpt-oss"].config))
    as_mxfp4(directory)
    with caplog.at_level(logging.INFO):
        model = load(directory)
    assert "mxfp4 weights are widened to torch.float32" in caplog.text
    widened = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        attn_implementation="eager",
    )
    [prompt] = random_prompts(30)
    [output] = greedy_tokens(model, [prompt], [8], chunk_size=16)
    with torch.inference_mode():
        assert_greedy(widened(torch.tensor([prompt + output])).logits[0, 29:-1], output)


def as_mxfp4(directory: Path) -> None:
    """Replace the experts of a GPT-OSS checkpoint by random ones in groups of 32 codes of 4 bits."""
    generator = torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_inputs, num_outputs = tensor.shape
            groups = (num_experts, num_outputs, num_inputs // 32)
            stored[f"{name}_blocks"] = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(122, 126, groups, generator=generator, dtype=torch.uint8)
        else:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors")
    edit(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def edit(directory: Path, **keys: object) -> None:
    """Change keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_linear_layers_are_rounded_but_those_that_choose_experts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each layer attention and the shared expert, but not its gate, which has one output; nor the head."""
    config: dict[str, Any] = CASES["qwen2-moe"].config | {"shared_expert_intermediate_size": 64}
    directory = write(tmp_path, Case("Qwen2MoeForCausalLM", config))
    with caplog.at_level(logging.INFO):
        model = load(directory, backend=reference, quantization="int8")
    assert [product.form.startswith("8-bit") for product in model.products].count(True) == 2 * 7
    assert len(model.products) == 2 * (7 + 1) + 1
    assert "model.layers.1.mlp.shared_expert_gate stays plain" in caplog.text
    assert "MiB of stacked experts stay plain" in caplog.text

    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight") and ".experts." not in name:
            rounded = round_weight(weight, 8)
            assert rounded is not None
            weights[name] = rounded.dequantize()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    expected_TV, logits_TV = (
        PagedDecoding(of, 16, 4, torch.float32).score(random_prompts(30)[0]) for of in (load(directory), model)
    )
    assert_near(logits_TV, expected_TV)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "lacks 1 tensor: model.layers.1.mlp.up_proj.weight"),
        ({"model.extra": torch.zeros(2)}, "of no use to the model, 1 tensor: model.extra"),
        ({"model.norm.weight": torch.zeros(3)}, r"of another shape than config.json asks for, 1 .*norm.weight \(3,\)"),
    ],
    ids=["missing", "left over", "of another shape"],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    directory = write(tmp_path, CASES["granite"])
    stored = load_file(directory / "model.safetensors") | change
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(directory)


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("FalconForCausalLM", {}, "its attention does not go through AttentionInterface"),
        ("BloomForCausalLM", {}, "its attention does not go through AttentionInterface"),
        ("MptForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "does not go through AttentionInterface"),
        ("MambaForCausalLM", {}, "its layers keep another kind of state than attention"),
        ("FalconH1ForCausalLM", {}, "its layers keep another kind of state than attention"),
        ("Qwen3NextForCausalLM", {}, "its layers keep another kind of state than attention"),
        (
            "GraniteMoeHybridForCausalLM",
            {"layer_types": ["mamba", "attention"]},
            "another kind of state than attention",
        ),
        ("BertLMHeadModel", {}, "a token attends to others than itself and the last ones before it"),
        ("Llama4ForCausalLM", {"head_dim": 16}, "a token attends to others than itself and the last ones before it"),
        ("DiffLlamaForCausalLM", {}, "its layers share attention modules"),
        ("BartForCausalLM", {"is_encoder_decoder": True}, "it is an encoder and a decoder"),
        ("T5ForConditionalGeneration", {}, "transformers has it, but not as a decoder of text"),
        ("Gemma3ForConditionalGeneration", {}, "it takes more than text"),
        ("Phi3ForCausalLM", {"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported"),
        ("Phi3ForCausalLM", {"quantization_config": {"quant_method": "gguf"}}, "quant_method 'gguf' is not read in"),
        ("NobodyForCausalLM", {"model_type": "nobody"}, f"transformers {transformers.__version__} does not know it"),
        ("GemmaForCausalLM", {"model_type": "nobody"}, "transformers cannot read"),
        ("GemmaForCausalLM", {"head_dim": "many"}, "transformers cannot read"),
        ("GemmaForCausalLM", {"num_hidden_layers": 10**6}, "1000000 layers"),
        ("GPT2LMHeadModel", {"num_attention_heads": 0}, "does not run without weights"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    architecture: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Before any weight is read: there are none."""
    model_class = getattr(transformers, architecture, None)
    keys = {"model_type": model_class.config_class.model_type} if model_class else {}
    write_config(tmp_path, architecture, **keys | TINY | {"num_hidden_layers": 2} | config)
    with pytest.raises(ValueError, match=f"{architecture} is not supported: .*{reason}"):
        read_model_config(tmp_path)


def write_config(directory: Path, architecture: str, **keys: object) -> Path:
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture], **keys}))
    return directory


def test_it_cannot_be_split_among_ranks(tmp_path: Path) -> None:
    write(tmp_path, CASES["gemma"])
    with pytest.raises(ValueError, match=r"GemmaForCausalLM .* cannot be split; only these can: LlamaForCausalLM"):
        load(tmp_path, parallel=TensorParallel(0, 2))


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with modelling code of its own, which transformers copies to a place of this test."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    directory = make_checkpoint(tmp_path / "remote", num_hidden_layers=2)
    (directory / "modeling_remote.py").write_text(REMOTE_CODE)
    return directory


def choose_remote_class(directory: Path, name: str) -> None:
    edit(directory, architectures=[name], auto_map={"AutoModelForCausalLM": f"modeling_remote.{name}"})


def test_code_of_a_checkpoint_runs_if_it_may(remote: Path) -> None:
    prompts = random_prompts(20)
    expected = greedy_tokens(load(remote), prompts, [9], chunk_size=8)
    choose_remote_class(remote, "OwnForCausalLM")
    with pytest.raises(ValueError, match=r"OwnForCausalLM is not supported: .* --trust-remote-code is not set"):
        read_model_config(remote)
    config = read_model_config(remote, trust_remote_code=True)
    model = load_model(LoadPlan(remote, config, torch.float32, max_model_len=40, backend=cpu, progress=False))
    assert greedy_tokens(model, prompts, [9], chunk_size=8) == expected


def test_code_whose_attention_is_its_own_is_refused(remote: Path) -> None:
    choose_remote_class(remote, "SelfMadeForCausalLM")
    with pytest.raises(ValueError, match="goes through AttentionInterface 0 times in its 2 layers"):
        read_model_config(remote, trust_remote_code=True)


def test_code_that_mixes_tokens_elsewhere_than_in_attention_is_refused(remote: Path) -> None:
    choose_remote_class(remote, "LeakyForCausalLM")
    config = read_model_config(remote, trust_remote_code=True)
    with pytest.raises(ValueError, match=r"LeakyForCausalLM is not supported: .* its logits deviate by"):
        load_model(LoadPlan(remote, config, torch.float32, max_model_len=40, backend=cpu, progress=False))
