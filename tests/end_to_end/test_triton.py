"""A two-layer model behind `octavo serve`: Triton's kernels, interpreted, give the tokens that the reference gives."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
from openai.types import Completion

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.model_directories import VOCAB_SIZE, write_tiny_model
from tests.fakes.octavo_server import Server, running_server

if find_spec("triton") is None:
    pytest.skip("there is no Triton for this platform", allow_module_level=True)

BLOCK_SIZE, NUM_TOKENS = 4, 5
FLAGS = {
    "dtype": "float32",
    "block-size": BLOCK_SIZE,
    "kv-cache-memory-bytes": "1MiB",
    "max-model-len": 48,
    "max-num-seqs": 4,
    "max-num-batched-tokens": 10,
    "served-model-name": "tiny",
}
SERVERS = {
    "triton": {"attention-backend": "triton", "quantization": "int4"},
    "reference": {"attention-backend": "reference", "quantization": "int4"},
    "fp8": {"attention-backend": "triton", "kv-cache-dtype": "fp8"},
}
PREFIX = "Three blocks."  # of 4 bytes, which are tokens, and one byte
PROMPTS = (PREFIX + " Or?", PREFIX + " More")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """All that is needed, started at the same time."""
    checkpoint = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    make_checkpoint(checkpoint, num_hidden_layers=2, vocab_size=VOCAB_SIZE)

    def start(name: str) -> Server:
        flags = [text for flag, value in (FLAGS | SERVERS[name]).items() for text in (f"--{flag}", str(value))]
        directory = tmp_path_factory.mktemp(name)
        return stack.enter_context(
            running_server(directory, str(checkpoint), *flags, environ={"TRITON_INTERPRET": "1"})
        )

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        yield dict(zip(SERVERS, pool.map(start, SERVERS), strict=True))


def complete(server: Server, **request: object) -> Completion:
    """Return an answer with the log probabilities of every token, and of the two best."""
    options: dict[str, object] = {"model": "tiny", "max_tokens": NUM_TOKENS, "logprobs": 2}
    return server.client().completions.create(**(options | request))


def assert_equal(answer: Completion, reference: Completion, least_gap: float) -> None:
    """Assert the same tokens, with the same log probabilities, and that none of the reference's was a close call."""
    for choice, expected in zip(answer.choices, reference.choices, strict=True):
        assert choice.logprobs is not None
        assert expected.logprobs is not None
        for best in expected.logprobs.top_logprobs or []:
            first, second, *_ = sorted(best.values(), reverse=True)
            assert first - second > least_gap, "the reference is undecided: choose another prompt"
        assert choice.text == expected.text
        assert choice.logprobs.tokens == expected.logprobs.tokens
        assert len(choice.logprobs.tokens or []) == NUM_TOKENS
        assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs.token_logprobs, abs=1e-4)


def test_greedy_tokens_in_chunks_with_a_shared_prefix(servers: dict[str, Server]) -> None:
    """Two prompts at once, each longer than a step, then one of them again."""
    answer, expected = (complete(servers[name], prompt=PROMPTS, temperature=0) for name in ("triton", "reference"))
    assert_equal(answer, expected, least_gap=1e-3)
    [again] = complete(servers["triton"], prompt=PROMPTS[1], temperature=0).choices
    assert again.text == expected.choices[1].text
    hits = servers["triton"].metric("octavo:prefix_cache_hits_total")
    assert hits is not None
    assert hits >= len(PREFIX) // BLOCK_SIZE * BLOCK_SIZE
    log = servers["triton"].log.read_text()
    assert "4-bit weights in groups of 32, multiplied by Triton kernels as they are" in log


def test_drawn_tokens_and_their_log_probabilities(servers: dict[str, Server]) -> None:
    request = {"prompt": "Ah", "temperature": 1.2, "top_p": 0.9, "seed": 5, "n": 2, "extra_body": {"top_k": 50}}
    answer, expected = (complete(servers[name], **request) for name in ("triton", "reference"))
    assert_equal(answer, expected, least_gap=0)
    assert answer.choices[0].text != answer.choices[1].text


def test_a_cache_in_float8_is_served(servers: dict[str, Server]) -> None:
    """The interpreter does not carry when it rounds to float8, so there is nothing to compare with."""
    [choice] = complete(servers["fp8"], prompt="Ah", max_tokens=3).choices
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == 3
    blocks = 2**20 // (2 * 2 * 2 * 16 * BLOCK_SIZE)  # layers, keys and values, heads, their size; a byte each
    assert f"{blocks} blocks of {BLOCK_SIZE} tokens" in servers["fp8"].log.read_text()
