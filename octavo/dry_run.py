"""`octavo serve MODEL --dry-run`: what serving would take, said by a child, since only the executor knows models."""

import os
import subprocess
import sys

import msgspec

from octavo.resolve import resolve_config_of
from protocol.config import Config
from protocol.settings.loading import child_environ


def dry_run(config: Config) -> int:
    """Print what serving takes and return 0 if this machine has it, 1 if not. Raises ModelError."""
    resolved = msgspec.structs.replace(config, model=str(resolve_config_of(config)))
    command = [sys.executable, "-P", "-m", "executor.dry_run"]
    environ = child_environ(resolved, os.environ, secrets=False)
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, check=False).returncode
