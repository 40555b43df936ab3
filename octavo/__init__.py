"""Octavo's face: the command line, the launcher, and everything that turns a model's name into local files."""

__version__ = "0.1.0"
