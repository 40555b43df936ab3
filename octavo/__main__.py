"""`python -m octavo` is the `octavo` command."""

from octavo.cli import program

program()
