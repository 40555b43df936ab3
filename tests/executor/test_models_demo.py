"""The demo model: a real one, whose greedy tokens in float32 and logits in bfloat16 are those of transformers."""

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

from octavo.executor.models import Decoder, LoadPlan, load_model, read_model_config
from octavo.executor.models.kv_caches import allocate_kv_caches
from octavo.executor.step.runner import ModelRunner
from octavo.kernels import cpu
from octavo.models.resolve import resolve_model
from tests.fakes.paged_decoding import PagedDecoding, assert_greedy, greedy_tokens
from tests.fakes.runner_driver import RunnerDriver, init

NUM_TOKENS = 12
MAX_MODEL_LEN = 128
PROMPTS = (
    "The capital of France is",
    "The sun rises in the",
    "def fibonacci(n):\n",
    "The three primary colors are",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5, 6,",
    "Paris, London, Berlin,",
    "import numpy as np\n",
    "The largest planet in our solar system is",
    "Roses are red, violets are",
    "Happy birthday to",
    "In 1969, Neil Armstrong",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n",
    "Monday, Tuesday, Wednesday,",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "Albert Einstein was born in",
    "A triangle has three sides and",
    "<html>\n<head>\n",
)


@pytest.fixture(scope="module")
def reference(demo_directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(demo_directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def native(demo_directory: Path) -> dict[torch.dtype, Decoder]:
    config = read_model_config(demo_directory)
    return {
        dtype: load_model(
            LoadPlan(demo_directory, config, dtype, max_model_len=MAX_MODEL_LEN, backend=cpu, progress=False)
        )
        for dtype in (torch.float32, torch.bfloat16)
    }


def encode(directory: Path, texts: tuple[str, ...]) -> list[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


@torch.inference_mode()
def logits_of(model: transformers.PreTrainedModel, token_ids: list[int]) -> Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


@torch.inference_mode()
def padded_logits(model: transformers.PreTrainedModel, sequences: list[list[int]]) -> Tensor:
    """Return the logits_BTV of sequences filled up at their end, which nothing before it sees."""
    longest = max(map(len, sequences))
    return model(torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])).logits


def root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def test_greedy_tokens_equal_those_of_transformers(demo_directory: Path, native, reference) -> None:
    prompts = encode(demo_directory, PROMPTS)
    assert len(prompts) == 20
    outputs = greedy_tokens(native[torch.float32], prompts, [NUM_TOKENS] * len(prompts), chunk_size=7, block_size=16)
    wholes = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    for prompt, output, logits_TV in zip(prompts, outputs, padded_logits(reference, wholes), strict=True):
        assert_greedy(logits_TV[len(prompt) - 1 : len(prompt) - 1 + NUM_TOKENS], output)


def test_the_published_4_bit_weights_give_the_tokens_of_their_bf16_conversion(demo_directory: Path, reference) -> None:
    """The conversion moves logits by up to 0.22 here, so the reference's gaps have to be twice as wide."""
    directory = resolve_model(None).directory
    config = read_model_config(directory)
    model = load_model(
        LoadPlan(
            directory,
            config,
            torch.float32,
            max_model_len=MAX_MODEL_LEN,
            backend=cpu,
            progress=False,
            quantization="gguf",
        )
    )
    prompts = encode(directory, ("1, 2, 3, 4, 5, 6,", "The largest planet in our solar system is"))
    outputs = greedy_tokens(model, prompts, [4, 4], chunk_size=32, block_size=16)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits_TV = logits_of(reference, prompt + output)
        assert_greedy(logits_TV[len(prompt) - 1 : -1], output, least_gap=0.45)


def test_bf16_logits_are_as_near_to_float32_as_those_of_transformers(demo_directory: Path, native, reference) -> None:
    """Within 1.5 % (root mean square) of transformers' float32 logits, and no further from them than its bfloat16."""
    [token_ids] = encode(demo_directory, (" ".join(PROMPTS[:7]),))
    expected_TV = logits_of(reference, token_ids)
    half = transformers.AutoModelForCausalLM.from_pretrained(demo_directory, dtype=torch.bfloat16)
    decoding = PagedDecoding(native[torch.bfloat16], 8, 16, torch.bfloat16)
    chunks = [token_ids[:20], token_ids[20:50], *([token_id] for token_id in token_ids[50:])]
    logits_TV = torch.cat([decoding.score(chunk) for chunk in chunks])
    error = root_mean_square(logits_TV - expected_TV)
    assert error < 0.015 * root_mean_square(expected_TV)
    assert error < root_mean_square(logits_of(half, token_ids) - expected_TV)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neighbours_chunks_and_blocks_do_not_change_a_bit(demo_directory: Path, native, dtype: torch.dtype) -> None:
    """With the shapes of a real model, for which oneDNN chooses other kernels than for a tiny one."""
    prompts = encode(demo_directory, (*PROMPTS[:3], " ".join(PROMPTS[7:15])))
    alone = [drawn(native[dtype], dtype, [prompt], chunk_size=MAX_MODEL_LEN)[0] for prompt in prompts]
    assert len({str(outputs) for outputs in alone}) == len(prompts)
    assert drawn(native[dtype], dtype, prompts, chunk_size=MAX_MODEL_LEN) == alone
    assert drawn(native[dtype], dtype, prompts, chunk_size=5, block_size=8) == alone


def drawn(model: Decoder, dtype: torch.dtype, prompts: list[list[int]], *, chunk_size: int, block_size: int = 16):
    """Return three drawn tokens after each prompt, with their log probabilities, all computed together."""
    num_blocks = len(prompts) * MAX_MODEL_LEN // block_size
    kv_caches = allocate_kv_caches(model.kv_shapes, num_blocks, block_size, dtype, torch.device("cpu"))
    driver = RunnerDriver(ModelRunner(model, kv_caches, cpu, block_size=block_size, num_blocks=num_blocks))
    todo = [list(prompt) for prompt in prompts]
    outputs: list[list[tuple[list[int], object]]] = [[] for _ in prompts]
    while unfinished := [number for number, tokens in enumerate(outputs) if len(tokens) < 3]:
        shares = []
        for number in unfinished:
            begin = init(prompts[number], temperature=0.9, top_p=0.9, seed=7, num_logprobs=2)
            is_first = not outputs[number] and len(todo[number]) == len(prompts[number])
            part, todo[number] = todo[number][:chunk_size], todo[number][chunk_size:]
            shares.append(driver.share(number, part, sample=not todo[number], init=begin if is_first else None))
        for number, result in zip(unfinished, driver.do(*shares), strict=True):
            if result.token_ids:
                outputs[number].append((result.token_ids, result.logprobs))
    return outputs
