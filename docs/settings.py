"""Print docs/settings.md, made from the fields of `Config`: `python docs/settings.py > docs/settings.md`."""

import re
import typing
from collections.abc import Iterator, Sequence
from typing import Literal

from octavo.commands.flags import FLAG_GROUPS
from octavo.protocol.config import FIELDS, runtime_directory
from octavo.protocol.settings.flags import SHORT_FLAGS, describe, flag_name
from octavo.protocol.settings.values import base_type, range_of

INTRODUCTION = """\
# Settings

`make docs` writes this page from the source, and a test compares the two.

Each setting is a flag of `octavo serve`, a keyword of `LLM` and `AsyncLLM`, and a variable: `--max-num-seqs 8` is
`LLM(max_num_seqs=8)` and `OCTAVO_MAX_NUM_SEQS=8`. A flag or keyword wins over the variable. The names are vLLM's where
the meaning is the same.

* MODEL comes first (`octavo serve MODEL`), or as `--model MODEL`.
* Numbers may have a unit: `8k` is 8,000, `8K` and `8Ki` are 8,192, `2GiB` is 2,147,483,648.
* A setting that is on or off is `--flag` or `--no-flag`, and `True` or `False` in its variable.
* Several values are separated by commas in a variable, or they are a JSON list.
* An unknown flag or variable is an error. The error says what was probably meant, or what to do instead of a flag that
  only vLLM has.
* What a machine lacks is refused, not replaced: `--attention-backend triton` without a GPU ends with
  `attention_backend 'triton' is not available on this machine: it needs a GPU, …; it has: auto, cpu, reference`.

`octavo serve --dry-run` serves nothing. It prints the memory of weights and KV cache, what fits here, and how many
devices the model takes. It reads config.json alone, or the header of a .gguf file. The exit status is 0 if the model
fits this machine, else 1.

[metrics.md](metrics.md) says more of `--metrics-port`, [api.md](api.md) of keys and origins, and
[operate.md](operate.md) of links between machines.
"""
SINGLE_PROCESSES = "processes on their own"
ABOUT_SINGLE_PROCESSES = """
`octavo serve` and `LLM` choose these settings themselves. They are flags of `python -m octavo.gateway`, `scheduler` and
`executor` (each takes the flags that it reads), and variables. Where XDG_RUNTIME_DIR is not set, the sockets lie in
`/tmp/octavo-UID`.
"""
COLUMNS = "\n| flag | values | default | meaning |\n|---|---|---|---|"


def page() -> str:
    """Return the whole page."""
    grouped = {name for names in FLAG_GROUPS.values() for name in names} | {"model"}
    single = [name for name in FIELDS if name not in grouped]
    parts = [part for title, names in FLAG_GROUPS.items() for part in _section(title, names)]
    return "\n".join([INTRODUCTION, *parts, *_section(SINGLE_PROCESSES, single, ABOUT_SINGLE_PROCESSES)])


def _section(title: str, names: Sequence[str], about: str = "") -> Iterator[str]:
    """Yield the lines of one group of settings."""
    yield f"## {title[0].upper()}{title[1:]}"
    if about:
        yield about.rstrip("\n")
    yield COLUMNS
    yield from map(_row, names)
    yield ""


def _row(name: str) -> str:
    """Return one row of a table."""
    flags = ", ".join(f"`{flag}`" for flag in (flag_name(name), *SHORT_FLAGS.get(name, ())))
    shown = describe(name).replace(str(runtime_directory()), "$XDG_RUNTIME_DIR/octavo")
    described = re.fullmatch(r"(?P<meaning>.*?)(?: \(default: (?P<default>.*)\))?", shown)
    assert described
    return f"| {flags} | {_values(name)} | {described['default'] or 'none'} | {described['meaning']} |"


def _values(name: str) -> str:
    """Return what the setting may be."""
    base = base_type(FIELDS[name].type)
    if typing.get_origin(base) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(base))
    if typing.get_origin(base) is tuple:
        return "texts"
    kind = {bool: "on or off", int: "a whole number", float: "a number", str: "a text"}[base]
    return kind + range_of(FIELDS[name].type)


if __name__ == "__main__":
    print(page().rstrip("\n"))
