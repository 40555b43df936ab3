"""The engine of a Python program: the gateway's engine in a thread of its own, with its own child processes."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec

from octavo.errors import ChildRefusedError, GenerationError, LaunchError, ModelError
from octavo.gateway.link.engine import Engine, scheduler_clients
from octavo.gateway.text.delta import Delta
from octavo.gateway.text.model_files import ModelFiles, read_model_files
from octavo.models.resolve import resolve_model_of
from octavo.protocol.config import Config
from octavo.protocol.process import REFUSED
from octavo.python.generating import Generating, collected, output_of
from octavo.python.outputs import RequestOutput
from octavo.python.preparation import Preparation, PreparedRequest
from octavo.serving.child_log import ChildLog
from octavo.serving.listening import is_healthy, with_ports
from octavo.serving.processes import POLL_S, Processes, why_ended_early, with_sockets_in
from octavo.serving.socket_directory import socket_directory

ROLES = ("scheduler", "executor")
HTTP_ROLE = "gateway"

NOT_RUNNING = "the model is not running: it was closed, or never started in this process (a fork has none)"

MOST_FAILED_STARTS = 8  # in a row; with their waits they take a minute, so that a program does not wait forever

CLOSED_UNDER_WAY = "the model was closed before all was generated"

Result = TypeVar("Result")


class _EndedEarlyError(Exception):
    """A child ended before the model was ready. The message and the statuses say which child, and how."""

    def __init__(self, said: str, statuses: Sequence[int]) -> None:
        super().__init__(said)
        self.statuses = statuses


class LocalEngine:
    """One model's scheduler and executor as children, and a thread whose event loop talks to them.

    With `serves_http` there is also a gateway, another client of the same scheduler: requests over HTTP share batches
    with the program.

    `start`, then `submit`, `complete` and `stream`, then `close`: in any thread and any event loop.
    """

    def __init__(self, config: Config, *, serves_http: bool = False) -> None:
        self.config = config  # after `start` with the model's directory, the ports and the sockets' addresses
        self._serves_http = serves_http
        self.files: ModelFiles
        self.generating: Generating
        self._preparation: Preparation | None = None
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._begun = False
        self._owner = os.getpid()
        self._resources = ExitStack()
        self._changing = threading.RLock()  # held while resources are acquired or released: `close` waits for a start
        self._own_threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._lock = threading.RLock()  # no work is submitted to a thread that was told to end
        self._why_not_running = NOT_RUNNING

    def start(self) -> None:
        """Return once the model is ready.

        Raises ModelError, a ValueError, if the model or a setting cannot be used; LaunchError with the cause if it does
        not start; GenerationError if it was closed meanwhile. After an error no process of this start is left.
        """
        with self._lock:
            if self._begun:
                raise GenerationError("a model is started once: make another")
            self._begun = True
        with self._changing:
            try:
                self._start()
            except OSError as error:
                self.close()
                raise LaunchError(f"the model cannot be started: {error}") from None
            except BaseException:
                self.close()
                raise

    @property
    def preparation(self) -> Preparation:
        """The object that makes requests for the model. Raises GenerationError while the model is not running."""
        if self._preparation is None or self._closing.is_set():
            raise GenerationError(self._why_not_running)
        return self._preparation

    def submit(self, work: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Run `work` in the engine's event loop. Raises GenerationError if the engine is not running here."""
        with self._lock:
            if self._thread is None or self._closing.is_set() or os.getpid() != self._owner:
                work.close()
                raise GenerationError(self._why_not_running)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def complete(self, request: PreparedRequest) -> RequestOutput:
        """Return the finished output of `request`, in the caller's event loop. Raises errors of `Generating.complete`.

        Cancelling it ends the generation.
        """
        future = self.submit(self.generating.complete([request], lambda: None))
        await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)
        [output] = self.result(future)
        return output

    def result(self, future: "concurrent.futures.Future[Result]") -> Result:
        """Wait for the result of `future`; abort its work if this thread is interrupted.

        Raises the errors of the work, and GenerationError, with the reason, if the engine ends before the work is done.
        """
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            reason = self._why_not_running
            raise GenerationError(CLOSED_UNDER_WAY if reason is NOT_RUNNING else reason) from None
        except BaseException:
            future.cancel()
            raise

    async def stream(self, request: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of `request` so far whenever there is more, in the caller's event loop."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[int, Delta] | concurrent.futures.Future[None]] = asyncio.Queue()

        def deliver(item: "tuple[int, Delta] | concurrent.futures.Future[None]") -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        def deliver_end(future: "concurrent.futures.Future[None]") -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                deliver(future)

        future = self.submit(self.generating.deliver(request, deliver))
        future.add_done_callback(deliver_end)
        answers = collected(request, self.files.tokenizer)
        try:
            while not all(answer.finish_reason for answer in answers):
                items = [await arrived.get()]
                while not arrived.empty():
                    items.append(arrived.get_nowait())
                for item in items:
                    if isinstance(item, concurrent.futures.Future):
                        self.result(item)
                    else:
                        index, delta = item
                        answers[index].add(delta)
                yield output_of(request, answers)
        finally:
            future.cancel()

    def close(self) -> None:
        """Abort all work and end all processes and threads. May be called repeatedly, in any thread.

        A start that runs in another thread gives up first.
        """
        if os.getpid() != self._owner:  # a fork has no threads, and the children are its parent's
            return
        if threading.current_thread() in self._own_threads:  # a garbage collection may run there
            threading.Thread(target=self.close, name="octavo-close").start()
            return
        with self._lock:
            self._closing.set()
        with self._changing:
            self._resources.close()

    def _start(self) -> None:
        """Start everything. After each slow step, check whether `close` was called."""
        self._require_open()
        log = ChildLog()
        self._own_threads.append(log.thread)
        self._resources.callback(log.close)
        if self._serves_http:
            self.config = with_ports(self.config, str)  # an error names a keyword, not a flag
        self._resolve()
        self._require_open()
        roles = (*ROLES, HTTP_ROLE) if self._serves_http else ROLES
        processes = Processes(self.config, roles, stderr=log.descriptor)
        self._resources.callback(processes.stop)
        processes.start()
        self._require_open()
        self.files = self._read_files()  # meanwhile
        self._require_open()
        try:
            self._wait_until_ready(processes, self._start_thread())
        except _EndedEarlyError as error:
            self.close()
            kind = ChildRefusedError if REFUSED in error.statuses else LaunchError
            raise kind(f"{error}: {log.cause(error.statuses)}") from None
        self._watch(processes, log)

    def _resolve(self) -> None:
        config = self.config
        model = resolve_model_of(config)
        self.config = msgspec.structs.replace(
            with_sockets_in(self._resources.enter_context(socket_directory()), config),
            model=str(model.directory),
            served_model_name=config.served_model_name or (model.served_name,),
        )

    def _read_files(self) -> ModelFiles:
        try:
            return read_model_files(self.config)
        except (OSError, ValueError) as error:
            raise ModelError(str(error)) from None

    def _start_thread(self) -> Engine:
        """Return the engine, once it is open in a thread of its own."""
        opened: concurrent.futures.Future[tuple[Engine, asyncio.Event]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="octavo-engine", daemon=True)
        self._own_threads.append(self._thread)
        self._thread.start()
        engine, stopping = opened.result()
        self._resources.callback(self._thread.join)
        self._resources.callback(self._loop.call_soon_threadsafe, stopping.set)
        return engine

    def _run(self, opened: "concurrent.futures.Future[tuple[Engine, asyncio.Event]]") -> None:
        try:
            asyncio.run(self._serve(opened))
        finally:
            opened.cancel()  # for the thread that waits, if the engine could not be opened

    async def _serve(self, opened: "concurrent.futures.Future[tuple[Engine, asyncio.Event]]") -> None:
        self._loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        config = self.config
        async with Engine(scheduler_clients(config), self.files.tokenizer) as engine:
            own_tasks = asyncio.all_tasks(self._loop)
            num_places = config.max_num_seqs + min(config.max_num_seqs, config.max_num_queued_reqs)
            self.generating = Generating(engine, self.files.tokenizer, num_places)
            opened.set_result((engine, stopping))
            await stopping.wait()
            submitted = asyncio.all_tasks(self._loop) - own_tasks
            for task in submitted:
                task.cancel()
            await asyncio.gather(*submitted, return_exceptions=True)

    def _wait_until_ready(self, processes: Processes, engine: Engine) -> None:
        while (ready := engine.ready) is None or not engine.healthy or not self._answers_http():
            if ended := processes.ended():
                statuses = processes.statuses()
                raise _EndedEarlyError(why_ended_early(ended, statuses), statuses)
            self._closing.wait(POLL_S)
            self._require_open()
        self._require_open()
        self._preparation = Preparation(self.files, ready, self.config.seed)
        self._resources.callback(self._preparation.close)

    def _answers_http(self) -> bool:
        return not self._serves_http or is_healthy(self.config)

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise GenerationError("the model was closed before it was ready")

    def _watch(self, processes: Processes, log: ChildLog) -> None:
        """From now on start children again when they end; end everything if a child can never start again."""

        def watch() -> None:
            reason: str | None = None
            while reason is None and not self._closing.wait(POLL_S):
                reason = _why_not_revived(processes)
            if reason is not None:
                statuses = processes.statuses()
                processes.stop()
                log.close()  # reads the log to its end
                self._why_not_running = f"the model is not running any more: {reason}: {log.cause(statuses)}"
                self.close()

        watcher = threading.Thread(target=watch, name="octavo-watch", daemon=True)
        self._own_threads.append(watcher)
        watcher.start()
        self._resources.callback(watcher.join)


def _why_not_revived(processes: Processes) -> str | None:
    """Start children that have ended again, or return the reason why they cannot start."""
    if reason := processes.cannot_start(MOST_FAILED_STARTS):
        return reason
    processes.revive()
    return None
