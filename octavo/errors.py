"""The one error that model resolution raises."""


class ModelError(ValueError):
    """MODEL cannot be served. The message is one paragraph for the person who typed it: cause and remedy."""
