"""Modules with the names that users of vLLM know."""
