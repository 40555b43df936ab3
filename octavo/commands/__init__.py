"""The commands, one module each: `describe` adds the flags to a parser and sets `run`, which does the work.

`run` takes the flags by name and returns the exit status. Only the typed command's module is imported.
"""
