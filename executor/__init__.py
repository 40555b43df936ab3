"""One process a GPU, or one for the CPU: weights, model and sampling. It holds tensors and soft state, never text."""
