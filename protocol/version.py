"""The version of Octavo, which the wheel and every answer carry."""

__version__ = "0.1.0"
