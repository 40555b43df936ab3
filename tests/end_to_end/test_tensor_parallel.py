"""The demo model among three executors: the tokens of one, and streams that survive the death of any."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch

from octavo.executor.models import LoadPlan, load_model, read_model_config
from octavo.kernels import cpu
from tests.fakes.octavo_server import DEMO, Server, Stream, running_server
from tests.fakes.paged_decoding import PagedDecoding, assert_greedy, greedy_tokens
from tests.fakes.waiting import wait_until

NUM_RANKS = 3
NUM_TOKENS = 12
BLOCK_SIZE = 4
BLOCK_BYTES = 30 * 2 * 64 * BLOCK_SIZE * 4  # of one rank: layers, keys and values, head size, tokens, float32
PREFIX = "The little library at the end of the street lends books, maps and "
ENDINGS = (
    "music. It opens at",
    "old newspapers. The people who",
    "games. On Monday",
    "atlases. In the summer",
)
PROMPTS = [PREFIX + ending for ending in ENDINGS]  # of about 20 tokens
FLAGS = {
    "tensor-parallel-size": NUM_RANKS,
    "dtype": "float32",
    "block-size": BLOCK_SIZE,
    "kv-cache-memory-bytes": 18 * BLOCK_BYTES,  # the four sequences begin with 13 to 15 and come to fill 24 to 27
    "max-model-len": 40,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 12,
    "peer-timeout-s": 3,
}


@pytest.fixture(scope="module")
def server(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    with running_server(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


def texts_of_one(directory: Path) -> list[str]:
    """Return what the undivided model goes on with, greedily and clearly."""
    config = read_model_config(directory)
    model = load_model(LoadPlan(directory, config, torch.float32, max_model_len=64, backend=cpu, progress=False))
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    outputs = greedy_tokens(model, prompts, [NUM_TOKENS] * len(prompts), chunk_size=64)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits_TV = PagedDecoding(model, 16, 4, torch.float32).score(prompt + output)
        assert_greedy(logits_TV[len(prompt) - 1 : -1], output)
    return [tokenizer.decode(output) for output in outputs]


def test_three_ranks_give_the_tokens_of_one(server: Server, demo_directory: Path) -> None:
    """With a shared prefix, in chunks, in a pool too small for all."""
    answer = server.client().completions.create(model=DEMO, prompt=PROMPTS, max_tokens=NUM_TOKENS, temperature=0)
    assert [choice.text for choice in answer.choices] == texts_of_one(demo_directory)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == NUM_TOKENS * len(PROMPTS)
    wait_until(lambda: (server.metric("octavo:num_preemptions_total") or 0) > 0, 10)
    wait_until(lambda: (server.metric("octavo:prefix_cache_hits_total") or 0) > 0, 10)


def test_streams_survive_the_death_of_one_of_the_ranks(server: Server) -> None:
    undisturbed = Stream(server, "It was", 12).result()
    stream = Stream(server, "It was", 12)
    wait_until(lambda: len(stream.texts) > 4, 60)
    ranks = [server.rank(rank) for rank in range(NUM_RANKS)]
    ranks[2].send_signal(signal.SIGKILL)
    assert stream.result() == undisturbed
    assert undisturbed[1:] == (["length"], 12)
    assert not any(rank.is_running() for rank in ranks)
    assert len({server.rank(rank).pid for rank in range(NUM_RANKS)}) == NUM_RANKS
