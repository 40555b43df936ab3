"""Other processes read long bodies (`reader.py`), so that no body can hold up the gateway's event loop."""

import asyncio
import itertools
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from octavo.gateway.asking.asked import PromptTokens
from octavo.gateway.reading.messages import (
    LENGTH_BYTES,
    Cancel,
    Done,
    Order,
    Piece,
    Read,
    Reply,
    Tokens,
    Wrong,
    decode_reply,
    framed,
)
from octavo.gateway.request_error import RequestError, overloaded, unavailable
from octavo.protocol.config import Config
from octavo.protocol.messages import Ready, unpack_ids
from octavo.protocol.settings.loading import child_environ

MAX_BODIES = 16  # at once
MAX_READERS = 2  # each holds the tokenizer
MAX_TRIES = 3  # of one body: another body, or the machine, may end a reader
RETRY_AFTER_S = 1.0
BUFFER_BYTES = 1 << 20

Body = TypeVar("Body", bound=msgspec.Struct)

logger = logging.getLogger(__name__)


class LongBodies:
    """Gives long bodies to readers. A reader is started when it is needed first, and kept."""

    def __init__(self, config: Config, model_names: tuple[str, ...]) -> None:
        self._model_names = model_names
        environ = child_environ(config, os.environ, secrets=False)
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._readers = [_Reader(environ) for _ in range(min(MAX_READERS, max(1, num_cores // 4)))]

    @property
    def num_bodies(self) -> int:
        return sum(reader.num_bodies for reader in self._readers)

    async def read(
        self, door: str, decoder: "msgspec.json.Decoder[Body]", pieces: Sequence[bytes], ready: Ready
    ) -> tuple[Body, Iterator[PromptTokens]]:
        """Return the body in `pieces` without its prompts, and the prompts. `door` is the door's name.

        Raises RequestError, also if too many bodies are being read (429).
        """
        if self.num_bodies >= MAX_BODIES:
            message = f"{self.num_bodies} other long bodies are being read: send the request again later"
            raise overloaded(message, RETRY_AFTER_S)
        tokens, done = await self._ask(pieces, partial(Read, door=door, model_names=self._model_names, ready=ready))
        prompts = (PromptTokens(unpack_ids(each.token_ids).tolist(), each.text) for each in tokens)
        return decoder.decode(done.body), prompts

    async def _ask(self, pieces: Sequence[bytes], order: Callable[[int], Read]) -> tuple[list[Tokens], Done]:
        for _ in range(MAX_TRIES):
            reader = min(self._readers, key=lambda reader: reader.num_bodies)
            try:
                return await reader.read(pieces, order)
            except _ReaderEnded:
                logger.warning("a process that reads long bodies ended: starting another one")
        raise unavailable("the process that reads long bodies ended")

    async def close(self) -> None:
        """End the readers. No request may wait for one."""
        for reader in self._readers:
            await reader.close()


class _ReaderEnded(Exception):  # noqa: N818  (an event, handled by trying again)
    pass


class _Reader:
    """Keeps one process: starts it when a body comes, and again if it has ended."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ = environ
        self._starting: asyncio.Task[_Life] | None = None  # goes on if the client that caused it leaves
        self.num_bodies = 0

    async def read(self, pieces: Sequence[bytes], order: Callable[[int], Read]) -> tuple[list[Tokens], Done]:
        """Return the prompts of a body and its rest. `order` makes the last message of the body from its job id.

        Raises RequestError, or _ReaderEnded if the process ended.
        """
        self.num_bodies += 1
        try:
            if self._starting is None or _has_ended(self._starting):
                self._starting = asyncio.create_task(_Life.start(self._environ))
            life = await asyncio.shield(self._starting)
            return await life.read(pieces, order)
        finally:
            self.num_bodies -= 1

    async def close(self) -> None:
        if self._starting is not None:
            with suppress(RequestError):
                await (await self._starting).close()


def _has_ended(starting: "asyncio.Task[_Life]") -> bool:
    return starting.done() and (starting.exception() is not None or starting.result().has_ended)


class _Job:
    """The replies about one body so far."""

    def __init__(self) -> None:
        self.tokens: list[Tokens] = []
        self.done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()


class _Life:
    """A process that reads bodies, from its start to its end."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._orders, self._answers = process, process.stdin, process.stdout
        self._numbers = itertools.count()
        self._jobs: dict[int, _Job] = {}
        self.has_ended = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, environ: dict[str, str]) -> "_Life":
        command = (sys.executable, "-P", "-m", "octavo.gateway.reader")
        try:
            # The reader has its own session: a Ctrl-C is for the gateway alone. It ends when its standard input ends.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, env=environ, start_new_session=True, limit=BUFFER_BYTES
            )
        except OSError as error:
            logger.error("the process that reads long bodies cannot be started: %s", error.strerror)
            raise unavailable("the process that reads long bodies cannot be started") from None
        return cls(process)

    async def read(self, pieces: Sequence[bytes], order: Callable[[int], Read]) -> tuple[list[Tokens], Done]:
        if self.has_ended:
            raise _ReaderEnded
        job_id, job = next(self._numbers), _Job()
        self._jobs[job_id] = job
        try:
            for content in pieces:
                await self._send(Piece(job_id, content))
            await self._send(order(job_id))
            return job.tokens, await job.done
        except asyncio.CancelledError:
            if not self.has_ended:
                self._orders.write(framed(Cancel(job_id)))
            raise
        finally:
            del self._jobs[job_id]

    async def _send(self, order: Order) -> None:
        if not self.has_ended:
            self._orders.write(framed(order))
            with suppress(ConnectionError):  # it ended: `_listen` tells all jobs
                await self._orders.drain()

    async def close(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._listening

    async def _listen(self) -> None:
        """Give each reply to its job, until the process ends."""
        try:
            while True:
                num_bytes = int.from_bytes(await self._answers.readexactly(LENGTH_BYTES), "big")
                self._take(decode_reply(await self._answers.readexactly(num_bytes)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.has_ended = True
        for job in self._jobs.values():
            if not job.done.done():
                job.done.set_exception(_ReaderEnded())
        self._orders.close()
        await self._process.wait()

    def _take(self, answer: Reply) -> None:
        job = self._jobs.get(answer.job_id)
        if job is None or job.done.done():
            return
        match answer:
            case Tokens():
                job.tokens.append(answer)
            case Done():
                job.done.set_result(answer)
            case Wrong(_, message, param, status, code):
                job.done.set_exception(RequestError(message, param=param, status=status, code=code))
