"""`octavo generate`: reads a file of prompts and writes a file of results, without a server."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.batch.answers import generate_batch
from octavo.batch.prompts import SUFFIXES
from octavo.batch.results import open_results
from octavo.batch.run import Batch
from octavo.commands.flags import add_engine_flags, add_model, read_quiet_config, typed_settings
from octavo.errors import CommandError
from octavo.models.demo import DEMO_NAME
from octavo.models.resolve import from_root, one_name
from octavo.protocol.config import FIELDS, Config, ConfigError
from octavo.protocol.process import begin_log
from octavo.python.sampling_params import SamplingParams
from octavo.python.settings import refuse_launcher_fields
from octavo.terminal.sampling_flags import add_sampling_flags, sampling_values

# The settings that change results: they are written beside the results.
REMEMBERED = (
    "use_modelscope",
    "load_format",
    "quantization",
    "dtype",
    "kv_cache_dtype",
    "generation_config",
    "chat_template",
    "max_model_len",
)
PATHS = ("generation_config", "chat_template")  # of these settings, the ones that may be paths
ONLY_IN_RECORDS = ("logprobs", "prompt_logprobs")


def describe(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo generate [MODEL] --input-path FILE --output-path FILE [--flag VALUE ...]"
    parser.description = (
        "Generate for every prompt of a file. A line of a .txt file is a prompt, with newlines as \\n; a line of a"
        ' .jsonl file is {"prompt": ...} or {"messages": ...}, with an optional "id". If interrupted, run it again: it'
        " continues."
    )
    parser.set_defaults(run=run)
    add_model(parser)
    parser.add_argument("--input-path", type=_path, required=True, metavar="FILE", help="the prompts, .txt or .jsonl")
    parser.add_argument(
        "--output-path",
        type=_path,
        required=True,
        metavar="FILE",
        help="the file of results, in the order of the prompts: a line of text each (.txt), or a JSON object with all"
        " details (.jsonl)",
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew, whatever --output-path holds")
    add_sampling_flags(parser)
    add_engine_flags(parser, "seed")


def run(flags: Mapping[str, Any]) -> int:
    sampling, config = sampling_values(flags), _config(flags)
    source, target = flags["input_path"], flags["output_path"]
    _check_paths(source, target, sampling)
    params = _params(sampling)
    begin_log("octavo", config)
    with open_results(target, overwrite=flags["overwrite"]) as results:
        batch = Batch(source, results, _parameters(config, sampling))
        if batch.num_left:
            _generate(config, params, batch)
        print(f"{batch.num_done} results are in {target}{_failures(batch, target)}", file=sys.stderr)
    return 1 if batch.num_failed else 0


def _config(flags: Mapping[str, Any]) -> Config:
    """Return the settings of the engine, without --seed, which belongs to the sampling."""
    settings = {name: value for name, value in typed_settings(flags).items() if name != "seed"}
    config = read_quiet_config(settings)
    refuse_launcher_fields(config, "`octavo generate`")
    return config


def _params(sampling: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**sampling)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_paths(source: Path, target: Path, sampling: Mapping[str, Any]) -> None:
    try:
        if not source.is_file():
            raise CommandError(f"--input-path {source} is not a regular file")
        if target.exists() and target.samefile(source):
            raise ConfigError("--output-path is the same file as --input-path")
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be looked at: {error.strerror}") from None
    if target.suffix == ".txt":
        for name in (*ONLY_IN_RECORDS, *(("n",) if sampling.get("n", 1) > 1 else ())):
            if name in sampling:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} gives more than a line of text can hold: let --output-path end in .jsonl")


def _parameters(config: Config, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that results depend on beside the prompts: the model and the settings."""
    settings = {name: getattr(config, name) for name in REMEMBERED}
    changed = {name: value for name, value in settings.items() if value != FIELDS[name].default}
    changed |= {name: from_root(changed[name]) for name in PATHS if name in changed}
    return {"model": one_name(config.model), **changed, **sampling}


def _generate(config: Config, params: SamplingParams, batch: Batch) -> None:
    print(f"Starting {config.model or DEMO_NAME}", file=sys.stderr)
    try:
        generate_batch(config, params, batch)
    except KeyboardInterrupt:
        print(f"\n{batch.num_done} of {batch.num_prompts} are done; run again, it goes on from there", file=sys.stderr)
        raise


def _failures(batch: Batch, target: Path) -> str:
    if not batch.num_failed:
        return ""
    instead = "an empty line" if target.suffix == ".txt" else "an error"
    return f"; {batch.num_failed} of them have {instead} instead of an answer"


def _path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text} has to end in {' or '.join(SUFFIXES)}, which says what a line is")
    return path
