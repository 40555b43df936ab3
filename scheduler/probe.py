"""`python -m octavo.scheduler.probe`: is the scheduler of this machine or container ready, together with its executor?

It reads the scheduler's own variables and keys. The exit status is 0 if work can make progress. Otherwise it is 1, and
the reason is printed.
"""

import os
import re
import sys
import time

import zmq

from octavo.protocol.link_keys import ClientKeys, client_keys
from octavo.protocol.messages import PROTOCOL_VERSION, Hello, Ready, decode_to_gateway, encode
from octavo.protocol.settings.loading import load_config
from octavo.protocol.sockets import connect_dealer, new_identity

TIMEOUT_S = 2.0  # shorter than the usual timeout of a probe


def main() -> int:
    """Return the exit status."""
    try:
        config = load_config(os.environ)
        address = reachable(config.frontend_address)
        reason = ask(address, TIMEOUT_S, client_keys(config, "scheduler", [address]))
    except ValueError as error:
        reason = str(error)
    if reason:
        print(reason, file=sys.stderr)
    return 1 if reason else 0


def reachable(address: str) -> str:
    """Return the address to connect to for a socket that is bound at `address`."""
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[::\]):", "tcp://localhost:", address)


def ask(address: str, timeout_s: float, keys: ClientKeys | None = None) -> str:
    """Return why the scheduler at `address` makes no progress, or "" if it does. Takes at most `timeout_s`."""
    gateway_id = new_identity()
    deadline_s = time.monotonic() + timeout_s
    with zmq.Context() as context, connect_dealer(context.socket(zmq.DEALER), address, gateway_id, keys) as socket:
        socket.send(encode(Hello(PROTOCOL_VERSION, gateway_id, hello_seq=1)))
        while socket.poll(max(0, round(1000 * (deadline_s - time.monotonic())))):
            match decode_to_gateway(socket.recv()):
                case Ready(can_progress=True):
                    return ""
                case Ready():
                    return "the scheduler has no executor that makes progress"
    return f"no scheduler with an executor answers at {address} within {timeout_s:g} s"


if __name__ == "__main__":
    sys.exit(main())
