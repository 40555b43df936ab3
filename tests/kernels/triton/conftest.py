"""Tests that interpret Triton's kernels: collected in a process of their own only (see tests/kernels/test_triton.py)."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
