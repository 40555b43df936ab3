"""The ranks of executors as real processes: rank 0 in the test's own, the others in `rank_process.py`."""

import gc
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch import distributed

from octavo.executor.link.relay import Relay
from octavo.executor.models import Decoder
from octavo.executor.start.startup import start_executor
from octavo.executor.step.grammars import Grammars
from octavo.executor.step.launched import Launched
from octavo.executor.step.runner import ModelRunner
from octavo.protocol.config import Config
from octavo.protocol.messages import NeedInit, Step, Welcome

END_TIMEOUT_S = 60


def free_address() -> str:
    """Return a TCP address of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Followers:
    """The processes of all ranks but 0 of some executors, which they form one after the other."""

    def __init__(self, configs: Sequence[Config]) -> None:
        """`configs` are those of the executors' ranks 0."""
        self._processes = []
        for rank in range(1, max(config.tensor_parallel_size for config in configs)):
            own = [msgspec.structs.replace(c, rank=rank) for c in configs if rank < c.tensor_parallel_size]
            command = [
                sys.executable,
                "-m",
                "tests.fakes.rank_process",
                *(msgspec.json.encode(c).decode() for c in own),
            ]
            self._processes.append(
                subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
            )

    def __enter__(self) -> "Followers":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def wait(self) -> list[tuple[int, str]]:
        """Return each process's exit status and what it says, once its last executor has ended."""
        said = [process.communicate(timeout=END_TIMEOUT_S)[0] for process in self._processes]
        return [(process.returncode, text) for process, text in zip(self._processes, said, strict=True)]


class RankGroup:
    """Runs steps on all ranks while the context lasts; in a SchedulerWithRunner it stands for the runner."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._runner: ModelRunner | None = None  # rank 0's
        self._relay: Relay | None = None

    def __enter__(self) -> "RankGroup":
        self._runner = start_executor(self.config).runner
        self._relay = Relay(self._runner.parallel)
        return self

    def __exit__(self, *exception: object) -> None:
        """End rank 0, as far as the others can tell: its connections close once nothing here names the group."""
        distributed.destroy_process_group()
        self._runner = self._relay = None
        gc.collect()

    @property
    def decoder(self) -> Decoder:
        return self._runner.model

    @property
    def grammars(self) -> Grammars:
        return self._runner.grammars

    def launch(self, step: Step) -> Launched | NeedInit:
        """Begin a step on every rank and return what rank 0 has of it."""
        self._relay.send(step)
        return self._runner.launch(step)

    def reset(self) -> None:
        """Have every rank drop its soft state, as for another scheduler."""
        self._relay.send(Welcome("", "", 1))
        self._runner.reset()

    def keep_alive(self) -> None:
        self._relay.keep_alive()
