"""Doors with the names that vLLM's users know."""
