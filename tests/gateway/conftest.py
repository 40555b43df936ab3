import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.http_server import Served, serving
from tests.fakes.tiny_model import VOCAB_SIZE, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def scheduler() -> Iterator[FakeScheduler]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own paths can be too long for a socket
        yield FakeScheduler(f"ipc://{directory}/s", vocab_size=VOCAB_SIZE, max_model_len=512)


@pytest.fixture
async def served(tiny_model: Path, scheduler: FakeScheduler) -> AsyncIterator[Served]:
    """A running gateway with no keys, and its scheduler."""
    async with serving(tiny_model, scheduler) as running:
        yield running
