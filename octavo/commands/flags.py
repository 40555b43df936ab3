"""The flags that several commands share: MODEL, and the settings of a server."""

import argparse
import os
import typing
from collections.abc import Mapping
from typing import Any

from octavo.models.demo import DEMO_NAME
from octavo.protocol.config import FIELDS, Config, ConfigError
from octavo.protocol.settings.flags import SEVERAL_VALUES, add_flags, flag_name
from octavo.protocol.settings.loading import load_config
from octavo.protocol.settings.values import base_type
from octavo.python.settings import HTTP_FIELDS

MODEL_HELP = (
    "a directory, a Hugging Face id or a .gguf file; without it, the demo model in 4 bits, which its name,"
    f" {DEMO_NAME}, means too"
)
EPILOG = "Each flag can also be set as a variable: --max-num-seqs 8 is OCTAVO_MAX_NUM_SEQS=8. A flag wins."
FLAG_GROUPS = {
    "server": (
        *HTTP_FIELDS,
        "max_held_body_bytes",
        "served_model_name",
        "peer_timeout_s",
        "hang_timeout_s",
        "enable_prompt_tokens_details",
        "log_level",
    ),
    "model": (
        "use_modelscope",
        "trust_remote_code",
        "load_format",
        "pooling",
        "quantization",
        "dtype",
        "max_model_len",
        "chat_template",
        "tool_call_parser",
        "enable_auto_tool_choice",
        "reasoning_parser",
        "max_logprobs",
        "generation_config",
        "seed",
    ),
    "KV cache and batching": (
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "block_size",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "max_num_seqs",
        "max_num_batched_tokens",
        "target_step_s",
        "max_num_queued_reqs",
        "async_scheduling",
    ),
    "machine": ("attention_backend", "enforce_eager", "tensor_parallel_size", "num_threads"),
}


def add_model(parser: argparse.ArgumentParser, shown: str = MODEL_HELP) -> None:
    """Add the argument MODEL, which may also be typed as --model, to `parser`."""
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=shown)
    parser.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help="the same, as a flag")


def add_engine_flags(parser: argparse.ArgumentParser, *without: str) -> None:
    """Add the flags of scheduler and executor to `parser`, except those of the fields in `without`."""
    for title, names in FLAG_GROUPS.items():
        if title != "server":
            add_flags(parser.add_argument_group(title), [name for name in names if name not in without])
    levels = "|".join(typing.get_args(base_type(FIELDS["log_level"].type)))
    parser.add_argument(
        "--log-level", default=argparse.SUPPRESS, metavar=levels, help="least level to log (default: warning)"
    )


def read_quiet_config(settings: Mapping[str, Any]) -> Config:
    """Return the Config of the environment and `settings` for a command that logs only warnings."""
    return load_config(os.environ, {"log_level": os.environ.get("OCTAVO_LOG_LEVEL", "warning"), **settings})


def typed_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `flags` that are fields of Config, also MODEL. Raises ConfigError for two MODELs."""
    settings = {name: value for name, value in flags.items() if name in FIELDS}
    typed = flags.get("positional_model")
    if typed is not None and settings.setdefault("model", typed) != typed:
        raise ConfigError(f"the model is given twice: {typed} and --model {settings['model']}")
    _refuse_swallowed_model(settings)
    return settings


def _refuse_swallowed_model(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if a flag with several values may have taken MODEL as one of them."""
    if settings.get("model") or os.environ.get("OCTAVO_MODEL"):
        return
    for name in SEVERAL_VALUES:
        if len(values := settings.get(name, ())) > 1:
            *others, last = values
            raise ConfigError(
                f"{flag_name(name)} takes all of {' '.join(values)}, and no MODEL is left: put MODEL first, as in"
                f" {last} {flag_name(name)} {' '.join(others)} (the demo's name as MODEL is {DEMO_NAME})"
            )


def read_config(flags: Mapping[str, Any]) -> Config:
    """Return the Config of the environment and `flags`. Raises ConfigError."""
    return load_config(os.environ, typed_settings(flags))
