"""The executor's side of the link: numbered steps in, results out, strictly in order.

Nothing is negotiated on the hot path: the server polls the socket, does the step that it finds, and sends its result. A
lazy device (a GPU) gets the next step, if it has arrived, before the server waits for the last step's result.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import msgspec
import zmq

from octavo.executor.link.connection import Socket, connect
from octavo.executor.link.relay import Relay
from octavo.executor.link.reporter import ProgressReporter
from octavo.executor.machine.memory import used_bytes
from octavo.executor.step.launched import Launched
from octavo.executor.step.progress import StepProgress
from octavo.executor.step.runner import ModelRunner
from octavo.protocol.handshakes import HandshakeWatch
from octavo.protocol.link_keys import ClientKeys
from octavo.protocol.messages import (
    Displaced,
    ExecutorReady,
    NeedInit,
    Step,
    StepFailed,
    Welcome,
    decode_to_executor,
    encode,
)
from octavo.protocol.sockets import try_send

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5  # of ExecutorReady while idle
RETRY_S = 0.05  # after an ExecutorReady that could not be sent
NUM_KEPT_RESULTS = 4  # a scheduler has two steps in flight at most
FAREWELL_MS = 1000  # the last message has this time to leave


class Flight(NamedTuple):
    """A step that was launched and is not answered yet."""

    launched: Launched
    step: Step
    launched_s: float
    waited_s: float  # how long the executor had nothing to do before the step
    launch_s: float  # how long the launch took, on a lazy device


class PlaceFreeError(Exception):
    """The scheduler has no executor, and this executor, whose place another took, must start anew to serve it."""


class Server:
    """Serves one scheduler at a time.

    `description` is this executor's ExecutorReady; `relay` passes on to the other ranks what this rank acts on.
    """

    def __init__(
        self,
        socket: Socket,
        runner: ModelRunner,
        description: ExecutorReady,
        progress: StepProgress,
        relay: Relay,
        clock: Callable[[], float] = time.monotonic,
        handshakes: HandshakeWatch | None = None,
    ) -> None:
        self._socket = socket
        self._runner = runner
        self._description = description
        self._progress = progress
        self._relay = relay
        self._clock = clock
        self._handshakes = handshakes
        self._scheduler_incarnation = ""
        self._retired_incarnations: set[str] = set()  # of schedulers that had a successor
        self._displaced_by: str | None = None  # the process that took this executor's place
        self._next_step_id = 1  # to be launched
        self._flight: Flight | None = None
        self._results: OrderedDict[int, bytes] = OrderedDict()
        self._last_end_s = clock()  # when the last step ended
        self._ready_due_s = clock()

    def run(self) -> None:
        """Serve for ever. Raises the error of a step, after the scheduler was told."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take one message, or wait for one until the next ExecutorReady is due; or finish the step in flight.

        There is no pause while a step is in flight: a step takes milliseconds, and a poll waits whole milliseconds.
        """
        if self._flight is not None:
            self._turn_in_flight(self._flight)
            return
        self._progress.heart.beat()
        self._say_ready_if_due()
        if self._socket.poll(max(0, round(1000 * (self._ready_due_s - self._clock())))):
            self._take(self._socket.recv())

    def _turn_in_flight(self, flight: Flight) -> None:
        if self._socket.poll(0):
            self._take(self._socket.recv())
        elif flight.launched.is_done():
            self._flight = None
            self._finish(flight)

    def _say_ready_if_due(self) -> None:
        if self._clock() < self._ready_due_s:
            return
        if self._handshakes is not None:
            self._handshakes.look()
        self._relay.keep_alive()
        ready = msgspec.structs.replace(self._description, scheduler_incarnation=self._scheduler_incarnation)
        is_sent = self._send(encode(ready))
        self._ready_due_s = self._clock() + (INTERVAL_S if is_sent else RETRY_S)

    def _take(self, frame: bytes) -> None:
        try:
            message = decode_to_executor(frame)
        except msgspec.MsgspecError as error:
            logger.warning("dropped a malformed message: %s", error)
            return
        if message.executor_incarnation != self._description.executor_incarnation:
            logger.debug("dropped a %s for another life of this executor", type(message).__name__)
            return
        match message:
            case Welcome():
                self._on_welcome(message)
            case Displaced(by=""):
                raise PlaceFreeError(
                    "the executor that took the place of this one is gone: this one ends, to be started anew"
                )
            case Displaced(by=by) if by != self._displaced_by:
                self._displaced_by = by
                logger.warning(
                    "another executor (%s) took the place of this one, which gets nothing to do and keeps its memory."
                    " A scheduler has one executor: end either, or give it a scheduler of its own",
                    by,
                )
            case Step() if message.scheduler_incarnation == self._scheduler_incarnation:
                self._on_step(message)

    def _on_welcome(self, welcome: Welcome) -> None:
        """Follow a new scheduler, or learn which step comes next. A step that is done is never the next."""
        incarnation = welcome.scheduler_incarnation
        if incarnation in self._retired_incarnations:
            return
        if incarnation != self._scheduler_incarnation:
            logger.info("welcomed by scheduler %s", incarnation)
            self._retired_incarnations.add(self._scheduler_incarnation)
            self._scheduler_incarnation = incarnation
            self._next_step_id = welcome.next_step_id
            self._flight = None  # no scheduler waits for its result
            self._results.clear()
            self._relay.send(welcome)
            self._runner.reset()
        self._next_step_id = max(self._next_step_id, welcome.next_step_id)

    def _on_step(self, step: Step) -> None:
        if step.step_id in self._results:
            self._send(self._results[step.step_id])
        elif step.step_id == self._next_step_id:
            self._do(step)

    def _do(self, step: Step) -> None:
        """Launch a step, then answer the step before, and also this step if it is done. On a CPU it always is."""
        launched_s = self._clock()
        self._progress.step_id, self._progress.layers_done = step.step_id, 0
        previous, self._flight = self._flight, None
        try:
            self._relay.send(step)
            launched = self._runner.launch(step)
            launch_s = self._clock() - launched_s if self._runner.device.is_lazy else 0.0
        except Exception as error:
            if previous is not None:
                self._finish(previous)
            self._fail(step, error)
            raise
        if previous is not None:
            self._finish(previous)
        if isinstance(launched, NeedInit):
            self._send(encode(launched))  # the step stays the next one, until a Welcome names another
            self._end_step()
            return
        self._next_step_id = step.step_id + 1
        waited_s = 0.0 if previous is not None else launched_s - self._last_end_s
        flight = Flight(launched, step, launched_s, waited_s, launch_s)
        if launched.is_done():
            self._finish(flight)
        else:
            self._flight = flight

    def _finish(self, flight: Flight) -> None:
        """Wait until a step is done, and answer it."""
        try:
            result = flight.launched.wait()
        except Exception as error:
            self._fail(flight.step, error)
            raise
        started_s = max(flight.launched_s, self._last_end_s)  # a device does its steps one after the other
        self._end_step()
        busy_s = self._last_end_s - started_s
        times = {"busy_s": busy_s, "waited_s": flight.waited_s, "launch_s": flight.launch_s}
        frame = encode(msgspec.structs.replace(result, **times))
        self._results[result.step_id] = frame
        if len(self._results) > NUM_KEPT_RESULTS:
            self._results.popitem(last=False)
        self._send(frame)

    def _end_step(self) -> None:
        self._progress.heart.beat()
        self._last_end_s = self._clock()
        self._ready_due_s = self._last_end_s + INTERVAL_S

    def _fail(self, step: Step, error: Exception) -> None:
        """Tell the scheduler that a step raised, before this process ends."""
        self._socket.set(zmq.LINGER, FAREWELL_MS)
        self._send(encode(_failure(step, error)))

    def _send(self, frame: bytes) -> bool:
        """Send a frame; return whether it was sent. A lost frame does no harm: the scheduler asks again."""
        return try_send(self._socket, [frame])


def serve(
    address: str,
    keys: ClientKeys | None,
    runner: ModelRunner,
    description: ExecutorReady,
    progress: StepProgress,
    relay: Relay,
) -> None:
    """Serve the scheduler at `address` for ever. Raises the error of a step, after the scheduler was told."""
    context: zmq.Context[Any] = zmq.Context()
    try:
        socket, handshakes = connect(context, address, description.executor_incarnation, keys)
        used = partial(used_bytes, runner.device.torch_device)
        reporter = ProgressReporter(context, address, keys, description.executor_incarnation, progress, used)
        with closing(handshakes), reporter:
            Server(socket, runner, description, progress, relay, handshakes=handshakes).run()
    finally:
        context.destroy()


def _failure(step: Step, error: Exception) -> StepFailed:
    text = f"{type(error).__name__}: {error}"
    return StepFailed(step.scheduler_incarnation, step.executor_incarnation, step.step_id, text)
