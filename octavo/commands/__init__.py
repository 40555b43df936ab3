"""The commands, one module each: `describe` gives a parser its flags and sets `run`, which does the work.

`run` takes the flags by name and returns the exit status. Only the module of the command that was typed is imported.
"""
