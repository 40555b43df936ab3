"""The demo model: a real one, whose greedy tokens in float32 and logits in bfloat16 are those of transformers."""

from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

from executor.models import load_model, read_model_config
from tests.fakes.paged_decoding import PagedDecoding, assert_greedy, greedy_tokens

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


def test_greedy_tokens_equal_those_of_transformers(demo_directory: Path, reference) -> None:
    prompts = encode(demo_directory, PROMPTS)
    assert len(prompts) == 20
    config = read_model_config(demo_directory)
    model = load_model(demo_directory, config, torch.float32, max_model_len=MAX_MODEL_LEN, progress=False)
    outputs = greedy_tokens(model, prompts, [NUM_TOKENS] * len(prompts), chunk_size=7, block_size=16)
    wholes = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    for prompt, output, logits_TV in zip(prompts, outputs, padded_logits(reference, wholes), strict=True):
        assert_greedy(logits_TV[len(prompt) - 1 : len(prompt) - 1 + NUM_TOKENS], output)


def test_bf16_logits_are_as_near_to_float32_as_those_of_transformers(demo_directory: Path, reference) -> None:
    """Within 1.5 % (root mean square) of transformers' float32 logits, and no further from them than its bfloat16."""
    [token_ids] = encode(demo_directory, (" ".join(PROMPTS[:7]),))
    expected_TV = logits_of(reference, token_ids)
    half = transformers.AutoModelForCausalLM.from_pretrained(demo_directory, dtype=torch.bfloat16)
    config = read_model_config(demo_directory)
    model = load_model(demo_directory, config, torch.bfloat16, max_model_len=MAX_MODEL_LEN, progress=False)
    decoding = PagedDecoding(model, 8, 16, torch.bfloat16)
    chunks = [token_ids[:20], token_ids[20:50], *([token_id] for token_id in token_ids[50:])]
    logits_TV = torch.cat([decoding.score(chunk) for chunk in chunks])
    error = root_mean_square(logits_TV - expected_TV)
    assert error < 0.015 * root_mean_square(expected_TV)
    assert error < root_mean_square(logits_of(half, token_ids) - expected_TV)
