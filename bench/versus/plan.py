"""Which servers are compared, and under which loads."""

import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.bench.serve.lengths import parse_lengths
from octavo.bench.serve.work import Work
from octavo.errors import CommandError

PORT = "{port}"
# The rows of docs/performance.md, grouped by the format of the weights that the compared servers share. Each row has a
# seed of its own, and so other words: no row finds its prompts in the cache of a row before it.
ROWS = {
    "bf16": (
        Work(num_prompts=8, max_concurrency=1, input_len="64", output_len="128", seed=1),
        Work(num_prompts=32, max_concurrency=8, input_len="128", output_len="64", seed=2),
        Work(num_prompts=64, max_concurrency=32, input_len="128", output_len="64", seed=3),
        Work(num_prompts=32, max_concurrency=8, prefix_len=504, input_len="8", output_len="64", seed=4),
    ),
    "4-bit": (
        Work(num_prompts=8, max_concurrency=1, input_len="64", output_len="128", seed=5),
        Work(num_prompts=32, max_concurrency=8, input_len="128", output_len="64", seed=6),
    ),
    "streams": (Work(num_prompts=32, max_concurrency=32, input_len="128", output_len="64", seed=7),),
}
TYPED_ROWS = ("bf16",)  # of servers that are typed, unless others are asked for
NAME = re.compile(r"\w[\w ,.-]*")
TYPED_WORK = re.compile(
    r"(?P<num>\d+)/(?P<under_way>\d+)/(?:(?P<prefix>\d+) shared\+)?(?P<input>[^/]+)/(?P<output>[^/]+)"
)


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


def typed_plan(servers: Sequence[str], rows: Sequence[str]) -> Plan:
    """Return the plan of servers that were typed as NAME=COMMAND, all under the same `rows`. Raises CommandError."""
    plans: dict[str, ServerPlan] = {}
    for typed in servers:
        name, _, command = typed.partition("=")
        if name in plans:
            raise CommandError(f"two servers are called {name!r}")
        plans[name] = ServerPlan(command, rows=tuple(rows or TYPED_ROWS))
        _check(name, plans[name])
    return Plan(plans)


def typed_work(text: str, seed: int) -> Work:
    """Return the closed loop that `text` describes as `Work.name` does. Raises CommandError."""
    found = TYPED_WORK.fullmatch(text)
    try:
        if found is None or 0 in (int(found["num"]), int(found["under_way"])):
            raise ValueError("it is not REQUESTS/CONCURRENCY/PROMPT/OUTPUT")
        return Work(
            num_prompts=int(found["num"]),
            max_concurrency=int(found["under_way"]),
            prefix_len=int(found["prefix"] or 0),
            input_len=parse_lengths(found["input"]).text,
            output_len=parse_lengths(found["output"]).text,
            seed=seed,
        )
    except ValueError as error:
        raise CommandError(f"--work {text!r}: {error}; such as 32/8/128/64 or '32/8/504 shared+8/64'") from None


def _check(name: str, server: ServerPlan) -> None:
    if not NAME.fullmatch(name):
        raise CommandError(f"{name!r} is no name for a server: letters, digits, blanks, commas, '.', '_' and '-' are")
    if unknown := [row for row in server.rows if row not in ROWS]:
        raise CommandError(f"server {name!r} has rows {unknown[0]!r}; there are {', '.join(ROWS)}")
    try:
        arguments = shlex.split(server.command)
    except ValueError as error:
        raise CommandError(f"the command of server {name!r} cannot be read: {error}") from None
    if not any(PORT in argument for argument in arguments):
        raise CommandError(f"the command of server {name!r} has no {PORT} for where to listen")
