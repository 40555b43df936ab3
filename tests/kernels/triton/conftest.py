"""Tests of interpreted kernels: collected only in a process of their own, which tests/kernels/test_triton.py starts."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
