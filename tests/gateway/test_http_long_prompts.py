"""Prompts that cost much: refused soon, given up with their client, and nobody else waits for them."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.encodings import MAX_LONG
from protocol.messages import Submit
from tests.fakes.counted_work import Work
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import Served, chat, completion, serving
from tests.fakes.model_directories import VOCAB_SIZE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMOJI, DIGITS = "😀🎉🚀" * 699_050, "0123456789" * 200_000  # 8 MB, 2 MB

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("text", [EMOJI, DIGITS, "x" * 1_000_000, "the quick brown fox, " * 50_000])
async def test_a_hopeless_prompt_is_refused_without_all_of_it_being_tokenized(
    tiny_model: Path, tmp_path: Path, text: str
) -> None:
    """The bound on characters takes these texts; how many tokens they have nobody finds out."""
    scheduler = FakeScheduler(f"ipc://{tmp_path}/s", vocab_size=VOCAB_SIZE, max_model_len=8192)
    async with serving(tiny_model, scheduler) as served:
        for path, body, param in ((CHAT, chat(text), "messages"), (COMPLETIONS, completion(text), "prompt")):
            response = await served.post(path, body)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
            known = re.search("the prompt has at least ([0-9]+) tokens", error["message"])
            assert known is not None, error["message"]
            assert int(known[1]) < len(text) // 20  # in the tiny model a character is a token, or more
        assert scheduler.messages(Submit) == []


async def test_short_chats_are_answered_beside_long_prompts_of_which_too_many_are_a_429(served: Served) -> None:
    encodings, work = served.server.lifespan.state["service"].encodings, Work()
    long = [asyncio.create_task(encodings.run(work.steps(1), len(DIGITS))) for _ in range(MAX_LONG)]
    await work.begun(1)
    for path, body in ((CHAT, chat(DIGITS)), (COMPLETIONS, completion(["x" * 200] * 100))):
        refused = await served.post(path, body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    await served.chat()
    assert not any(each.done() for each in long)
    assert len(served.scheduler.messages(Submit)) == 1
    work.allow(MAX_LONG)
    await asyncio.gather(*long)
    assert (await served.post(CHAT, chat(DIGITS))).status_code == 400


async def test_a_prompt_whose_client_left_is_given_up(served: Served) -> None:
    encodings, work = served.server.lifespan.state["service"].encodings, Work()
    blocking = [asyncio.create_task(encodings.run(work.steps(1), len(DIGITS))) for _ in range(MAX_LONG - 1)]
    body, num_left = completion(["x" * 200] * 100, max_tokens=1), 0
    async with asyncio.timeout(30):
        while num_left < 3:  # each takes the last place, and leaves it to the next
            leaving = asyncio.create_task(served.post(COMPLETIONS, body))
            if (await asyncio.wait([leaving], timeout=0.2))[0]:
                assert leaving.result().status_code == 429  # the place of the one before is not free yet
            else:
                leaving.cancel()
                num_left += 1
        work.allow(len(blocking))
        await asyncio.gather(*blocking)
        assert (await served.post(COMPLETIONS, body)).status_code == 200
    assert len(served.scheduler.messages(Submit)) == 100  # of the one that stayed


async def test_a_prompt_in_slices_reaches_the_scheduler_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"ipc://{tmp_path}/s", vocab_size=VOCAB_SIZE, max_model_len=100_000)
    async with serving(tiny_model, scheduler) as served:
        text = "the quick brown fox, " * 2000
        answer = await served.complete([text, "short"], max_tokens=1, echo=True)
        assert answer["choices"][0]["text"][: len(text)] == text
        assert answer["usage"]["prompt_tokens"] == len(text) + len("short")


async def test_many_prompts_in_one_body_are_all_encoded(served: Served) -> None:
    prompts: list[Any] = [f"prompt {index}" for index in range(500)]
    answer = await served.complete(prompts, max_tokens=1)
    assert len(answer["choices"]) == 500
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
