"""`octavo serve MODEL --dry-run`: what serving would take, said by a child, since only the executor knows models."""

import os
import subprocess
import sys

import msgspec

from octavo.resolve import resolve_config
from protocol.config import Config, child_environ


def dry_run(config: Config) -> int:
    """Print what serving takes and return 0 if this machine has it, 1 if not. Raises ModelError."""
    directory = resolve_config(
        config.model or None, trust_remote_code=config.trust_remote_code, use_modelscope=config.use_modelscope
    )
    resolved = msgspec.structs.replace(config, model=str(directory))
    command = [sys.executable, "-P", "-m", "executor.dry_run"]
    environ = child_environ(resolved, os.environ, secrets=False)
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, check=False).returncode
