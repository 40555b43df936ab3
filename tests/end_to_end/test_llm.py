"""LLM and AsyncLLM over real processes and a tiny random model."""

import asyncio
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import httpx
import psutil
import pytest
from starlette.testclient import TestClient
from tqdm import tqdm

from octavo import LLM, AsyncLLM, RequestOutput, SamplingParams
from octavo.errors import GenerationError, LaunchError, ModelError
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.model_directories import VOCAB_SIZE, write_tiny_model

ROOT = Path(__file__).parents[2]
SETTINGS = {"kv_cache_memory_bytes": "8MiB", "log_level": "warning", "dtype": "float32", "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# At this temperature every token of the tiny model has rivals.
HOT = {"temperature": 2.0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which only the likeliest token is drawn, unless it is told otherwise."""
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    make_checkpoint(directory, vocab_size=VOCAB_SIZE)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "top_k": 1}))
    return directory


class Models:
    """Three of the same model at a time, started together: as it is, with many settings, and for asyncio."""

    def __init__(self, model: Path, stack: ExitStack) -> None:
        settings = {"tensor_parallel_size": 2, "max_num_seqs": 64, "max_model_len": 256, "enforce_eager": True}
        self.asynchronous = AsyncLLM(model, **SETTINGS)
        with ThreadPoolExecutor() as pool:
            started = pool.submit(asyncio.run, self.asynchronous.start())
            plain = pool.submit(LLM, model, max_num_seqs=8, max_num_queued_reqs=4, **SETTINGS)
            split = pool.submit(
                LLM, model, gpu_memory_utilization=0.85, generation_config="vllm", **settings, **SETTINGS
            )
            self.plain = stack.enter_context(plain.result())
            self.split = stack.enter_context(split.result())
            started.result()
        stack.callback(lambda: asyncio.run(self.asynchronous.close()))


@pytest.fixture(scope="module")
def models(model: Path) -> Iterator[Models]:
    with ExitStack() as stack:
        yield Models(model, stack)
    assert psutil.Process().children() == []


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_several_prompts_give_several_outputs_in_order(models: Models) -> None:
    prompts = ["The capital of France is", "你好"]
    outputs = models.plain.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20))
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished and output.outputs[0].finish_reason for output in outputs)
    assert [bytes(each - 3 for each in output.prompt_token_ids).decode() for output in outputs] == prompts


def test_chat_equals_generate_of_the_templated_text(models: Models) -> None:
    conversations = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        [{"role": "user", "content": "Hi"}],
    ]
    chats = models.plain.chat(conversations, GREEDY)
    texts = [output.prompt or "" for output in chats]
    assert texts[1] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert token_ids(models.plain.generate(texts, GREEDY)) == token_ids(chats)
    assert token_ids(models.plain.chat(conversations[1], GREEDY)) == token_ids(chats[1:])


def test_two_ranks_and_other_settings_give_the_same_tokens(models: Models) -> None:
    prompts = ["one", "two", [5, 6, 7]]
    assert token_ids(models.split.generate(prompts, GREEDY)) == token_ids(models.plain.generate(prompts, GREEDY))


def test_generation_config_is_the_default_unless_vllm_or_the_request_says_otherwise(models: Models) -> None:
    def drawn(llm: LLM, **fields: object) -> int:
        samplings = [SamplingParams(seed=seed, **HOT, **fields) for seed in range(4)]
        return len({tuple(each) for each in token_ids(llm.generate(["A page"] * 4, samplings))})

    assert drawn(models.plain) == 1
    assert drawn(models.plain, top_k=0) == 4
    assert drawn(models.split) == 4
    assert drawn(models.split, top_k=1) == 1


def test_what_a_script_asks_of_the_model_itself(models: Models) -> None:
    defaults = models.plain.get_default_sampling_params()
    assert (defaults.top_k, defaults.temperature, defaults.max_tokens) == (1, None, 16)
    text = "The capital of France is"
    [output] = models.plain.generate(text, GREEDY)
    assert models.plain.get_tokenizer()(text)["input_ids"] == output.prompt_token_ids


def test_more_prompts_than_the_queue_holds_are_all_answered_in_order(models: Models) -> None:
    prompts = [f"page {index}" for index in range(60)]
    outputs = models.plain.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(each) for each in token_ids(outputs)] == [2] * 60


def test_a_progress_bar_is_shown_for_many_prompts_only(
    models: Models, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm, "monitor", None)  # the thread that watches bars
    models.plain.generate("one", GREEDY)
    models.plain.generate(["one", "two"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    assert tqdm.monitor is None
    models.plain.generate(["one", "two"], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_threads_may_call_at_the_same_time(models: Models) -> None:
    prompts = [f"thread {index}" for index in range(6)]
    alone = [models.plain.generate(prompt, GREEDY) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: models.plain.generate(prompt, GREEDY), prompts))
    assert list(map(token_ids, together)) == list(map(token_ids, alone))


async def test_it_works_inside_a_running_event_loop(models: Models) -> None:
    assert len(token_ids(models.plain.generate("notebook", GREEDY))[0]) == 12


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (("x" * 300,), ValueError, "the prompt has 300 tokens"),
        ((["a", "x" * 300],), ValueError, r"prompts\[1\]: the prompt is too long: .* the prompt has 300 tokens"),
        ((["a", "b"], [GREEDY]), ValueError, "2 prompts and 1 sampling_params"),
        ((["a", 5],), TypeError, r"prompts\[1\]: a prompt is a string"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_generated(
    models: Models, arguments: tuple[object, ...], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        models.plain.generate(*arguments)


def test_batches_in_new_event_loops(models: Models) -> None:
    """45 prompts, 20 a batch, 5 at a time, each batch in an event loop of its own."""

    async def batch(prompts: list[str]) -> list[str]:
        semaphore = asyncio.Semaphore(5)

        async def text(prompt: str) -> str:
            async with semaphore:
                outputs = [output async for output in models.asynchronous.generate(prompt, GREEDY)]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            return outputs[-1].outputs[0].text

        return await asyncio.gather(*map(text, prompts))

    prompts = [f"line {index}" for index in range(45)]
    texts = [text for start in range(0, 45, 20) for text in asyncio.run(batch(prompts[start : start + 20]))]
    assert texts == [output.outputs[0].text for output in models.plain.generate(prompts, GREEDY, use_tqdm=False)]


async def test_streams_grow_and_run_at_the_same_time(models: Models) -> None:
    params = SamplingParams(max_tokens=240, ignore_eos=True, n=2, top_k=0, logprobs=1)
    outputs: list[RequestOutput] = []
    has_begun = asyncio.Event()

    async def read() -> None:
        async for output in models.asynchronous.generate("long", params, request_id="mine"):
            outputs.append(output)
            has_begun.set()

    reading = asyncio.create_task(read())
    await has_begun.wait()
    async for _ in models.asynchronous.chat([{"role": "user", "content": "short"}], GREEDY):
        pass
    assert not outputs[-1].finished, "the short one waited for the long one"
    await reading
    for earlier, later in itertools.pairwise(output.outputs[0] for output in outputs):
        assert later.text.startswith(earlier.text)
        assert later.logprobs[: len(earlier.logprobs)] == earlier.logprobs
        assert len(earlier.logprobs) == len(earlier.token_ids)
    assert outputs[-1].request_id == "mine"
    assert [len(answer.token_ids) for answer in outputs[-1].outputs] == [240, 240]


async def test_generations_go_on_over_the_death_of_both_processes(models: Models) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=3, top_k=0)
    [undisturbed] = [output async for output in models.asynchronous.generate("death", params) if output.finished]
    stream = models.asynchronous.generate("death", params)
    await anext(stream)
    victims = [
        child
        for child in psutil.Process().children()
        if models.asynchronous.config.backend_address == child.environ().get("OCTAVO_BACKEND_ADDRESS")
    ]
    assert len(victims) == 2
    for victim in victims:
        victim.kill()
    [disturbed] = [output async for output in stream if output.finished]
    assert disturbed.outputs == undisturbed.outputs


async def test_a_second_start_is_refused_and_ends_nothing(models: Models) -> None:
    with pytest.raises(GenerationError, match="a model is started once"):
        await models.asynchronous.start()
    assert [output async for output in models.asynchronous.generate("still here", GREEDY)][-1].finished


async def test_a_start_that_is_cancelled_leaves_nothing(model: Path) -> None:
    before, threads = psutil.Process().children(), set(threading.enumerate())
    starting = asyncio.create_task(AsyncLLM(model, **SETTINGS).start())
    while psutil.Process().children() == before:
        await asyncio.sleep(0.001)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert psutil.Process().children() == before
    assert not {thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("octavo")}


async def test_a_process_that_refuses_its_next_life_ends_what_waits_for_it(model: Path) -> None:
    before = psutil.Process().children()
    async with AsyncLLM(model, **SETTINGS) as llm:
        sockets = Path(llm.config.frontend_address.removeprefix("ipc://")).parent
        children = [child for child in psutil.Process().children() if child not in before]
        sockets.chmod(0o755)  # where no scheduler would make its own
        next(child for child in children if "octavo.scheduler" in child.cmdline()).kill()
        with pytest.raises(
            GenerationError, match=f"the scheduler ended with status 2: {sockets} must belong to this user"
        ):
            [output async for output in llm.generate("one", SamplingParams(max_tokens=240, ignore_eos=True))]
        with pytest.raises(GenerationError, match="the scheduler ended with status 2"):
            await anext(llm.generate("two"))
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    ("settings", "damage", "said"),
    [
        ({"generation_config": "/nowhere"}, None, "'/nowhere' is not a directory with generation_config.json"),
        ({}, "tokenizer.json", r"tokenizer.json cannot be used"),
    ],
)
def test_a_model_that_cannot_be_used_is_a_model_error(
    model: Path, tmp_path: Path, settings: dict[str, str], damage: str | None, said: str
) -> None:
    before = psutil.Process().children()
    if damage is not None:
        model = Path(shutil.copytree(model, tmp_path / "model"))
        (model / damage).write_text("{}")
    with pytest.raises(ModelError, match=said):
        LLM(model, **settings, **SETTINGS)
    assert psutil.Process().children() == before


async def test_a_failed_start_says_why_in_the_childs_words(model: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(LaunchError, match=r"the executor ended .*: a sequence of 256 tokens .* room for 1000"):
        await AsyncLLM(model, **(SETTINGS | {"kv_cache_memory_bytes": 1000})).start()
    assert psutil.Process().children() == before


SCRIPT = """
import os, signal, sys, threading
from octavo import LLM, SamplingParams

def interrupt():
    llm.generate("short", SamplingParams(max_tokens=1))
    os.kill(os.getpid(), signal.SIGINT)

llm = LLM(sys.argv[1], kv_cache_memory_bytes="8MiB", num_threads=1)
threading.Thread(target=interrupt).start()
try:
    llm.generate(["long"] * 200, SamplingParams(max_tokens=240, ignore_eos=True), use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted")
print(len(llm.generate("after", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
print("torch" in sys.modules)
"""


def test_a_script_from_stdin_survives_an_interrupt_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    (tmp_path / "scheduler.py").write_text("raise SystemExit('this is no scheduler')")
    done = run_script("-", model, cwd=tmp_path, source=SCRIPT)
    assert done.stdout == "interrupted\n3\nFalse\n", done.stderr
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("example", ["offline", "chat", "async_streams"])
def test_examples_run(example: str, model: Path, tmp_path: Path) -> None:
    done = run_script(str(ROOT / "examples" / f"{example}.py"), model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
    assert "Warning" not in done.stderr


def test_the_gateway_inside_a_fastapi_application(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"model": str(model), "served_model_name": "tiny", "api_key": "of another server"}
    for name, value in (SETTINGS | variables).items():
        monkeypatch.setenv(f"OCTAVO_{name.upper()}", str(value))
    spec = spec_from_file_location("fastapi_app", ROOT / "examples" / "fastapi_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with TestClient(module.app) as client:
        request = {"model": "tiny", "prompt": "A page", "max_tokens": 24}
        answer = client.post("/llm/v1/completions", json=request).json()
        assert client.post("/continue", params={"text": "A page"}).json() == {
            "text": "A page" + answer["choices"][0]["text"]
        }
        assert [each["id"] for each in client.get("/llm/v1/models").json()["data"]] == ["tiny"]
        assert client.post("/llm/v1/completions", json=request | {"model": "none"}).status_code == 404


def run_script(script: str, model: Path, *, cwd: Path, source: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a script on `model` to its end; whatever it started holds its output open, and so has ended then too."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OCTAVO_KV_CACHE_MEMORY_BYTES": "8MiB", "OCTAVO_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error", script, str(model)],
        input=source,
        stdin=None if source else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environ,
        timeout=120,
    )


def test_with_a_port_it_is_served_over_http_too(model: Path) -> None:
    with LLM(model, port=0, metrics_port=0, api_key="k", served_model_name="tiny", **SETTINGS) as llm:
        config = llm._engine.config
        url, metrics_url = (f"http://127.0.0.1:{port}" for port in (config.port, config.metrics_port))
        body = {"model": "tiny", "prompt": "a b", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        answer = httpx.post(f"{url}/v1/completions", json=body, headers={"Authorization": "Bearer k"}).json()
        assert answer["choices"][0]["text"] == llm.generate("a b", GREEDY)[0].outputs[0].text
        counted = 'octavo:request_success_total{finished_reason="length",model_name="tiny"} 1.0'
        assert counted in httpx.get(f"{metrics_url}/metrics").text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_port_in_use_is_named_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot listen on 127.0.0.1:{port}: .*choose another with port \("):
            LLM("./nowhere", port=port)
