"""The real scheduler's server, in a thread."""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.protocol.config import Config
from octavo.protocol.lifeline import Heart
from octavo.protocol.sockets import MAX_MESSAGE_BYTES
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.server import Server, open_server
from tests.fakes.waiting import wait_until


@contextmanager
def socket_directory() -> Iterator[Path]:
    """Make a private directory whose path is short enough for sockets; pytest's own may not be."""
    path = Path(tempfile.mkdtemp(prefix="octavo-test-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def toy_config(directory: Path, **settings: object) -> Config:
    """Return the Config of a scheduler whose sockets lie in `directory`."""
    chosen: dict[str, object] = {
        "frontend_address": f"ipc://{directory}/frontend",
        "backend_address": f"ipc://{directory}/backend",
        "served_model_name": ("toy",),
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "peer_timeout_s": 5.0,
    }
    return Config(**{**chosen, **settings})


class SchedulerThread:
    """One life of the scheduler. Leaving the context ends it without a word to its peers, as a kill would."""

    def __init__(
        self,
        config: Config,
        high_water_mark: int = 1000,
        clock: Callable[[], float] = time.monotonic,
        max_step_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.config = config
        self.clock = clock
        self.high_water_mark = high_water_mark
        self.max_step_bytes = max_step_bytes
        self.server: Server | None = None
        self.error: BaseException | None = None
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "SchedulerThread":
        self._thread.start()
        assert self._is_open.wait(10)
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self.kill()
        if self.error is not None and kind is None:
            raise self.error

    def kill(self) -> None:
        if self.server is not None and self.error is None and self._thread.is_alive():
            self.server.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def scheduler(self) -> Scheduler:
        assert self.server is not None
        assert self.server.scheduler is not None
        return self.server.scheduler

    def check_idle(self) -> None:
        """Wait until nothing is left to do, then assert that all blocks are back and the accounts agree."""
        wait_until(lambda: self.error or (not self.scheduler.has_work and self.scheduler.num_in_flight == 0))
        self.kill()  # the thread may touch the scheduler no more
        if self.error is not None:
            raise self.error
        self.scheduler.check_integrity()
        assert self.scheduler.num_used_blocks == 0

    def _run(self) -> None:
        try:
            with open_server(
                self.config, self.clock, high_water_mark=self.high_water_mark, max_step_bytes=self.max_step_bytes
            ) as server:
                self.server = server
                self._is_open.set()
                server.run(Heart())
        except BaseException as error:  # the test's thread raises it
            self.error = error
            self._is_open.set()
