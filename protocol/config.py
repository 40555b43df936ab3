"""Everything a person may set, written once: environment, flags and help all come from the fields of `Config`."""

import argparse
import difflib
import json
import os
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.foreign import PREFIX, foreign_keys, is_platforms
from protocol.suggestions import setting_suggestion


class ConfigError(ValueError):
    """A setting that is unknown or cannot be: names it, and the nearest that exists."""


# Kinds of text; their titles say what is wrong with another.
NonEmpty = Annotated[str, Meta(min_length=1, title="a text that is not empty")]
Address = Annotated[
    str,
    Meta(
        pattern=r"^((ipc|inproc)://.+|tcp://.+:(\d+|\*))$",
        title="an address such as ipc:///run/octavo/frontend or tcp://127.0.0.1:5555",
    ),
]

ORIGIN_PATTERN = r"^(\*|[a-z][a-z0-9+.-]*://[^/,\sA-Z]+)$"
Origin = Annotated[
    str,
    Meta(
        pattern=ORIGIN_PATTERN,
        title="an origin as browsers send it, such as https://chat.example (small letters, no slash at its end), or *",
    ),
]


def runtime_directory() -> Path:
    """Return where the sockets of processes that were started by hand lie: private to this user."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base, "octavo") if base else Path(f"/tmp/octavo-{os.getuid()}")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each process reads it once; nothing changes it afterwards. What is found out at start travels in messages."""

    model: Annotated[
        str,
        Meta(
            description="directory of the model; `octavo serve` also takes a Hugging Face id or a .gguf file, and"
            " serves the demo model without any"
        ),
    ] = ""
    use_modelscope: Annotated[
        bool, Meta(description="fetch a model that is named by its id from ModelScope (needs: pip install modelscope)")
    ] = False
    served_model_name: Annotated[
        tuple[NonEmpty, ...], Meta(description="names that requests may use for the model (default: MODEL as typed)")
    ] = ()
    host: Annotated[str, Meta(description="address on which the gateway listens; :: is all, of IPv4 too")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port on which the gateway listens; 0 takes a free one")] = (
        8000
    )
    uds: Annotated[
        str,
        Meta(
            description="path of a Unix socket on which the gateway listens, in place of host and port (default: none)"
        ),
    ] = ""
    metrics_port: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=65535,
                description="another port on which the gateway shows its metrics and nothing else, to anyone without"
                " a key; 0 takes a free one (default: none)",
            ),
        ]
        | None
    ) = None
    api_key: Annotated[
        tuple[NonEmpty, ...],
        Meta(description="a key that clients must send as bearer token; may be given several times"),
    ] = ()
    max_held_body_bytes: Annotated[
        int,
        Meta(
            ge=1,
            description="size of all request bodies that a gateway holds at once, such as 1GiB; beyond, they are"
            " refused with 429 (their text takes about four times as much)",
        ),
    ] = 256 << 20
    allowed_origins: Annotated[
        tuple[Origin, ...],
        Meta(
            description="origins such as https://chat.example whose web pages may use the server, * for all; those of"
            " other sites are refused"
        ),
    ] = ()
    root_path: Annotated[
        str,
        Meta(
            pattern=r"^(/[^/?#\s]+)*$",
            title="a path such as /llm, without a slash at its end",
            description="path at which a proxy shows the server, which takes it off where the proxy does not",
        ),
    ] = ""
    keep_alive_timeout_s: Annotated[
        int,
        Meta(
            ge=1,
            description="seconds that a connection without a request stays open: longer than a proxy keeps one, so that"
            " the proxy closes it first",
        ),
    ] = 120
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="type of weights and activations; auto is the checkpoint's where the device multiplies it"),
    ] = "auto"
    attention_backend: Annotated[
        NonEmpty,
        Meta(
            description="kernels to compute with: triton (on a GPU), cpu, reference (slow, for comparison), or auto,"
            " the best that this machine has"
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="auto reads the checkpoint; dummy takes random weights")
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "awq", "gptq", "gguf", "fp8", "compressed-tensors", "int8", "int4"],
        Meta(
            description="auto keeps weights as the checkpoint has them; int8 and int4 round plain ones at load; other"
            " names are what the checkpoint has to be"
        ),
    ] = "auto"
    max_model_len: (
        Annotated[int, Meta(ge=1, description="tokens of prompt and output together (default: the model's)")] | None
    ) = None
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences in one step, at most")] = 128
    max_num_batched_tokens: Annotated[int, Meta(ge=1, description="tokens in one step, at most")] = 512
    target_step_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="seconds that a step may take, about, while some sequences generate: prompts of others are then"
            " computed in pieces that small; a step may always take twice as long as it would without prompts, and"
            " longer where many wait",
        ),
    ] = 0.05
    max_num_queued_reqs: Annotated[
        int, Meta(ge=1, description="requests that may wait for a place; beyond, they are refused with 429")
    ] = 1024
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens in one KV block")] = 16
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1, description="share of a GPU's memory for weights and KV cache; without effect on the CPU"),
    ] = 0.9
    kv_cache_memory_bytes: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="size of the KV cache, of each rank, such as 2GiB (default: what gpu-memory-utilization"
                " leaves, on the CPU 40 % of the memory that is free)",
            ),
        ]
        | None
    ) = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="type of the KV cache: auto is that of the activations; fp8 (float8_e4m3fn) takes half the room"
            " of bfloat16, but the cpu kernels do not have it"
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of prompts with the same start")] = (
        True
    )
    async_scheduling: Annotated[bool, Meta(description="plan the next step while one runs")] = True
    enable_chunked_prefill: Annotated[
        bool, Meta(description="compute prompts in pieces; there is no other way here, so it cannot be off")
    ] = True
    enable_prompt_tokens_details: Annotated[
        bool, Meta(description="tell in the usage how many prompt tokens were cached; it cannot be off")
    ] = True
    enforce_eager: Annotated[
        bool,
        Meta(description="launch decode steps kernel by kernel and not as CUDA graphs; without effect on the CPU"),
    ] = False
    seed: (
        Annotated[
            int,
            Meta(
                ge=0, description="makes the seeds drawn for requests without one repeatable (default: from the system)"
            ),
        ]
        | None
    ) = None
    generation_config: Annotated[
        str,
        Meta(
            description="where sampling defaults come from: auto (the model's generation_config.json),"
            " octavo or vllm (none), or a directory"
        ),
    ] = "auto"
    max_logprobs: Annotated[
        int, Meta(ge=0, le=20, description="alternatives beside each token that a request may ask for, at most")
    ] = 20
    chat_template: Annotated[
        str,
        Meta(
            description="a file with a chat template (Jinja), the template itself, or the name of one of the"
            " model's several (default: the model's)"
        ),
    ] = ""
    trust_remote_code: Annotated[bool, Meta(description="allow code that comes with a checkpoint to run")] = False
    num_threads: (
        Annotated[
            int,
            Meta(ge=1, description="CPU threads of the model, of each rank (default: its part of the physical cores)"),
        ]
        | None
    ) = None
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1, description="ranks: executors that share the model's weights, each on a GPU or its part of the cores"
        ),
    ] = 1
    rank: Annotated[int, Meta(ge=0, description="number of this rank; 0 speaks to the scheduler")] = 0
    distributed_address: Annotated[
        str,
        Meta(
            pattern=r"^(file:///.+|tcp://.+:\d+)?$",
            title="an address such as tcp://127.0.0.1:29500",
            description="where the ranks meet: an address of rank 0's machine",
        ),
    ] = ""
    frontend_address: Annotated[Address, Meta(description="ZeroMQ address that the scheduler binds for gateways")] = (
        f"ipc://{runtime_directory()}/frontend"
    )
    backend_address: Annotated[Address, Meta(description="ZeroMQ address that the scheduler binds for executors")] = (
        f"ipc://{runtime_directory()}/backend"
    )
    schedulers: Annotated[
        tuple[Address, ...],
        Meta(description="addresses of the schedulers that a gateway uses (default: frontend-address)"),
    ] = ()
    link_keys_dir: Annotated[
        str,
        Meta(
            description="directory of this process's keys for tcp:// links, one of those that `octavo keys` makes;"
            " ipc:// links need none"
        ),
    ] = ""
    insecure_links: Annotated[
        bool,
        Meta(
            description="allow links without keys to addresses that other machines reach: whoever reaches them too can"
            " use the model, and read along"
        ),
    ] = False
    peer_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds of silence after which a gateway or executor counts as dead")
    ] = 10.0
    hang_timeout_s: Annotated[
        float,
        Meta(
            ge=2,
            description="seconds without a sign of progress after which a process counts as hung: its parent"
            " (`octavo serve` or `octavo supervise`) ends it and starts it again",
        ),
    ] = 60.0
    shutdown_timeout_s: Annotated[
        int, Meta(ge=0, description="seconds that a gateway which is told to stop gives to streams that are open")
    ] = 5
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least level to log")] = "info"

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least"
                f" max_num_seqs ({self.max_num_seqs}): each running sequence needs one token a step"
            )
        if self.metrics_port is not None and self.metrics_port == self.port != 0:
            raise ValueError(f"metrics_port and port are both {self.port}: the metrics need a port of their own")
        if not self.enable_chunked_prefill:
            raise ValueError(
                "enable_chunked_prefill cannot be off: prompts are always computed in chunks, of max_num_batched_tokens"
                " at most"
            )
        if not self.enable_prompt_tokens_details:
            raise ValueError("enable_prompt_tokens_details cannot be off: every usage has them")
        if self.rank >= self.tensor_parallel_size:
            raise ValueError(
                f"rank ({self.rank}) must be below tensor_parallel_size ({self.tensor_parallel_size}):"
                " ranks count from 0"
            )


FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}
# What other servers call a value of ours.
SYNONYMS: dict[tuple[str, str], str] = {
    ("generation_config", "vllm"): "octavo",
    ("dtype", "half"): "float16",
    ("dtype", "float"): "float32",
}
# Children other than the gateway never see these.
SECRETS = ("api_key",)
SEVERAL_VALUES = ("served_model_name",)  # what one flag takes
SHORT_FLAGS = {"tensor_parallel_size": ("-tp",), "shutdown_timeout_s": ("--shutdown-timeout",)}


def load_config(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> Config:
    """Return the Config of the OCTAVO_* variables in `environ`, `overrides` (by field name) winning.

    Strings are read by the field's type: integers may carry a unit (`8k`, `256MiB`), lists are JSON or separated by
    commas. Variables by which a platform describes its services are none of ours. Raises ConfigError for an unknown
    variable or field and for a value that the field cannot take.
    """
    values: dict[str, object] = {}
    for key, text in environ.items():
        if key.startswith(PREFIX) and not is_platforms(key, text):
            values[_field_of(key)] = text
    for name, value in (overrides or {}).items():
        if name not in FIELDS:
            raise ConfigError(f"unknown setting {name}{setting_suggestion(name, FIELDS)}")
        values[name] = value
    converted: dict[str, Any] = {name: _convert(name, value) for name, value in values.items()}
    try:
        return Config(**converted)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def refuse_foreign_keys(config: Config, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if keys are set where another server reads them, and this one would be open to all."""
    if not config.api_key and (names := foreign_keys(environ)):
        raise ConfigError(
            f"{', '.join(names)} has no effect here, so that the server would be open to everybody: set OCTAVO_API_KEY"
            " (or --api-key) instead, or unset it to serve without keys"
        )


def child_environ(config: Config, environ: Mapping[str, str], *, secrets: bool) -> dict[str, str]:
    """Return the environment in which a child process loads the same Config; keys only if `secrets`."""
    kept = {key: value for key, value in environ.items() if not key.startswith(PREFIX)}
    for name, value in msgspec.structs.asdict(config).items():
        if value != FIELDS[name].default and (secrets or name not in SECRETS):
            kept[PREFIX + name.upper()] = json.dumps(value) if isinstance(value, tuple) else str(value)
    return kept


def flag_name(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse._ActionsContainer, names: Iterable[str] = tuple(FIELDS)) -> None:
    """Give `parser` one --flag for each field; only the flags that were given appear in what it parses."""
    for name in names:
        shown, options = _flag_options(name)
        flags = (flag_name(name), *SHORT_FLAGS.get(name, ()))
        parser.add_argument(*flags, default=argparse.SUPPRESS, help=shown, **options)


def describe(name: str) -> str:
    """Return what the field `name` is, with its default."""
    field = FIELDS[name]
    default = f" (default: {_show(field.default)})" if field.default not in (None, "", ()) else ""
    return _description(field.type) + default


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the known name closest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def parse_integer(text: str) -> int:
    """Return the integer of "4096", "8k" (8,000), "8K" or "8Ki" (8,192), "256MiB", "2GB". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgtKMGT])(i)?)?(B|b)?\s*", text)
    if not match:
        raise ValueError(f"{text!r} is not a number of 0 or more, with or without a unit such as k, MiB or GB")
    number, letter, binary, byte = match.groups()
    # As in vLLM, a lone small letter is decimal and a lone capital binary; with a B after it, only "iB" is binary.
    base = 1024 if binary or (letter and letter.isupper() and not byte) else 1000
    value = float(number) * base ** (" kmgt".index(letter.lower()) if letter else 0)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def _field_of(variable: str) -> str:
    """Return the name of the field that OCTAVO_<NAME> sets. Raises ConfigError."""
    known = {PREFIX + name.upper(): name for name in FIELDS}
    if variable not in known:
        raise ConfigError(f"unknown variable {variable}{setting_suggestion(variable, known)}")
    return known[variable]


def _flag_options(name: str) -> tuple[str, dict[str, Any]]:
    field = FIELDS[name]
    base = base_type(field.type)
    shown = describe(name).replace("%", "%%")
    if base is bool:
        return shown, {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(base) is Literal:
        return shown, {"metavar": "|".join(typing.get_args(base))}
    if typing.get_origin(base) is tuple:
        metavar = {"served_model_name": "NAME", "api_key": "KEY", "allowed_origins": "ORIGIN"}.get(name, "ADDRESS")
        # As vLLM has it, one flag takes several names; of the others each takes one value, and may be repeated.
        several: dict[str, Any] = {"action": "extend", "nargs": "+"} if name in SEVERAL_VALUES else {"action": "append"}
        return shown, several | {"metavar": metavar}
    return shown, {"metavar": {int: "N", float: "X"}.get(base, name.rsplit("_", 1)[-1].upper())}


def _show(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _convert(name: str, value: object) -> object:
    kind = FIELDS[name].type
    base = base_type(kind)
    try:
        if isinstance(value, str):
            value = SYNONYMS.get((name, value), value)
            if base is int:
                value = parse_integer(value)
            elif typing.get_origin(base) is tuple:
                value = json.loads(value) if value.startswith("[") else [v.strip() for v in value.split(",") if v]
        elif typing.get_origin(base) is tuple and isinstance(value, list):  # of flags: each one text, or a JSON list
            value = [item for text in value for item in (json.loads(text) if text.startswith("[") else [text])]
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        shown = "used" if name in SECRETS else repr(value)
        raise ConfigError(f"{name} cannot be {shown}: {explain_value(kind, value, error)}") from None


def explain_value(kind: Any, value: object, error: Exception) -> str:
    """Return why `value` is not of type `kind`, in words for the person who typed it."""
    base = base_type(kind)
    if typing.get_origin(base) is Literal:
        choices = typing.get_args(base)
        return f"it is one of {', '.join(choices)}{nearest(str(value), choices)}"
    if base is bool:
        return "it is true or false"
    if isinstance(error, json.JSONDecodeError):
        return f"it begins like a JSON list, but is none: {error}"
    if titles := [meta.title for meta in (*_metas_of(kind), *_metas_of(base)) if meta.title]:
        return f"it takes {titles[0]}"
    if not isinstance(error, msgspec.ValidationError):
        return str(error)
    return f"it is a number{range_of(kind)}"


def range_of(kind: Any) -> str:
    """Return the bounds of a number's type in words, such as " of at least 1 and at most 1024"."""
    bounds = (("at least", "ge"), ("more than", "gt"), ("at most", "le"), ("less than", "lt"))
    found = [
        f"{words} {bound:g}" if isinstance(bound, float) else f"{words} {bound}"
        for words, attribute in bounds
        for meta in _metas_of(kind)
        if (bound := getattr(meta, attribute)) is not None
    ]
    return " of " + " and ".join(found) if found else ""


def base_type(kind: Any) -> Any:
    """Return the plain type inside Annotated and `| None`."""
    if typing.get_origin(kind) is Annotated:
        return base_type(typing.get_args(kind)[0])
    options = [option for option in typing.get_args(kind) if option is not type(None)]
    if len(options) == 1 and type(None) in typing.get_args(kind):
        return base_type(options[0])
    return kind


def _description(kind: Any) -> str:
    return next((meta.description for meta in _metas_of(kind) if meta.description), "")


def _metas_of(kind: Any) -> list[Meta]:
    """Return what the Annotated type `kind`, or such an option of a union, says of itself."""
    if typing.get_origin(kind) is Annotated:
        return [meta for meta in typing.get_args(kind)[1:] if isinstance(meta, Meta)]
    return [meta for option in typing.get_args(kind) for meta in _metas_of(option)]
