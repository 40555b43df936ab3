"""Fixtures that every folder of tests may use."""

import os
from pathlib import Path

import pytest

# Before OpenMP is loaded, and inherited by every server: threads that spin while they wait for one another make a step
# ten times as long where something else wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import kernels  # noqa: F401  (before whatever loads torch: one OpenMP runtime)
from octavo.resolve import resolve_model


@pytest.fixture(scope="session")
def demo_directory() -> Path:
    """The demo model in the user's cache (`make demo-model` puts it there), as a Hugging Face directory."""
    return resolve_model(None).directory
