"""Errors for a person: the message is one paragraph with cause and remedy."""


class ModelError(ValueError):
    """MODEL cannot be served. The message is one paragraph for the person who typed it: cause and remedy."""


class CommandError(Exception):
    """A command cannot do what was asked. The message is one paragraph for the person who typed it."""


class LaunchError(RuntimeError):
    """The server cannot start. The message says why, or says that the failed process has said why."""


class ChildRefusedError(LaunchError):
    """A process refuses to start, and has said why in one paragraph: there is nothing to add."""


class GenerationError(RuntimeError):
    """A generation cannot be finished: the model was closed, or the engine gave it up. The message says why."""


class GenerationFailedError(GenerationError):
    """The engine gave up this one generation, for example because it ended the executor twice. Others go on."""
