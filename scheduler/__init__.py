"""One single-threaded process a model replica: continuous batching, block accounting. Never torch, never text."""
