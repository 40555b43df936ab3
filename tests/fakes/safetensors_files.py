"""The least that is a safetensors file."""

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
