"""Octavo's face: the command line, the launcher, and everything that turns a model's name into local files."""

from protocol import __version__

__all__ = ["__version__"]
