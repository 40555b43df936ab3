"""How rank 0 has the other ranks do what it does."""

import torch

from octavo.executor.parallel import TensorParallel
from octavo.executor.step.runner import ModelRunner
from octavo.protocol.lifeline import Heart
from octavo.protocol.messages import Step, ToExecutor, Welcome, decode_to_executor, encode


class Relay:
    """Rank 0's voice to the others. Each method raises GroupLostError if one of them is gone."""

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel

    def send(self, message: ToExecutor) -> None:
        """Have the other ranks act on `message`, as this one is about to do."""
        if self._parallel.world_size > 1:
            self._broadcast(encode(message))

    def keep_alive(self) -> None:
        """Let the others know that there is nothing to do."""
        if self._parallel.world_size > 1:
            self._broadcast(b"")

    def _broadcast(self, frame: bytes) -> None:
        self._parallel.broadcast(torch.tensor(len(frame)))
        if frame:
            self._parallel.broadcast(torch.frombuffer(bytearray(frame), dtype=torch.uint8))


def follow(runner: ModelRunner, parallel: TensorParallel, heart: Heart) -> None:
    """Do what rank 0 does, for ever. Raises GroupLostError when it is gone, and what a step raises."""
    while True:
        frame = _receive(parallel)
        heart.beat()
        match decode_to_executor(frame) if frame else None:
            case Welcome():
                runner.reset()
            case Step() as step:
                runner.launch(step)


def _receive(parallel: TensorParallel) -> bytes:
    """Return what rank 0 sends next; empty if it only says that it is there."""
    num_bytes = int(parallel.broadcast(torch.tensor(0)))
    if not num_bytes:
        return b""
    return parallel.broadcast(torch.empty(num_bytes, dtype=torch.uint8)).numpy().tobytes()
