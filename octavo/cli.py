"""The `octavo` command: reads what was typed and calls the one function that does it."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from octavo import __version__
from octavo.errors import ModelError
from octavo.launcher import ChildRefusedError, LaunchError, listening_port, serve
from protocol.config import FIELDS, Config, ConfigError, add_flags, load_config
from protocol.process import OURS, ArgumentParser, configure_logging, paragraph

DESCRIPTION = """Octavo serves large language models over an OpenAI-compatible API.

  octavo serve                           serve the demo model on http://127.0.0.1:8000
  octavo serve Qwen/Qwen3-0.6B           serve a model of the Hugging Face hub
  octavo serve ./my-model --port 9000    serve a directory
  octavo pull Qwen/Qwen3-0.6B            download and convert, without serving
"""
MODEL_HELP = "a directory, a Hugging Face id or a .gguf file; without it, the demo model SmolLM2-135M-Instruct"
DRY_RUN_HELP = (
    "serve nothing: print, from config.json alone (or a .gguf file's header), the memory of weights and KV cache, what"
    " fits here, and how many devices it takes; the exit status is 0 if it fits this machine, else 1"
)
EPILOG = "Each flag can also be set as a variable: --max-num-seqs 8 is OCTAVO_MAX_NUM_SEQS=8. A flag wins."
FLAG_GROUPS = {
    "server": ("host", "port", "api_key", "served_model_name", "peer_timeout_s", "log_level"),
    "model": (
        "use_modelscope",
        "trust_remote_code",
        "load_format",
        "quantization",
        "dtype",
        "max_model_len",
        "generation_config",
        "seed",
    ),
    "KV cache and batching": (
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "block_size",
        "enable_prefix_caching",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_queued_reqs",
        "async_scheduling",
    ),
    "machine": ("attention_backend", "enforce_eager", "tensor_parallel_size", "num_threads"),
}
NEEDED_PACKAGES = (
    "huggingface_hub",
    "numba",
    "safetensors",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
)
# The launcher chooses these itself: each server has sockets of its own, and ranks that meet there.
LAUNCHER_FIELDS = ("frontend_address", "backend_address", "schedulers", "rank", "distributed_address")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 it could not be done, 2 it was asked for wrongly."""
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    flags = vars(parser.parse_args(argv))
    command = flags.pop("command")
    try:
        return int(command(_config(flags)))
    except ConfigError as error:
        parser.error(str(error))
    except ChildRefusedError:
        return 1
    except (LaunchError, ModelError) as error:
        print(f"octavo: {paragraph(error)}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OURS:
            raise
        print(f"octavo: {paragraph(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="octavo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_pull(commands)
    return parser


# What a base installation lacks is imported by the commands that need it.


def run_serve(config: Config) -> int:
    from octavo.resolve import resolve_model

    require_packages()
    _refuse_launcher_fields(config)
    configure_logging("octavo", config.log_level)
    listening_port(config)
    resolved = resolve_model(
        config.model or None,
        trust_remote_code=config.trust_remote_code,
        needs_weights=config.load_format != "dummy",
        use_modelscope=config.use_modelscope,
    )
    serve(config, resolved.directory, resolved.served_name)
    return 0


def run_dry(config: Config) -> int:
    from octavo.dry_run import dry_run

    configure_logging("octavo", config.log_level)
    return dry_run(config)


def run_pull(config: Config) -> int:
    from octavo.resolve import pull

    configure_logging("octavo", config.log_level)
    print(pull(config.model or None, trust_remote_code=config.trust_remote_code, use_modelscope=config.use_modelscope))
    return 0


def require_packages() -> None:
    """Raise ModuleNotFoundError for what gateway or executor lack, before they are started."""
    for name in NEEDED_PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _add_serve(commands: "argparse._SubParsersAction[ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        usage="octavo serve [MODEL] [--flag VALUE ...]",
        help="serve a model",
        description="Serve a model over HTTP until Ctrl-C.",
        epilog=EPILOG,
    )
    parser.set_defaults(command=run_serve)
    _add_model(parser)
    parser.add_argument("--dry-run", action="store_const", dest="command", const=run_dry, help=DRY_RUN_HELP)
    for title, names in FLAG_GROUPS.items():
        add_flags(parser.add_argument_group(title), names)


def _add_pull(commands: "argparse._SubParsersAction[ArgumentParser]") -> None:
    description = "Resolve, download and convert a model without serving it; prints its directory."
    parser = commands.add_parser("pull", help="download and convert a model", description=description, epilog=EPILOG)
    parser.set_defaults(command=run_pull)
    _add_model(parser)
    add_flags(parser, ("use_modelscope", "trust_remote_code", "log_level"))


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=MODEL_HELP)
    parser.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help="the same, as a flag")


def _config(flags: dict[str, object]) -> Config:
    """Return the Config of the environment and `flags`. Raises ConfigError."""
    typed = flags.pop("positional_model", None)
    if typed is not None and flags.setdefault("model", typed) != typed:
        raise ConfigError(f"the model is given twice: {typed} and --model {flags['model']}")
    return load_config(os.environ, flags)


def _refuse_launcher_fields(config: Config) -> None:
    for name in LAUNCHER_FIELDS:
        if getattr(config, name) != FIELDS[name].default:
            variable = f"OCTAVO_{name.upper()}"
            raise ConfigError(f"{variable} is for processes started one by one; `octavo serve` chooses its own")
