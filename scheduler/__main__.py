"""`python -m octavo.scheduler`: serve until SIGINT or SIGTERM."""

import signal
import sys
from contextlib import ExitStack

from octavo.protocol.process import refuse, start_process
from octavo.scheduler.server import open_server

FIELDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "target_step_s",
    "max_num_queued_reqs",
    "enable_prefix_caching",
    "async_scheduling",
    "frontend_address",
    "backend_address",
    "link_keys_dir",
    "insecure_links",
    "peer_timeout_s",
    "hang_timeout_s",
)


def main() -> int:
    """Return the exit status: 0 after a signal, 2 if an address cannot be bound or lacks keys."""
    config, heart = start_process(
        "scheduler", "Plan the steps of one model's executors and serve its gateways.", FIELDS
    )
    with ExitStack() as stack:
        try:
            server = stack.enter_context(open_server(config))
        except ValueError as error:
            return refuse("scheduler", error)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        server.run(heart)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, signal.SIG_IGN
            )  # the rest of the shutdown takes a moment; a second signal must not disturb it
    return 0


if __name__ == "__main__":
    sys.exit(main())
