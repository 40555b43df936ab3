"""Generates for a file of prompts: `prompts` reads it, `results` keeps finished results, `run` generates the others."""
