"""`octavo serve MODEL --dry-run`: a child prints the needs of the model, because only the executor knows models."""

import os
import sys

import msgspec

from octavo.models.resolve import resolve_config_of
from octavo.protocol.config import Config
from octavo.protocol.settings.loading import child_environ
from octavo.serving.processes import Process, kill_processes


def dry_run(config: Config) -> int:
    """Print what the model needs. Return 0 if it fits this machine, 1 if not. Raises ModelError."""
    resolved = msgspec.structs.replace(config, model=str(resolve_config_of(config)))
    command = [sys.executable, "-P", "-m", "octavo.executor.start.dry_run"]
    environ = child_environ(resolved, os.environ, secrets=False)
    process = Process(command, environ=environ)
    try:
        return process.wait()
    finally:
        kill_processes([process])
        process.lifeline.close()
