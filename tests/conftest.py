"""Fixtures that every folder of tests may use."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo.kernels.choice  # noqa: F401  (before whatever loads torch: one OpenMP runtime)
from octavo.models.resolve import resolve_model


@pytest.fixture(scope="session")
def demo_directory() -> Path:
    """The demo model in bfloat16 in the user's cache (`make demo-model` puts it there), as a Hugging Face directory."""
    return resolve_model(None, expands_demo=True).directory


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Put back the level of our log, which a command that runs in a test's process sets."""
    logger = logging.getLogger("octavo")
    level = logger.level
    yield
    logger.setLevel(level)
