"""`python -m octavo.entrypoints.openai.api_server --model M` is `octavo serve --model M`."""

import sys

from octavo.cli import program

program(["serve", *sys.argv[1:]])
