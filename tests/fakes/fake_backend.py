"""The scheduler's end of the executor link, by hand: a ROUTER that says what a test wants said."""

import zmq

from octavo.protocol.messages import (
    FromExecutor,
    Progress,
    Step,
    StepResult,
    ToExecutor,
    Welcome,
    decode_from_executor,
    encode,
)
from octavo.protocol.sockets import bind_router

TIMEOUT_MS = 120_000  # kernels may have to be compiled first


class FakeBackend:
    """Bound to a free port of the loopback, or to `address` again after a restart."""

    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        self._router = bind_router(self._context, address)
        self.address = self._router.get(zmq.LAST_ENDPOINT).decode()
        self.identity = b""  # of the last executor that was heard, its progress reports aside
        self.progress: list[Progress] = []

    def __enter__(self) -> "FakeBackend":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End, and return once the address is free."""
        self._router.close(0)
        self._context.term()

    def receive(self) -> FromExecutor:
        """Return the next message of the executor; Progress is put aside. Fails after two minutes of silence."""
        while isinstance(message := self.receive_any(), Progress):
            self.progress.append(message)
        return message

    def receive_any(self) -> FromExecutor:
        """Return the next message of the executor, whichever it is."""
        assert self._router.poll(TIMEOUT_MS), "the executor is silent"
        identity, frame = self._router.recv_multipart()
        message = decode_from_executor(frame)
        if not isinstance(message, Progress):
            self.identity = identity
        return message

    def wait_for(self, kind: type) -> FromExecutor:
        """Return the next message of a kind, dropping others."""
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def is_silent(self, for_ms: int) -> bool:
        """Return whether nothing arrives in that time."""
        return not self._router.poll(for_ms)

    def send(self, *messages: ToExecutor) -> None:
        for message in messages:
            self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        self._router.send_multipart([self.identity, frame])

    def welcome(self, scheduler: str, executor: str, next_step_id: int = 1) -> None:
        self.send(Welcome(scheduler, executor, next_step_id))

    def run(self, step: Step) -> StepResult:
        """Send a step and return its result."""
        self.send(step)
        result = self.wait_for(StepResult)
        assert isinstance(result, StepResult)
        return result
