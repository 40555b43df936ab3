"""`python -m octavo.entrypoints.cli --model M` is `octavo generate --model M`."""

import sys

from octavo.cli import program

program(["generate", *sys.argv[1:]])
