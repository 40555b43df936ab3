"""A server for one command alone: it starts like `octavo serve`, on a free port, and ends with the command."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from octavo.errors import ChildRefusedError
from octavo.protocol.config import FIELDS, Config
from octavo.protocol.settings.loading import child_environ
from octavo.python.settings import HTTP_FIELDS
from octavo.serving.launcher import ROLES
from octavo.serving.listening import is_healthy, server_url, with_ports
from octavo.serving.processes import POLL_S, STOP_GRACE_S, Process, end_processes

SERVER_GRACE_S = (len(ROLES) + 1) * STOP_GRACE_S  # its processes end one after another, and each gets one


@contextmanager
def own_server(config: Config) -> Iterator[tuple[str, str]]:
    """Serve `config.model` on the loopback, and yield the URL of its API and its key.

    Raises CommandError if the server ends before it is ready; it has said why. It also ends if this process is killed.
    """
    key = secrets.token_urlsafe()
    # Variables with an address may belong to another server on this machine.
    as_usual = {name: field.default for name, field in FIELDS.items() if name in HTTP_FIELDS}
    config = msgspec.structs.replace(config, **{**as_usual, "port": 0, "api_key": (key,)})
    config = with_ports(config)
    process = Process(
        [sys.executable, "-P", "-m", "octavo", "serve"],
        environ=child_environ(config, os.environ, secrets=True),
        stdout=subprocess.DEVNULL,  # it would print how to use the server
    )
    try:
        _wait_until_ready(process, config)
        yield f"{server_url(config)}/v1", key
    finally:
        end_processes([process], SERVER_GRACE_S)
        process.lifeline.close()


def _wait_until_ready(process: Process, config: Config) -> None:
    while not is_healthy(config):
        if process.poll() is not None:
            raise ChildRefusedError("the server of this command ended: it says why above")
        time.sleep(POLL_S)
