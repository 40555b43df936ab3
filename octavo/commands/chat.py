"""`octavo chat`: a conversation with a model of a running server, or of a server for this command alone."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from octavo.commands.flags import add_engine_flags, add_model, read_quiet_config, typed_settings
from octavo.errors import CommandError
from octavo.protocol.config import ConfigError
from octavo.protocol.process import begin_log, paragraph
from octavo.python.settings import refuse_launcher_fields
from octavo.terminal.api_client import ApiClient
from octavo.terminal.own_server import own_server
from octavo.terminal.sampling_flags import add_sampling_flags, sampling_values
from octavo.terminal.screen import Terminal, piped_lines, typed_lines

DEFAULT_URL = "http://127.0.0.1:8000/v1"
MODEL_HELP = (
    "start a server of this model for this command alone: a directory, a Hugging Face id or a .gguf file; without it, a"
    " running server answers"
)
# The terminal shows only the text of one answer at a time; --seed belongs to the sampling.
NOT_IN_A_TERMINAL = ("n", "logprobs", "prompt_logprobs")


def describe(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo chat [MODEL] [--url URL] [--flag VALUE ...]"
    parser.description = (
        "Talk to a model. Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D ends it. Lines of a pipe are"
        " messages of one conversation."
    )
    parser.set_defaults(run=run)
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told before the first message")
    add_terminal_flags(parser)


def run(flags: Mapping[str, Any]) -> int:
    with connected(flags) as terminal:
        terminal.chat(flags["system_prompt"], lines(flags))
    return 0


def add_terminal_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for talking to a model in a terminal to `parser`."""
    add_model(parser, MODEL_HELP)
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="ask this, print the answer and end")
    parser.add_argument("--stats", action="store_true", help="print tokens and times after each answer, on stderr")
    server = parser.add_argument_group("a running server")
    server.add_argument("--url", help=f"its API (default: {DEFAULT_URL})")
    server.add_argument(
        "--api-key", dest="key", metavar="KEY", help="its API key (default: the first of OCTAVO_API_KEY)"
    )
    parser.add_argument("--model-name", metavar="NAME", help="which of its models to ask (default: the first)")
    add_sampling_flags(parser, *NOT_IN_A_TERMINAL)
    add_engine_flags(parser, "seed")


@contextmanager
def connected(flags: Mapping[str, Any]) -> Iterator[Terminal]:
    """Yield a Terminal for the server that `flags` choose. Raises CommandError, LaunchError or ConfigError."""
    sampling = sampling_values(flags)
    interactive = flags["quick"] is None and sys.stdin.isatty()
    with _server(flags) as (url, key), closing(ApiClient(url, key)) as client:
        model = flags["model_name"] or _first(client)
        if interactive:
            print(f"{paragraph(model)} at {url}: Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
        yield Terminal(client, model, sampling, stats=flags["stats"], interactive=interactive)


def lines(flags: Mapping[str, Any]) -> Iterator[str]:
    """Return the messages to answer: the one of --quick, typed lines, or the lines of a pipe."""
    if flags["quick"] is not None:
        return iter([flags["quick"]])
    return typed_lines() if sys.stdin.isatty() else piped_lines()


@contextmanager
def _server(flags: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield the URL and key of a server: of a new one for a typed MODEL, or else of a running one."""
    settings = typed_settings(flags)
    settings.pop("seed", None)
    if "model" not in settings:
        if settings:
            flag = "--" + next(iter(settings)).replace("_", "-")
            raise ConfigError(f"{flag} is for a server of this command's own: name a MODEL")
        config = read_quiet_config({})
        begin_log("octavo", config)
        yield flags["url"] or DEFAULT_URL, flags["key"] or next(iter(config.api_key), None)
        return
    if flags["url"] or flags["key"]:
        flag = "--url" if flags["url"] else "--api-key"
        raise ConfigError(f"{flag} is for a running server, and MODEL starts one for this command alone: give one")
    config = read_quiet_config(settings)
    refuse_launcher_fields(config, "this command")
    begin_log("octavo", config)
    print(f"Starting {config.model}", file=sys.stderr)
    with own_server(config) as (url, key):
        yield url, key


def _first(client: ApiClient) -> str:
    if names := client.model_names():
        return names[0]
    raise CommandError(f"the server at {client.url} has no model")
