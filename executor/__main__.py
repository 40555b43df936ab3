"""`python -m octavo.executor`: load a model and do a scheduler's steps until SIGINT or SIGTERM."""

import signal
import sys
import threading
import time

from octavo.executor.start.settings import FIELDS
from octavo.protocol.extras import imports_of
from octavo.protocol.link_keys import check_ranks_link, client_keys
from octavo.protocol.process import refuse, start_process

RANK_0_TURN_S = 5.0  # a rank that cannot start waits so long for rank 0 to print the reason


def main() -> int:
    """Return the exit status.

    0: a signal came after the model was ready. 1: another rank ended or cannot be reached, or another executor had the
    place. 2: the model cannot be served. A step that raises ends in a traceback; a signal during the start ends the
    process directly.
    """
    config, heart = start_process("executor", "Compute the steps of one scheduler.", FIELDS)
    for number in (signal.SIGINT, signal.SIGTERM):
        # No Python handler runs while kernels compile or a rank waits for another. The default action ends the process.
        signal.signal(number, signal.SIG_DFL)
    try:
        check_ranks_link(config)
        keys = client_keys(config, "executor", [config.backend_address] if config.rank == 0 else [])
    except ValueError as error:
        return refuse("executor", error)
    started_s = time.monotonic()
    # Imported here, so that --help and a wrong setting do not wait for torch. Numba's OpenMP must load before torch's.
    with imports_of("python -m octavo.executor", "executor"):
        import octavo.kernels.choice  # noqa: F401
        from octavo.executor.link.relay import Relay, follow
        from octavo.executor.link.server import PlaceFreeError, serve
        from octavo.executor.parallel import GroupLostError
        from octavo.executor.start.group import is_local
        from octavo.executor.start.startup import START_FAILURES, logger, start_executor

    logger.info("import: %.2f s", time.monotonic() - started_s)
    try:
        executor = start_executor(config, heart)
    except GroupLostError as error:
        logger.error("%s", error)
        return 1
    except START_FAILURES as error:
        logger.debug("where it failed", exc_info=error)
        if config.rank and is_local(config):
            threading.Event().wait(RANK_0_TURN_S)  # rank 0 finds the same and reports it for all
        return refuse("executor", error)
    runner, parallel = executor.runner, executor.runner.parallel
    if config.tensor_parallel_size == 1:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: sys.exit(0))
    whom = config.backend_address if parallel.rank == 0 else "rank 0"
    logger.info("ready after %.2f s; serving %s", time.monotonic() - started_s, whom)
    try:
        if parallel.rank == 0:
            serve(config.backend_address, keys, runner, executor.description, executor.progress, Relay(parallel))
        else:
            follow(runner, parallel, heart)
    except (GroupLostError, PlaceFreeError) as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
