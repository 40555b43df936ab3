"""The demo model behind the official client: what a user of the OpenAI API sees of a running server."""

import asyncio
import random
from collections.abc import Iterator

import httpx
import openai
import pytest

from octavo.models.resolve import resolve_model
from tests.fakes.octavo_server import Server, running_server
from tests.fakes.waiting import wait_until

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--kv-cache-memory-bytes", "128MiB", "--max-model-len", "4k", "--max-num-seqs", "64")
    with running_server(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


def test_models_name_the_demo_and_the_directory_of_its_gguf_file(server: Server) -> None:
    [model] = server.client().models.list().data
    assert model.id == MODEL
    assert model.root == str(resolve_model(None).directory)
    assert server.client().models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("no-such-model")


def test_chat_answers(server: Server) -> None:
    answer = server.client().chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=12)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_unstreamed_and_every_chunk_can_be_indexed(server: Server) -> None:
    request = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = server.client().chat.completions.create(**request).choices[0].message.content
    pieces = []
    for chunk in server.client().chat.completions.create(stream=True, **request):
        pieces.append(chunk.choices[0].delta.content)
    assert "".join(pieces) == whole


def test_completions_of_every_prompt_form_agree(server: Server) -> None:
    def complete(prompt: object) -> list[str]:
        answer = server.client().completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8, logprobs=1)
        return [choice.text for choice in answer.choices]

    text = "The first page of a book is"
    [single] = complete(text)
    echoed = server.client().completions.create(
        model=MODEL, prompt=text, echo=True, max_tokens=0, logprobs=0, extra_body={"return_token_ids": None}
    )
    assert echoed.choices[0].text == text
    assert complete([text, text]) == [single, single]


def test_seeds_repeat_and_choices_differ(server: Server) -> None:
    request = {"model": MODEL, "messages": QUESTION, "temperature": 1.5, "max_tokens": 16, "seed": 42, "n": 3}
    texts = [
        [choice.message.content for choice in server.client().chat.completions.create(**request).choices]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_penalties_and_two_stop_strings_at_high_temperature(server: Server) -> None:
    answer = server.client().completions.create(
        model=MODEL,
        prompt="One, two, three, four, five.",
        temperature=0.9,
        seed=7,
        presence_penalty=0.6,
        frequency_penalty=0.4,
        stop=["\n\n", " the "],
        max_tokens=60,
        extra_body={"repetition_penalty": 1.1},
    )
    assert "\n\n" not in answer.choices[0].text
    assert " the " not in answer.choices[0].text


def test_logprobs_are_those_of_the_raw_distribution(server: Server) -> None:
    request = {"model": MODEL, "messages": QUESTION, "max_tokens": 1, "logprobs": True, "top_logprobs": 3, "seed": 1}
    cold, hot = (
        server.client().chat.completions.create(temperature=temperature, **request).choices[0].logprobs
        for temperature in (0.0, 1.8)
    )
    assert cold is not None
    assert hot is not None
    assert cold.content
    assert hot.content
    first = {top.token: top.logprob for top in cold.content[0].top_logprobs}
    assert first == {top.token: top.logprob for top in hot.content[0].top_logprobs}
    assert cold.content[0].logprob == max(first.values())


def test_errors_are_the_clients_exceptions(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=3)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=MODEL, prompt="page " * 9000, max_tokens=1)
    assert too_long.value.code == "context_length_exceeded"


async def test_ten_requests_at_once(server: Server) -> None:
    async with server.async_client() as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model=MODEL, prompt=f"Page {i} of", max_tokens=10, temperature=0)
                for i in range(10)
            )
        )
    alone = server.client().completions.create(model=MODEL, prompt="Page 3 of", max_tokens=10, temperature=0)
    assert answers[3].choices[0].text == alone.choices[0].text


def test_a_shared_prefix_is_computed_once(server: Server) -> None:
    prefix = " ".join(f"word{i}" for i in range(200))
    usages = [
        server.client().completions.create(model=MODEL, prompt=f"{prefix} {tail}", max_tokens=1).usage
        for tail in ("one", "two")
    ]
    assert usages[0] is not None
    assert usages[1] is not None
    assert usages[0].prompt_tokens > 512
    first, second = (usage.prompt_tokens_details.cached_tokens for usage in usages if usage.prompt_tokens_details)
    assert first == 0
    assert usages[1].prompt_tokens - second <= 16 + 2  # the unfinished block, and what differs


async def test_streams_with_random_lengths_and_disconnects_end_and_give_their_blocks_back(server: Server) -> None:
    """64 at once, about half of which leave in the middle: the others end once, and nothing stays held."""
    rng = random.Random(0)
    plans = [(rng.randint(1, 40), rng.choice([None, rng.randint(1, 10)])) for _ in range(64)]

    async def stream(client: openai.AsyncOpenAI, i: int, length: int, leave_after: int | None) -> None:
        finishes, tokens = 0, 0
        response = await client.completions.create(
            model=MODEL,
            prompt=f"Story {i}: once upon a time",
            max_tokens=length,
            stream=True,
            extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
        )
        async with response:
            async for chunk in response:
                if not chunk.choices:
                    assert chunk.usage is not None
                    assert chunk.usage.completion_tokens == length
                    continue
                tokens += 1
                finishes += chunk.choices[0].finish_reason is not None
                if leave_after is not None and tokens >= leave_after:
                    return
        assert finishes == 1

    async with server.async_client() as client:
        await asyncio.gather(*(stream(client, i, *plan) for i, plan in enumerate(plans)))
    wait_until(lambda: server.metric("octavo:num_requests_running") == 0, 15)
    wait_until(lambda: server.metric("octavo:kv_cache_usage_perc") == 0, 15)
    assert server.metric("octavo:num_requests_waiting") == 0
    assert httpx.get(f"{server.url}/health").status_code == 200
