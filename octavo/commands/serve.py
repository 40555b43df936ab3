"""`octavo serve`: serves a model over HTTP until Ctrl-C."""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from octavo.commands.flags import EPILOG, FLAG_GROUPS, add_model, read_config
from octavo.models.resolve import resolve_model_of
from octavo.protocol.config import Config
from octavo.protocol.lifeline import LIFELINE_FLAG
from octavo.protocol.process import begin_log, inherited_heart
from octavo.protocol.settings.flags import add_flags
from octavo.protocol.settings.loading import refuse_foreign_keys
from octavo.python.settings import refuse_launcher_fields
from octavo.serving.dry_run import dry_run
from octavo.serving.launcher import serve
from octavo.serving.listening import with_ports

DRY_RUN_HELP = (
    "serve nothing: print, from config.json alone (or a .gguf file's header), the memory of weights and KV cache, what"
    " fits here, and how many devices it takes; the exit status is 0 if it fits this machine, else 1"
)


def describe(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo serve [MODEL] [--flag VALUE ...]"
    parser.description = "Serve a model over HTTP until Ctrl-C."
    parser.epilog = EPILOG
    parser.set_defaults(run=run)
    add_model(parser)
    parser.add_argument("--dry-run", action="store_const", dest="run", const=run_dry, help=DRY_RUN_HELP)
    parser.add_argument(LIFELINE_FLAG, type=int, default=None, help=argparse.SUPPRESS)
    for title, names in FLAG_GROUPS.items():
        add_flags(parser.add_argument_group(title), names)


def run(flags: Mapping[str, Any]) -> int:
    config = _begin(flags)
    inherited_heart(flags["lifeline_fd"]).end_with_parent()
    with_ports(config)
    resolved = resolve_model_of(config)
    serve(config, resolved.directory, resolved.served_name)
    return 0


def run_dry(flags: Mapping[str, Any]) -> int:
    return dry_run(_begin(flags))


def _begin(flags: Mapping[str, Any]) -> Config:
    """Return the Config of a server, and set its log up. Raises ConfigError for settings that no server can have."""
    config = read_config(flags)
    refuse_launcher_fields(config, "`octavo serve`")
    refuse_foreign_keys(config, os.environ)
    begin_log("octavo", config, has_parent=flags["lifeline_fd"] is not None)
    return config
