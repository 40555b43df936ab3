"""How rank 0 relays what it acts on to the other ranks, and how they follow it.

Only rank 0 speaks to the scheduler. It relays every message that it acts on, through the process group: all ranks do
the same steps in the same order, even if messages on the scheduler's link are lost or sent again. The others hold the
same soft state, compute their parts of each step, and learn from rank 0 which tokens were sampled. A rank whose peer is
gone raises: the whole group ends.
"""

import torch

from octavo.executor.parallel import TensorParallel
from octavo.executor.step.runner import ModelRunner
from octavo.protocol.lifeline import Heart
from octavo.protocol.messages import Step, ToExecutor, Welcome, decode_to_executor, encode


class Relay:
    """Sends from rank 0 to the other ranks. Each method raises GroupLostError if one of them is gone."""

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel

    def send(self, message: ToExecutor) -> None:
        """Let the other ranks act on `message`, as rank 0 is about to do."""
        if self._parallel.world_size > 1:
            self._broadcast(encode(message))

    def keep_alive(self) -> None:
        """Tell the other ranks that rank 0 lives and there is nothing to do."""
        if self._parallel.world_size > 1:
            self._broadcast(b"")

    def _broadcast(self, frame: bytes) -> None:
        self._parallel.broadcast(torch.tensor(len(frame)))
        if frame:
            self._parallel.broadcast(torch.frombuffer(bytearray(frame), dtype=torch.uint8))


def follow(runner: ModelRunner, parallel: TensorParallel, heart: Heart) -> None:
    """Do what rank 0 does, for ever. Raises GroupLostError when rank 0 is gone, and the error of a step."""
    while True:
        frame = _receive(parallel)
        heart.beat()
        match decode_to_executor(frame) if frame else None:
            case Welcome():
                runner.reset()
            case Step() as step:
                runner.launch(step)


def _receive(parallel: TensorParallel) -> bytes:
    """Return the next frame of rank 0; an empty frame is a sign of life."""
    num_bytes = int(parallel.broadcast(torch.tensor(0)))
    if not num_bytes:
        return b""
    return parallel.broadcast(torch.empty(num_bytes, dtype=torch.uint8)).numpy().tobytes()
