"""What the processes share: messages, sampling parameters, configuration, sockets. Imports msgspec and pyzmq only."""

__version__ = "0.1.0"
