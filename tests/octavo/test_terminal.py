"""`octavo chat` and `octavo complete` at a real gateway: what is typed, what appears, and how it ends."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import pytest
import pytest_asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.cli import main
from octavo.gateway.http.listener import listen
from octavo.protocol.messages import Abort, Submit, unpack_ids
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import MODEL, Served, serving
from tests.fakes.model_directories import IM_END, VOCAB_SIZE, text_ids, write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMEOUT_S = 60


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    with tempfile.TemporaryDirectory() as sockets:
        scheduler = FakeScheduler(f"ipc://{sockets}/s", vocab_size=VOCAB_SIZE, max_model_len=512)
        async with serving(directory, scheduler, api_key=("right",)) as served:
            yield served


@pytest.fixture
def served(gateway: Served) -> Served:
    gateway.scheduler.reply = lambda submit: [*text_ids("Blue 🫠."), IM_END]
    gateway.scheduler.paused, gateway.scheduler.step_s = False, 0.001
    gateway.scheduler.received.clear()
    return gateway


async def octavo(*arguments: str) -> int:
    """Run the command in a thread of this process, beside the gateway."""
    return await asyncio.to_thread(main, arguments)


def at(served: Served, *more: str) -> tuple[str, ...]:
    return ("--url", f"{served.url}/v1", "--api-key", "right", *more)


def prompts(served: Served) -> list[str]:
    """Return the texts that the scheduler was sent, without control tokens."""
    submits = {message.request_id: message for message in served.scheduler.messages(Submit)}
    ids = [unpack_ids(submit.prompt_token_ids) for submit in submits.values()]
    return [bytes(token_id - 3 for token_id in each if token_id >= 3).decode() for each in ids]


async def test_the_quick_form_prints_the_answer_alone(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert await octavo("chat", *at(served), "--system-prompt", "Be brief.", "-q", "Which colour?") == 0
    assert capsys.readouterr().out == "Blue 🫠.\n"
    assert prompts(served) == ["system\nBe brief.\nuser\nWhich colour?\nassistant\n"]


async def test_sampling_flags_and_figures(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.scheduler.reply = lambda submit: text_ids("x" * submit.sampling.max_tokens)
    flags = ("--max-tokens", "7", "--temperature", "0.5", "--top-k", "40", "--stop", "END", "--ignore-eos", "--stats")
    assert await octavo("complete", *at(served, *flags), "-q", "A page is") == 0
    shown = capsys.readouterr()
    assert shown.out == "xxxxxxx\n"
    assert "[prompt 9 tokens, answer 7: the first after " in shown.err
    [sampling] = {message.sampling for message in served.scheduler.messages(Submit)}
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (7, 0.5, 40)
    assert sampling.eos_token_ids == ()
    assert prompts(served) == ["A page is"]


async def test_an_answer_may_have_to_follow_a_grammar(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    choice = ("--structured-outputs", '{"choice": ["Blue", "Red"]}')
    for command in ("chat", "complete"):
        assert await octavo(command, *at(served, *choice), "-q", "Which colour?") == 0
    assert all('"Blue\\" | \\"Red' in message.grammar for message in served.scheduler.messages(Submit))
    with pytest.raises(SystemExit):
        await octavo("complete", *at(served, "--structured-outputs", '{"colour": 1}'), "-q", "Hm")
    assert "structured_outputs cannot be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--api-key", "EMPTY"), "the API key is not known. Give one with --api-key or OCTAVO_API_KEY (status 401)"),
        (("--model-name", "other"), "there is no model 'other'; served: tiny/model, alias (status 404)"),
        (("--max-tokens", "5000"), "maximum context length is 512 tokens"),
        (("--temperature", "3"), "temperature cannot be '3': it is a number of at least 0 and at most 2"),
        (("--max-num-seqs", "3"), "--max-num-seqs is for a server of this command's own: name a MODEL"),
        (("--model", "x"), "--url is for a running server, and MODEL starts one for this command alone: give one"),
    ],
)
async def test_what_is_wrong_is_said_in_one_line(
    arguments: tuple[str, ...], said: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = await octavo("chat", *at(served, *arguments), "-q", "hi")
    except SystemExit as exited:
        status = int(str(exited.code))
    assert status in (1, 2)
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out.strip() == ""


async def test_a_server_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    assert await octavo("chat", "--url", f"http://127.0.0.1:{port}/v1", "-q", "hi") == 1
    assert "no server answers" in capsys.readouterr().err
    assert await octavo("chat", "--url", "not a url", "-q", "hi") == 1
    assert capsys.readouterr().err.startswith("octavo: not a url")


async def test_an_address_without_v1_answers_and_another_that_is_not_there_is_hinted_at(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await octavo("chat", "--url", served.url, "--api-key", "right", "-q", "hi") == 0
    capsys.readouterr()
    assert await octavo("chat", "--url", f"{served.url}/api", "--api-key", "right", "-q", "hi") == 1
    assert f"({served.url}/api does not end in /v1" in capsys.readouterr().err


async def piped(served: Served, command: str, text: bytes) -> tuple[int, str, str]:
    """Run the command with `text` as its standard input; return its status and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "octavo", command, "--url", f"{served.url}/v1"),
        env={**os.environ, "OCTAVO_API_KEY": "right"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, error = await asyncio.wait_for(process.communicate(text), TIMEOUT_S)
    return process.returncode or 0, output.decode(), error.decode()


async def test_lines_of_a_pipe_are_one_conversation(served: Served) -> None:
    assert await piped(served, "chat", "一\n\ntwo\n".encode()) == (0, "Blue 🫠.\nBlue 🫠.\n", "")
    assert prompts(served)[-1] == "user\n一\nassistant\nBlue 🫠.\nuser\ntwo\nassistant\n"
    status, _, error = await piped(served, "complete", b"\xff\n")
    assert (status, error) == (1, "octavo: standard input is not UTF-8: invalid start byte at byte 0\n")


async def test_an_answer_that_cannot_be_written_is_said(served: Served) -> None:
    with open("/dev/full", "wb") as full:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "octavo", "chat", *at(served), "-q", "hi"), stdout=full, stderr=subprocess.PIPE
        )
        _, error = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert error == b"octavo: standard output cannot be written: No space left on device\n"
    assert process.returncode == 1


async def test_a_models_name_moves_no_cursor(served: Served) -> None:
    with in_terminal("chat", *at(served), "--model-name", "red\x1b[31m\x07") as terminal:
        await terminal.until("red\ufffd[31m\ufffd at http://")
        terminal.type("hi\r")
        await terminal.until("octavo: there is no model 'red")
        assert "\x1b[31m" not in terminal.shown
        terminal.type("\x04")
        assert await asyncio.to_thread(terminal.process.wait, TIMEOUT_S) == 0


@contextmanager
def in_terminal(*arguments: str) -> Iterator["Typed"]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "octavo", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        yield Typed(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


class Typed:
    """A command in a terminal of its own: what it shows, and what is typed."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process, self._descriptor = process, descriptor
        self.shown = ""

    async def until(self, text: str, count: int = 1) -> None:
        """Return once `text` has been shown `count` times."""
        async with asyncio.timeout(TIMEOUT_S):
            while self._read().count(text) < count:
                await asyncio.sleep(0.01)

    def _read(self) -> str:
        with suppress(OSError):  # there is no more now
            self.shown += os.read(self._descriptor, 1 << 16).decode(errors="replace")
        return self.shown

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt(self) -> None:
        """Send what Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)


async def test_ctrl_c_ends_the_answer_and_ctrl_d_the_chat(served: Served) -> None:
    endless = [*text_ids("so ")] * 400
    served.scheduler.reply = lambda submit: endless[: submit.sampling.max_tokens]
    with in_terminal("chat", *at(served)) as terminal:
        await terminal.until("> ")
        terminal.interrupt()  # nothing is said: the line is thrown away
        await terminal.until("> ", 2)
        served.scheduler.step_s = 0.02  # all of it would take ten seconds
        terminal.type("one\r")
        await terminal.until("so so")
        served.scheduler.paused = True
        terminal.interrupt()
        await terminal.until("> ", 3)
        await served.scheduler.wait_for(Abort)
        served.scheduler.paused, served.scheduler.step_s = False, 0.001
        served.scheduler.reply = lambda submit: [*text_ids("Blue."), IM_END]
        terminal.type("two\r")
        await terminal.until("Blue.")
        await terminal.until("> ", 4)
        terminal.type("\x04")
        assert await asyncio.to_thread(terminal.process.wait, TIMEOUT_S) == 0
    last = prompts(served)[-1]
    assert last.startswith("user\none\nassistant\nso so")
    assert last.endswith("\nuser\ntwo\nassistant\n")
    assert "Traceback" not in terminal.shown


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"half"}}]}\n\n'


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (CHUNK, "octavo: the server ended the connection in the middle of its answer\n"),
        (CHUNK + b'data: {"error":{"message":"the model is gone"}}\n\n', "octavo: the model is gone\n"),
        (CHUNK + b'data: {"error":{"message":"a\\u001b[2J\\u009b\\nb"}}\n\n', "octavo: a\ufffd[2J\ufffd b\n"),
        (
            CHUNK + b'data: {"choices":[5]}\n\n',
            "octavo: the server sent what is no chunk of an answer: b'{\"choices\":[5]}'\n",
        ),
        (CHUNK + b"data: nonsense\n\n", "octavo: the server sent what is no chunk of an answer: b'nonsense'\n"),
    ],
)
async def test_a_stream_that_breaks_is_an_error(stream: bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: Request) -> Response:
        return Response(stream, media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        assert await octavo("chat", "--url", url, "--model-name", MODEL, "-q", "hi") == 1
        server.should_exit = True
        await task
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("half\n", said)


async def answered_with(answer: bytes) -> int:
    """Return the status of a chat whose server answers with the bytes `answer` and closes the connection."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b'"stream":true}')
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await octavo("chat", "--url", f"http://127.0.0.1:{port}/v1", "--model-name", MODEL, "-q", "hi")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


async def test_a_server_that_dies_in_the_middle_of_an_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert await answered_with(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(CHUNK), CHUNK)) == 1
    shown = capsys.readouterr()
    assert shown.out == "half\n"
    assert shown.err == "octavo: the server ended the connection in the middle of its answer\n"


async def test_an_error_that_is_null_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    chunk = CHUNK.replace(b'{"choices"', b'{"error":null,"choices"')
    assert await answered_with(HEAD + b"Connection: close\r\n\r\n" + chunk + b"data: [DONE]\n\n") == 0
    assert capsys.readouterr() == ("half\n", "")
