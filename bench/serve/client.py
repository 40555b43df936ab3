"""Sends a load to a server and writes down what came back and when."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from octavo.bench.serve.answer import Answer, error_message, shorten
from octavo.bench.serve.results import Record
from octavo.errors import CommandError

CONNECT_TIMEOUT_S = 30.0
INTERRUPTED = "interrupted"  # why a request failed that was under way then
JSON = {"Content-Type": "application/json"}
DIGITS = 5  # of a second
ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Server(NamedTuple):
    """Whom to ask: `base_url` is such as http://127.0.0.1:8000, `timeout_s` what one answer may take."""

    base_url: str
    api_key: str | None = None
    timeout_s: float = 600.0


class Load(NamedTuple):
    """What became of a load: a record for each request that was sent, in no order."""

    records: list[Record]
    duration_s: float
    was_interrupted: bool = False


class Models(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str

    data: list[Model]


def open_session(server: Server) -> aiohttp.ClientSession:
    """Return a session with a connection for each request; no proxy of the environment is asked.

    None is used twice: some servers close one just after an answer, and the next request on it would seem to fail.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        headers={"Authorization": f"Bearer {server.api_key}"} if server.api_key else {},
        timeout=aiohttp.ClientTimeout(total=server.timeout_s, connect=CONNECT_TIMEOUT_S),
    )


async def first_model(session: aiohttp.ClientSession, server: Server) -> str:
    """Return the first of the server's models. Raises CommandError."""
    url = f"{server.base_url}/v1/models"
    try:
        async with session.get(url) as response:
            body = await response.read()
            if response.status != 200:
                raise CommandError(f"{url} answers with {_refusal(response.status, body)}; --model and --api-key help")
            return msgspec.json.decode(body, type=Models).data[0].id
    except (msgspec.DecodeError, IndexError):
        raise CommandError(f"what answers at {url} is no list of models: name one with --model") from None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise CommandError(
            f"no server answers at {server.base_url} ({_reason(error)}): start one with `octavo serve`, or name another"
            " with --base-url"
        ) from None


class Sender:
    """Sends bodies to `url`, in one of two ways, and has a record of each; `on_end` hears of every end."""

    def __init__(self, session: aiohttp.ClientSession, url: str, on_end: Callable[[], object] = lambda: None) -> None:
        self._session, self._url, self._on_end = session, url, on_end
        self._records: list[Record] = []
        self._start_s = time.perf_counter()

    async def send_closed(self, bodies: Sequence[bytes], concurrency: int) -> Load:
        """Have `concurrency` requests under way at every moment: the next is sent when one has ended."""
        waiting = iter(enumerate(bodies))

        async def work() -> None:
            for index, body in waiting:
                await self._send(index, body)

        return await self._finish([work() for _ in range(min(concurrency, len(bodies)))])

    async def send_open(self, bodies: Sequence[bytes], arrivals_s: Sequence[float]) -> Load:
        """Send each body at its time, however many are under way."""

        async def arrive(index: int, body: bytes) -> None:
            await asyncio.sleep(self._start_s + arrivals_s[index] - time.perf_counter())
            await self._send(index, body)

        return await self._finish([arrive(index, body) for index, body in enumerate(bodies)])

    async def _finish(self, work: list[Coroutine[Any, Any, None]]) -> Load:
        """Do all of `work`. Cancelled, as Ctrl-C does, it ends it, and those under way have their records too."""
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            await asyncio.gather(*tasks, return_exceptions=True)  # gather has cancelled them
            return Load(self._records, time.perf_counter() - self._start_s, was_interrupted=True)
        return Load(self._records, time.perf_counter() - self._start_s)

    async def _send(self, index: int, body: bytes) -> None:
        answer, failure, sent_s = Answer(), None, time.perf_counter()
        try:
            failure = await self._stream(body, answer)
        except asyncio.CancelledError:
            failure = INTERRUPTED
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            failure = _reason(error)
        finally:
            self._records.append(_record(index, answer, failure, sent_s - self._start_s, sent_s, time.perf_counter()))
            self._on_end()

    async def _stream(self, body: bytes, answer: Answer) -> str | None:
        """Read the whole of one answer; return what is wrong with it."""
        async with self._session.post(self._url, data=body, headers=JSON) as response:
            if response.status != 200:
                return _refusal(response.status, await response.read())
            async for received in response.content.iter_any():
                answer.feed(received, time.perf_counter())
        return answer.error or (None if answer.is_done else "the stream ended before its end")


def _record(index: int, answer: Answer, failure: str | None, start_s: float, sent_s: float, end_s: float) -> Record:
    return Record(
        index=index,
        start_s=round(start_s, DIGITS),
        latency_s=round(end_s - sent_s, DIGITS),
        chunks_s=[round(time_s - sent_s, DIGITS) for time_s in answer.chunk_times_s],
        prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
        output_tokens=answer.usage.completion_tokens if answer.usage else None,
        failure=failure,
    )


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"status {status}: {error_message(msgspec.json.decode(body))}"
    except msgspec.DecodeError:
        return f"status {status}: {shorten(body.decode(errors='replace')) or 'nothing'}"


def _reason(error: Exception) -> str:
    """Return what ended a connection, in words that do not differ from request to request."""
    match error:
        case aiohttp.ClientConnectorError():
            return f"no connection: {error.strerror or error.os_error}"
        case TimeoutError():
            return "timeout"
        case aiohttp.ServerDisconnectedError():
            return "the server closed the connection"
        case _:
            return shorten(f"{type(error).__name__}: {error}")
