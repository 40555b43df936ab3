"""`octavo pull`: brings a model onto this machine, without serving it."""

import argparse
from collections.abc import Mapping
from typing import Any

from octavo.commands.flags import EPILOG, add_model, read_config
from octavo.models.resolve import resolve_model_of
from octavo.protocol.process import begin_log
from octavo.protocol.settings.flags import add_flags


def describe(parser: argparse.ArgumentParser) -> None:
    parser.description = "Resolve, download and convert a model without serving it; prints its directory."
    parser.epilog = EPILOG
    parser.set_defaults(run=run)
    add_model(parser)
    add_flags(parser, ("use_modelscope", "trust_remote_code", "dtype", "quantization", "log_level"))


def run(flags: Mapping[str, Any]) -> int:
    config = read_config(flags)
    begin_log("octavo", config)
    print(resolve_model_of(config).directory)
    return 0
