"""What a person is told in one paragraph, with cause and remedy."""


class ModelError(ValueError):
    """MODEL cannot be served. The message is one paragraph for the person who typed it: cause and remedy."""


class CommandError(Exception):
    """A command cannot do what was asked. The message is one paragraph for the person who typed it."""
