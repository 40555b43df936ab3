"""Generating for a file of prompts: `prompts` reads it, `results` has what is done, `run` does the rest in order."""
