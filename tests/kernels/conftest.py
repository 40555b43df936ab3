from octavo.kernels import cpu  # before torch: one OpenMP runtime for both

# isort: split
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let a test change the number of threads; start it with two, and restore what was."""
    before = torch.get_num_threads()
    cpu.set_num_threads(2)
    yield
    cpu.set_num_threads(before)
