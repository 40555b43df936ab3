"""A gateway's connection to one scheduler: the socket and the clock around `InFlight`."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import cast

import msgspec
import zmq
import zmq.asyncio

from octavo.gateway.link.in_flight import Event, InFlight
from octavo.protocol.handshakes import HandshakeWatch
from octavo.protocol.link_keys import ClientKeys
from octavo.protocol.messages import Ready, Stats, Submit, ToScheduler, decode_to_gateway, encode
from octavo.protocol.sockets import connect_dealer, new_identity

logger = logging.getLogger(__name__)

TICK_S = 0.1
CLOSE_MS = 200


class SchedulerClient:
    """Sends requests to the scheduler at `address` and delivers their events.

    The Engine opens and closes it, in the event loop in which it is used. The scheduler may start later, or end and
    start again: requests in flight wait and then go on.
    """

    def __init__(self, address: str, *, peer_timeout_s: float = 10.0, keys: ClientKeys | None = None) -> None:
        self.address, self._peer_timeout_s, self._keys = address, peer_timeout_s, keys
        self._gateway_id = new_identity()  # the scheduler knows the gateway by it, across connections
        self._in_flight = InFlight(self._gateway_id)
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._handshakes: HandshakeWatch | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_heard_s = -float("inf")
        self._answered = asyncio.Event()
        self._was_healthy = False

    @property
    def ready(self) -> Ready | None:
        """The scheduler's last Ready; None while the scheduler is silent."""
        return self._in_flight.ready if self._is_heard else None

    @property
    def healthy(self) -> bool:
        """Whether the scheduler answers and has an executor that can run a step."""
        return self.ready is not None and self.ready.can_progress

    @property
    def stats(self) -> Stats | None:
        return self._in_flight.stats if self._is_heard else None

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def open(self) -> None:
        """Connect, and begin to send Hello."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # No message is queued while there is no scheduler: the next scheduler would get stale messages.
        self._socket.set(zmq.IMMEDIATE, 1)
        self._handshakes = HandshakeWatch(self._socket, self.address, has_keys=self._keys is not None)
        connect_dealer(cast("zmq.Socket[bytes]", self._socket), self.address, self._gateway_id, self._keys)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._tick())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def close(self) -> None:
        """Disconnect. Requests in flight end with an error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._send(self._in_flight.fail("the gateway is shutting down"))
        if self._handshakes is not None:
            self._handshakes.close()
        if self._socket is not None and self._context is not None:
            self._socket.close(linger=CLOSE_MS)  # time for the Aborts
            self._context.term()
        self._socket = None

    async def first_answer(self) -> None:
        """Return once the scheduler has sent a Ready; return at once if it did so in the past."""
        await self._answered.wait()

    def submit(self, submit: Submit, deliver: Callable[[Event], None]) -> None:
        """Send a request whose events go to `deliver`, in order, in the event loop."""
        self._send(self._in_flight.submit(submit, deliver))

    def abandon(self, request_id: str, *, stopped: bool = False) -> None:
        """Abort a request unless it has ended, and deliver no more events of it. `stopped`: the answer is complete."""
        self._send(self._in_flight.abandon(request_id, stopped=stopped))

    @property
    def _is_heard(self) -> bool:
        return time.monotonic() - self._last_heard_s < self._peer_timeout_s

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            frame = await self._socket.recv()
            try:
                message = decode_to_gateway(frame)
            except msgspec.MsgspecError as error:
                logger.warning("dropped a malformed message from %s: %s", self.address, error)
                continue
            self._last_heard_s = time.monotonic()
            self._send(self._in_flight.receive(message, self._last_heard_s))
            if self._in_flight.ready is not None:
                self._answered.set()
            await asyncio.sleep(0)  # let streams run, even if the next message has arrived already

    async def _tick(self) -> None:
        assert self._handshakes is not None
        while True:
            self._handshakes.look()
            self._log_health()
            if not self._is_heard:
                self._send(self._in_flight.fail("the scheduler does not answer", only_new=True))
            self._send(self._in_flight.due(time.monotonic(), seek=not self._is_heard))
            await asyncio.sleep(TICK_S)

    def _log_health(self) -> None:
        if self.healthy and not self._was_healthy:
            logger.info("the model is ready: requests are answered from now on")
        elif self._was_healthy and not self.healthy:
            logger.warning("%s makes no progress: new requests get a 503 until it does", self.address)
        self._was_healthy = self.healthy

    def _send(self, messages: Iterable[ToScheduler]) -> None:
        """Send the messages that can be sent now. The others are lost; Hello makes sure that they are repeated."""
        for message in messages:
            if self._socket is None:
                return
            # With DONTWAIT the future is done at once.
            sent = cast("asyncio.Future[object]", self._socket.send(encode(message), zmq.DONTWAIT))
            if (error := sent.exception()) and not isinstance(error, zmq.Again):
                raise error

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            logger.critical("the link to %s broke", self.address, exc_info=error)
            self._last_heard_s = -float("inf")
            self._in_flight.fail("the gateway lost its link to the scheduler")
