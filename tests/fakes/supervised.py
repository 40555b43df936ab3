"""A process for supervisors, which notes each life of it in a file and does what its test asks:

python -m tests.fakes.supervised BEHAVIOUR DIRECTORY --lifeline-fd N
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from octavo.protocol.process import refuse, start_process


def main() -> int:
    behaviour, directory = sys.argv[1], Path(sys.argv[2])
    _, heart = start_process("supervised", "Do as asked.", (), sys.argv[3:])
    lives = directory / "lives"
    with lives.open("a") as file:
        file.write(f"{os.getpid()}\n")
    life = len(lives.read_text().splitlines())
    match behaviour:
        case "fails" if life == 1:
            return 1
        case "hangs" if life == 1:
            heart.beat()
            stand_still()
        case "stays":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, _: sys.exit(10 + number))
            leave_orphan(directory)
            stand_still()
        case "refuses" if os.environ["OCTAVO_RANK"] == "1":
            stand_still()
        case "talks" if os.environ["OCTAVO_RANK"] == "1":
            (directory / "ready").touch()
            while True:
                print("still here", file=sys.stderr)
                time.sleep(0.01)
        case "talks":
            while not (directory / "ready").exists():
                time.sleep(0.01)
            return refuse("executor", "there is no room: make some")
        case "ranks":
            rank, address = os.environ["OCTAVO_RANK"], os.environ["OCTAVO_DISTRIBUTED_ADDRESS"]
            with (directory / "ranks").open("a") as file:
                file.write(f"{rank} {address}\n")
            while rank == "1" and address.endswith("/1"):  # in the first life
                if len((directory / "ranks").read_text().splitlines()) == 3:
                    return 1
                time.sleep(0.01)
            stand_still()
        case "ignores":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (directory / "ready").touch()
            stand_still()
    return 2


def stand_still() -> None:
    threading.Event().wait()


def leave_orphan(directory: Path) -> None:
    """Start a process whose parent is gone at once, and leave its id in a file."""
    subprocess.run(["sh", "-c", f"sleep 1000 & echo $! > {directory}/orphan.new"], check=True)
    (directory / "orphan.new").rename(directory / "orphan")


if __name__ == "__main__":
    sys.exit(main())
