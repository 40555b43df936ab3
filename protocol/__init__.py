"""What the processes share: messages, sampling parameters, configuration, sockets. Imports msgspec and pyzmq only."""
