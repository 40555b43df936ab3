"""Kinds of numbers that flags take."""

import argparse


def positive(text: str) -> int:
    """Return the integer in `text`. Raises ArgumentTypeError if it is none or not above 0."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Return the integer in `text`. Raises ArgumentTypeError if it is none or below 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least {least}")
    return number
