"""The ranks of one executor as real processes: rank 0 in the test's own, the others as `python -m executor`."""

import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed

from executor.group import Relay
from executor.models import Decoder
from executor.runner import ModelRunner
from executor.startup import start_executor
from protocol.config import Config
from protocol.messages import NeedInit, Step, StepResult, Welcome

END_TIMEOUT_S = 30


def free_address() -> str:
    """Return a TCP address of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def start_rank(rank: int, config: Config) -> "subprocess.Popen[str]":
    """Start one rank by hand, with its log in a pipe."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")}
    flags = {
        "rank": rank,
        "tensor-parallel-size": config.tensor_parallel_size,
        "distributed-address": config.distributed_address,
        "model": config.model,
        "dtype": config.dtype,
        "block-size": config.block_size,
        "kv-cache-memory-bytes": config.kv_cache_memory_bytes,
        "num-threads": config.num_threads,
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "executor", *arguments],
        env=kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stderr=subprocess.PIPE,
        text=True,
    )


class RankGroup:
    """Runs steps on all ranks while the context lasts; in a SchedulerWithRunner it stands for the runner."""

    def __init__(self, model: Path, world_size: int, address: str, *, block_size: int = 8) -> None:
        self._config = Config(
            model=str(model),
            dtype="float32",
            block_size=block_size,
            kv_cache_memory_bytes=1 << 20,
            num_threads=1,
            tensor_parallel_size=world_size,
            distributed_address=address,
        )
        self.model_directory = model
        self.runner: ModelRunner | None = None  # rank 0's, while the context lasts
        self.relay: Relay | None = None
        self.followers: list[subprocess.Popen[str]] = []
        self.logs: list[str] = []  # of the followers, once they have ended

    def __enter__(self) -> "RankGroup":
        num_threads = torch.get_num_threads()
        self.followers = [start_rank(rank, self._config) for rank in range(1, self._config.tensor_parallel_size)]
        try:
            self.runner = start_executor(self._config).runner
        except BaseException:
            self._kill()
            raise
        torch.set_num_threads(num_threads)
        self.relay = Relay(self.runner.parallel)
        return self

    def __exit__(self, *exception: object) -> None:
        self.leave()
        self._kill()

    @property
    def decoder(self) -> Decoder:
        return self.runner.model

    def run(self, step: Step) -> StepResult | NeedInit:
        """Do a step on every rank and return what rank 0 has of it."""
        self.relay.send(step)
        return self.runner.run(step)

    def reset(self) -> None:
        """Have every rank drop its soft state, as for another scheduler."""
        self.relay.send(Welcome("", "", 1))
        self.runner.reset()

    def leave(self) -> None:
        """End rank 0, as far as the others can tell: its connections close once nothing here names the group."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self.runner = self.relay = None
        gc.collect()

    def wait_for_followers(self) -> list[int]:
        """Return the exit statuses of the others, which are about to end; their logs are there then."""
        self.logs = [follower.communicate(timeout=END_TIMEOUT_S)[1] for follower in self.followers]
        return [follower.returncode for follower in self.followers]

    def _kill(self) -> None:
        for follower in self.followers:
            if follower.poll() is None:
                follower.kill()
                follower.communicate()
