import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from octavo.gateway.text.tokenizer import Tokenizer
from tests.fakes.fake_scheduler import FakeScheduler, computed_reply
from tests.fakes.gateway_server import Served, serving
from tests.fakes.model_directories import (
    VOCAB_SIZE,
    write_byte_level_model,
    write_metaspace_model,
    write_tiny_model,
)

MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_level_model(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_metaspace_model(tmp_path_factory.mktemp("metaspace")))


@pytest.fixture(scope="session")
def demo(demo_directory: Path) -> Tokenizer:
    """The demo model's tokenizer."""
    return Tokenizer(demo_directory)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))


def make_scheduler(directory: str) -> FakeScheduler:
    return FakeScheduler(f"ipc://{directory}/s", vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


@pytest.fixture
def scheduler() -> Iterator[FakeScheduler]:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own paths can be too long for a socket
        yield make_scheduler(directory)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tiny_model: Path) -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory() as directory:
        async with serving(tiny_model, make_scheduler(directory)) as served:
            yield served


@pytest_asyncio.fixture(loop_scope="module")
async def served(server: Served) -> Served:
    """A running gateway with no keys, shared by a module's tests; its scheduler is as new."""
    scheduler = server.scheduler
    scheduler.reply, scheduler.tokens_per_step, scheduler.paused = computed_reply, 1, False
    scheduler.rejection = lambda submit: None
    scheduler.received.clear()
    return server
