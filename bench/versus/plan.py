"""Which servers are compared, by a person's file, and under which loads."""

import shlex
import tomllib
from pathlib import Path

import msgspec

from bench.serve.work import Work
from octavo.errors import CommandError

PORT = "{port}"
# The README's rows: requests, concurrency, prompt and output tokens; by what servers have to have in common.
ROWS = {
    "bf16": (
        Work(num_prompts=8, max_concurrency=1, input_len="64", output_len="128"),
        Work(num_prompts=32, max_concurrency=8, input_len="128", output_len="64"),
        Work(num_prompts=64, max_concurrency=32, input_len="128", output_len="64"),
        Work(num_prompts=32, max_concurrency=8, prefix_len=504, input_len="8", output_len="64"),
    ),
    "4-bit": (
        Work(num_prompts=8, max_concurrency=1, input_len="64", output_len="128"),
        Work(num_prompts=32, max_concurrency=8, input_len="128", output_len="64"),
    ),
    "streams": (Work(num_prompts=32, max_concurrency=32, input_len="128", output_len="64"),),
}


class ServerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a server is started, without a shell: {port} in `command` becomes a free one; `rows` names groups of ROWS."""

    command: str
    rows: tuple[str, ...] = tuple(ROWS)
    environ: dict[str, str] = {}
    start_timeout_s: float = 300.0

    def arguments(self, port: int) -> list[str]:
        return [argument.replace(PORT, str(port)) for argument in shlex.split(self.command)]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    servers: dict[str, ServerPlan]


def read_plan(path: Path) -> Plan:
    """Return the plan in a TOML file: [servers.NAME] tables. Raises CommandError."""
    try:
        plan = msgspec.convert(tomllib.loads(path.read_text()), Plan)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise CommandError(f"{path} is no plan of servers: {error}") from None
    for name, server in plan.servers.items():
        _check(name, server)
    return plan


def _check(name: str, server: ServerPlan) -> None:
    if unknown := [row for row in server.rows if row not in ROWS]:
        raise CommandError(f"server {name!r} has rows {unknown[0]!r}; there are {', '.join(ROWS)}")
    try:
        arguments = shlex.split(server.command)
    except ValueError as error:
        raise CommandError(f"the command of server {name!r} cannot be read: {error}") from None
    if not any(PORT in argument for argument in arguments):
        raise CommandError(f"the command of server {name!r} has no {PORT} for where to listen")
