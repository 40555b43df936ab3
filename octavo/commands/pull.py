"""`octavo pull`: a model onto this machine, without serving it."""

import argparse
from collections.abc import Mapping
from typing import Any

from octavo.commands.flags import EPILOG, add_model, read_config
from octavo.resolve import pull
from protocol.config import add_flags
from protocol.process import configure_logging


def describe(parser: argparse.ArgumentParser) -> None:
    parser.description = "Resolve, download and convert a model without serving it; prints its directory."
    parser.epilog = EPILOG
    parser.set_defaults(run=run)
    add_model(parser)
    add_flags(parser, ("use_modelscope", "trust_remote_code", "log_level"))


def run(flags: Mapping[str, Any]) -> int:
    config = read_config(flags)
    configure_logging("octavo", config.log_level)
    print(pull(config.model or None, trust_remote_code=config.trust_remote_code, use_modelscope=config.use_modelscope))
    return 0
