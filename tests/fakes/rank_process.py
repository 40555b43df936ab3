"""`python -m tests.fakes.rank_process CONFIG...`: a rank of one executor after the other, for RankGroups.

Each CONFIG is a Config as JSON. A life ends when its rank 0 is gone; it must not end otherwise.
"""

import sys

import octavo.kernels.choice  # noqa: F401  (before torch: one OpenMP runtime)

# isort: split
import msgspec
from torch import distributed

from octavo.executor.link.relay import follow
from octavo.executor.parallel import GroupLostError
from octavo.executor.start.startup import start_executor
from octavo.protocol.config import Config
from octavo.protocol.lifeline import Heart


def main() -> None:
    for text in sys.argv[1:]:
        runner = start_executor(msgspec.json.decode(text, type=Config)).runner
        try:
            follow(runner, runner.parallel, Heart())
        except GroupLostError as error:
            print(error, flush=True)
        del runner
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
