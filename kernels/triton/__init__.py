"""The backend for GPUs, in Triton."""
