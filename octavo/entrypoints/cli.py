"""`python -m octavo.entrypoints.cli --model M` is `octavo generate --model M`."""

import sys

from octavo.cli import main

sys.exit(main(["generate", *sys.argv[1:]]))
