"""Bodies that cost much: refused soon, given up with their client, and nobody else waits for them."""

import asyncio
import itertools
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.gateway.http.door import SHORT_BYTES
from octavo.gateway.reading.long_bodies import MAX_BODIES
from octavo.protocol.messages import Submit
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import Served, chat, completion, serving
from tests.fakes.model_directories import VOCAB_SIZE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMOJI, DIGITS = "😀🎉🚀" * 699_050, "0123456789" * 200_000  # 8 MB, 2 MB
LONG = {"metadata": {"note": "x" * SHORT_BYTES}}  # makes a body long, and changes nothing

pytestmark = pytest.mark.asyncio(loop_scope="module")


def reader_pids() -> list[int]:
    """Return the processes that read long bodies for gateways in this one."""
    shown = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [int(line.split()[0]) for line in shown.stdout.splitlines() if "-m octavo.gateway.reader" in line]


@asynccontextmanager
async def stopped_readers(served: Served) -> AsyncIterator[None]:
    """Have a reader that reads nothing for a while."""
    await served.complete("hi", **LONG)
    pids = reader_pids()
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def wait_for_bodies(served: Served, num: int) -> None:
    """Return once `num` long bodies are being read."""
    async with asyncio.timeout(20):
        while served.server.lifespan.state["service"].long_bodies.num_bodies != num:
            await asyncio.sleep(0.001)


async def test_a_hopeless_prompt_is_refused_without_all_of_it_being_tokenized(tiny_model: Path, tmp_path: Path) -> None:
    """The bound on characters takes these texts; how many tokens they have nobody finds out."""
    scheduler = FakeScheduler(f"ipc://{tmp_path}/s", vocab_size=VOCAB_SIZE, max_model_len=8192)
    texts = (EMOJI, DIGITS, "x" * 1_000_000, "the quick brown fox, " * 50_000)
    async with serving(tiny_model, scheduler) as served:
        for text, (path, param) in itertools.product(texts, ((CHAT, "messages"), (COMPLETIONS, "prompt"))):
            response = await served.post(path, chat(text) if path == CHAT else completion(text))
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
            known = re.search("the prompt has at least ([0-9]+) tokens", error["message"])
            assert known is not None, error["message"]
            assert int(known[1]) < len(text) // 20  # in the tiny model a character is a token, or more
        assert scheduler.messages(Submit) == []


async def test_a_long_body_means_what_a_short_one_means(served: Served) -> None:
    short = {"n": 2, "seed": 5, "logprobs": 2, "echo": True, "stop": "q", "logit_bias": {"7": 1}, "temperature": 0.5}
    answers, submits = [], []
    for fields in (short, short | LONG):
        answer = await served.complete(["one text", [5, 6, 7]][:1] * 2, **fields)
        answers.append([(each["text"], each["finish_reason"]) for each in answer["choices"]] + [answer["usage"]])
        submits.append([(each.prompt_token_ids, each.sampling) for each in served.scheduler.messages(Submit)[-4:]])
    assert answers[0] == answers[1]
    assert sorted(submits[0], key=repr) == sorted(submits[1], key=repr)
    chats = [await served.chat("hi <|im_end|>", seed=5, **fields) for fields in ({}, LONG)]
    assert chats[0]["choices"] == chats[1]["choices"]
    assert chats[0]["usage"] == chats[1]["usage"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"temperature": 3}),
        (CHAT, {"model": "x" * SHORT_BYTES}),
        (CHAT, {"messages": [{"role": "user", "content": None}]}),
        (CHAT, {"chat_template_kwargs": {"x" * SHORT_BYTES: 1}}),
        (CHAT, {"max_tokens": 600}),
        (COMPLETIONS, {"logit_bias": {"x" * SHORT_BYTES: 1}}),
        (COMPLETIONS, {"prompt": [4096]}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": ["a"] * 500, "n": 3}),
        (COMPLETIONS, {"min_tokens": 9, "max_tokens": 8}),
    ],
)
async def test_a_long_body_is_refused_in_the_words_for_a_short_one(
    served: Served, path: str, fields: dict[str, Any]
) -> None:
    body = (chat() if path == CHAT else completion()) | fields
    short, long = await served.post(path, body), await served.post(path, body | LONG)
    assert (long.status_code, long.json()) == (short.status_code, short.json())
    assert short.status_code in (400, 404)


async def test_no_value_of_a_body_is_decoded_on_the_event_loop(served: Served) -> None:
    """While the readers stand still, a body of each kind waits, and everybody else is answered."""
    bodies: list[dict[str, Any]] = [
        chat() | dict.fromkeys(f"unknown{index}" for index in range(20_000)),
        chat() | {f"unknown{index}": 1 for index in range(20_000)},
        completion([1] * 100_000),
        completion([[1]] * 50_000),
        completion(metadata={str(index): 1 for index in range(20_000)}),
        completion(logit_bias={str(index): 1 for index in range(20_000)}),
        completion(stop=["x"] * 50_000),
        completion(stop_token_ids=[1] * 50_000),
        chat([{"type": "text", "text": "x"}] * 10_000),
        {"messages": [{"role": "user", "content": "x"}] * 10_000},
        {"prompt": 1, "x" * SHORT_BYTES: 1},
    ]
    async with stopped_readers(served):
        waiting = [
            asyncio.create_task(served.post(CHAT if "messages" in body else COMPLETIONS, body)) for body in bodies
        ]
        for _ in range(3):
            await served.chat()
        assert not any(each.done() for each in waiting)
    statuses = [(await each).status_code for each in waiting]
    assert statuses == [200, *[400] * 3, 200, *[400] * 6]


async def test_short_chats_are_answered_beside_long_bodies_of_which_too_many_are_a_429(served: Served) -> None:
    async with stopped_readers(served):
        long = [asyncio.create_task(served.post(CHAT, chat(DIGITS))) for _ in range(MAX_BODIES)]
        await wait_for_bodies(served, MAX_BODIES)
        for path, body in ((CHAT, chat(DIGITS)), (COMPLETIONS, completion("hi", **LONG))):
            refused = await served.post(path, body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        await served.chat()
        assert not any(each.done() for each in long)
    assert {(await each).status_code for each in long} == {400}
    assert (await served.post(CHAT, chat(DIGITS))).status_code == 400


async def test_a_long_body_whose_client_left_gives_its_place_to_the_next(served: Served) -> None:
    body = completion(["x" * 200] * 500, max_tokens=1)
    async with stopped_readers(served):
        for _ in range(MAX_BODIES + 3):
            leaving = asyncio.create_task(served.post(COMPLETIONS, body))
            await wait_for_bodies(served, 1)
            leaving.cancel()
            await wait_for_bodies(served, 0)
    served.scheduler.received.clear()
    assert (await served.post(COMPLETIONS, body)).status_code == 200
    assert len(served.scheduler.messages(Submit)) == 500  # of the one that stayed


async def test_a_body_whose_reader_ends_is_read_by_the_next(served: Served) -> None:
    async with stopped_readers(served):
        answering = asyncio.create_task(served.complete("hi", **LONG))
        await wait_for_bodies(served, 1)
        before = reader_pids()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert (await answering)["choices"]
    assert not set(before) & set(reader_pids())


async def test_readers_end_with_their_gateway(tiny_model: Path, tmp_path: Path) -> None:
    others = set(reader_pids())
    scheduler = FakeScheduler(f"ipc://{tmp_path}/s", vocab_size=VOCAB_SIZE, max_model_len=512)
    async with serving(tiny_model, scheduler) as served:
        await served.complete("hi", **LONG)
        assert set(reader_pids()) - others
    assert set(reader_pids()) <= others


async def test_a_prompt_in_slices_reaches_the_scheduler_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    scheduler = FakeScheduler(f"ipc://{tmp_path}/s", vocab_size=VOCAB_SIZE, max_model_len=100_000)
    async with serving(tiny_model, scheduler) as served:
        text = "the quick brown fox, " * 4000
        assert len(msgspec.json.encode(text)) > SHORT_BYTES
        answer = await served.complete([text, "short"], max_tokens=1, echo=True)
        assert answer["choices"][0]["text"][: len(text)] == text
        assert answer["usage"]["prompt_tokens"] == len(text) + len("short")


async def test_many_prompts_in_one_body_are_all_encoded(served: Served) -> None:
    prompts: list[Any] = [f"prompt {index}" for index in range(500)]
    answer = await served.complete(prompts, max_tokens=1)
    assert len(answer["choices"]) == 500
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
