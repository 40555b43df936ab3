"""What a person is told in one paragraph, with cause and remedy."""


class ModelError(ValueError):
    """MODEL cannot be served. The message is one paragraph for the person who typed it: cause and remedy."""


class CommandError(Exception):
    """A command cannot do what was asked. The message is one paragraph for the person who typed it."""


class LaunchError(RuntimeError):
    """The server cannot start; the message says why, or that the process which failed has said it."""


class ChildRefusedError(LaunchError):
    """A process does not start, or not again, and has said why in one paragraph: there is nothing to add."""


class GenerationError(RuntimeError):
    """A generation cannot be finished: it was closed under way, or the engine gave it up. The message says why."""


class GenerationFailedError(GenerationError):
    """The engine gave up this one generation, as one that ended the executor twice. Others are not concerned."""
