"""`octavo generate`: a file of prompts in, a file of results out, without a server."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.batch.prompts import SUFFIXES
from octavo.batch.results import open_results
from octavo.commands.flags import add_engine_flags, add_model, typed_settings
from octavo.sampling_flags import add_sampling_flags, sampling_values
from protocol.config import FIELDS, Config, ConfigError

# Of the settings, those that change results: they are remembered beside them.
PARAMETERS = ("model", "load_format", "quantization", "dtype", "kv_cache_dtype", "generation_config", "max_model_len")
ONLY_IN_RECORDS = ("logprobs", "prompt_logprobs")


def describe(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo generate [MODEL] --input-path FILE --output-path FILE [--flag VALUE ...]"
    parser.description = (
        "Generate for every prompt of a file. A .txt file has a prompt a line, newlines in it written as \\n; a .jsonl"
        ' file {"prompt": ...} or {"messages": ...} a line, perhaps with an "id". Interrupted and run again, it goes on'
        " where it was."
    )
    parser.set_defaults(run=run)
    add_model(parser)
    parser.add_argument("--input-path", type=_path, required=True, metavar="FILE", help="the prompts, .txt or .jsonl")
    parser.add_argument(
        "--output-path",
        type=_path,
        required=True,
        metavar="FILE",
        help="where results go, in the order of the prompts: a line of text each (.txt), or a JSON object with all that"
        " is known of it (.jsonl)",
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever --output-path holds")
    add_sampling_flags(parser)
    add_engine_flags(parser, "seed")
