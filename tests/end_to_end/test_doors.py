"""What users of vLLM's guides do at the door: its module names, API keys of every kind, batches over aiohttp."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest

from octavo import __version__
from tests.fakes.commands import ENGINE_FLAGS, start, tiny_checkpoint
from tests.fakes.octavo_server import Server, running_server

NAME = "qwen-7b-chat"
KEY = "my-secret-key"
BATCH_SIZE, NUM_AT_A_TIME = 20, 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model", str(model), "--served-model-name", NAME, "--host", "127.0.0.1", *ENGINE_FLAGS)
    directory = tmp_path_factory.mktemp("server")
    with running_server(directory, *flags, command=["octavo.entrypoints.openai.api_server"]) as server:
        yield server


def chat(client: openai.OpenAI) -> str:
    messages = [{"role": "user", "content": "你好"}]
    answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=4, temperature=0)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def test_the_served_name_is_the_only_one(server: Server, model: Path) -> None:
    client = server.client()
    assert [served.id for served in client.models.list()] == [NAME]
    assert chat(client)
    for other in (str(model), "gpt-4", NAME.upper()):
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model=other, prompt="hi", max_tokens=1)


def test_the_version_is_the_same_everywhere(server: Server) -> None:
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
    for flag in ("--version", "-v"):
        assert start("octavo", flag).communicate(timeout=60)[0] == f"{__version__}\n"


@pytest.mark.parametrize("key", ["EMPTY", "dummy", "token-abc123"])
def test_without_keys_any_key_works(key: str, server: Server) -> None:
    assert chat(server.client(api_key=key))


def test_without_keys_none_works(server: Server) -> None:
    body = {"model": NAME, "prompt": "hi", "max_tokens": 2}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]


def test_with_a_key_only_that_one_works(model: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, str(model), "--api-key", KEY, *ENGINE_FLAGS) as server:
        for wrong in ("EMPTY", KEY + "x", KEY.upper()):
            with pytest.raises(openai.AuthenticationError):
                server.client(api_key=wrong).models.list()
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        [served] = server.client(api_key=KEY).models.list()
        answer = server.client(api_key=KEY).completions.create(model=served.id, prompt="hi", max_tokens=2)
        assert answer.choices[0].text


def test_batches_over_aiohttp_with_an_event_loop_each(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"第{i}个问题：what is {i}?\n" for i in range(45)))
    prompts = path.read_text().splitlines()

    async def ask(session: aiohttp.ClientSession, semaphore: asyncio.Semaphore, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": NAME, "messages": messages, "max_tokens": 8, "temperature": 0.7}
        async with semaphore, session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return str((await response.json())["choices"][0]["message"]["content"])

    async def batch(some: list[str]) -> list[str]:
        semaphore = asyncio.Semaphore(NUM_AT_A_TIME)
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(ask(session, semaphore, prompt) for prompt in some))

    texts = []
    for first in range(0, len(prompts), BATCH_SIZE):
        texts += asyncio.run(batch(prompts[first : first + BATCH_SIZE]))
    assert len(texts) == 45
    assert all(texts)
    assert len(set(texts)) > 40  # what is drawn may be the same by chance


def test_a_chat_with_a_server_of_its_own(model: Path) -> None:
    command = ("chat", str(model), *ENGINE_FLAGS, "--temperature", "0", "--max-tokens", "6", "-q", "hi")
    chat = start("octavo", *command)
    output, error = chat.communicate(timeout=120)
    assert chat.returncode == 0, error
    assert output.strip()
    assert error == f"Starting {model}\n"
