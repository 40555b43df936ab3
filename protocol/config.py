"""All settings, written once: variables, flags and help come from the fields of `Config`."""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PREFIX = "OCTAVO_"  # of the variables in the environment


class ConfigError(ValueError):
    """An unknown setting, or a value that a setting cannot take. The message names the setting."""


Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
# Kinds of text. A value that does not fit is told the title.
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
    """Return the directory, private to this user, for the sockets of processes that are started by hand."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base, "octavo") if base else Path(f"/tmp/octavo-{os.getuid()}")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each process reads its Config once; nothing changes it. What a process finds at its start travels in messages."""

    model: Annotated[
        str,
        Meta(
            description="the model: a directory. `octavo serve` also takes a Hugging Face id or a .gguf file, and"
            " without a model it serves the demo"
        ),
    ] = ""
    use_modelscope: Annotated[
        bool,
        Meta(
            description="fetch a model that is named by its id from ModelScope and not from the Hugging Face hub"
            " (needs: pip install modelscope). MODELSCOPE_CACHE and MODELSCOPE_ENDPOINT work"
        ),
    ] = False
    served_model_name: Annotated[
        tuple[NonEmpty, ...],
        Meta(description="one or several names that requests may use for the model (default: MODEL as typed)"),
    ] = ()
    host: Annotated[
        str,
        Meta(
            description="address on which the gateway listens. :: or an empty text means all addresses of IPv4 and"
            " IPv6, 0.0.0.0 all addresses of IPv4"
        ),
    ] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port on which the gateway listens; 0 takes a free one")] = 8000
    uds: Annotated[
        str,
        Meta(
            description="path of a Unix socket on which the gateway listens, in place of host and port, for this user"
            " and group (default: none)"
        ),
    ] = ""
    metrics_port: Annotated[
        Port | None,
        Meta(description="another port, for /metrics alone and without a key; 0 takes a free one (default: none)"),
    ] = None
    api_key: Annotated[
        tuple[NonEmpty, ...],
        Meta(
            description="a key that clients must send, as bearer token or X-Api-Key; may be given several times"
            " (default: none, everybody may ask)"
        ),
    ] = ()
    max_held_body_bytes: Annotated[
        Count,
        Meta(
            description="size of all request bodies that a gateway holds at once, such as 1GiB; beyond it, requests"
            " get a 429. The text of a body takes about four times as much memory",
        ),
    ] = 256 << 20
    allowed_origins: Annotated[
        tuple[Origin, ...],
        Meta(
            description="origins whose web pages may use the server, such as https://chat.example, or * for all;"
            " pages of other sites are refused. May be given several times (default: none)"
        ),
    ] = ()
    root_path: Annotated[
        str,
        Meta(
            pattern=r"^(/[^/?#\s]+)*$",
            title="a path such as /llm, without a slash at its end",
            description="path at which a proxy shows the server, such as /llm; the server removes it where the proxy"
            " does not (default: none)",
        ),
    ] = ""
    keep_alive_timeout_s: Annotated[
        Count,
        Meta(
            description="seconds that a connection without a request stays open. It has to be longer than a proxy"
            " keeps a connection, so that the proxy closes it first",
        ),
    ] = 120
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="type of weights and activations. auto takes the checkpoint's, by its config.json or else by"
            " its tensors, and float32 for float16 on a CPU; float16 needs a GPU"
        ),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "triton", "cpu", "reference"],
        Meta(
            description="kernels to compute with: triton (on a GPU), cpu, or reference (slow, for comparison); auto"
            " takes the best that this machine has"
        ),
    ] = "auto"
    pooling: Annotated[
        Literal["auto", "last", "mean", "cls"],
        Meta(
            description="what a text's vector is made of: the hidden state of its last token, the mean of all, or that"
            " of its first token (cls). auto takes what the checkpoint says, or else last"
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"], Meta(description="auto reads the checkpoint; dummy takes random weights")
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "awq", "gptq", "gguf", "fp8", "compressed-tensors", "int8", "int4"],
        Meta(
            description="auto keeps weights as the checkpoint has them; int8 and int4 round plain weights at load;"
            " any other name says what the checkpoint must be"
        ),
    ] = "auto"
    max_model_len: Annotated[
        Count | None, Meta(description="tokens of prompt and output together (default: the model's)")
    ] = None
    max_num_seqs: Annotated[Count, Meta(description="most sequences in one step")] = 128
    max_num_batched_tokens: Annotated[
        Count, Meta(description="most tokens in one step; longer prompts are computed in chunks")
    ] = 512
    target_step_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="seconds that a step should take while some sequences generate. Prompts of others are"
            " computed in pieces of a fitting size, so that no stream pauses for them. A step may always"
            " take twice as long as it would without prompts, and longer if many prompts wait; 3600 means"
            " no limit",
        ),
    ] = 0.05
    max_num_queued_reqs: Annotated[
        Count, Meta(description="requests that may wait for a place; further requests get a 429 with Retry-After")
    ] = 1024
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens in one KV block")] = 16
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1, description="share of a GPU's memory for weights and KV cache; without effect on the CPU"),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        Count | None,
        Meta(
            description="size of the KV cache of each rank, such as 2GiB (default: what gpu-memory-utilization"
            " leaves, on the CPU 40 % of the memory that is free)"
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="type of the KV cache. auto takes that of the activations; fp8 (float8_e4m3fn) takes half the"
            " room of bfloat16, but the cpu kernels do not have it"
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of prompts with the same start")] = (
        True
    )
    async_scheduling: Annotated[bool, Meta(description="plan the next step while one runs")] = True
    enable_chunked_prefill: Annotated[bool, Meta(description="compute prompts in chunks; it cannot be off")] = True
    enable_prompt_tokens_details: Annotated[
        bool, Meta(description="say in the usage how many prompt tokens were cached; it cannot be off")
    ] = True
    enforce_eager: Annotated[
        bool,
        Meta(description="launch decode steps kernel by kernel and not as CUDA graphs; without effect on the CPU"),
    ] = False
    seed: Annotated[
        Natural | None,
        Meta(
            description="makes the seeds repeatable that are drawn for requests without one (default: from the system)"
        ),
    ] = None
    generation_config: Annotated[
        str,
        Meta(
            description="where sampling defaults come from: auto (the model's generation_config.json), octavo or vllm"
            " (none), or a directory with such a file"
        ),
    ] = "auto"
    max_logprobs: Annotated[
        int, Meta(ge=0, le=20, description="most alternatives beside each token that a request may ask for")
    ] = 20
    chat_template: Annotated[
        str,
        Meta(
            description="a file with a chat template (Jinja), the template itself, or the name of one of the model's"
            " templates, which the log names at the start (default: the model's)"
        ),
    ] = ""
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "hermes",
            "llama3_json",
            "mistral",
            "deepseek_v3",
            "openai",
            "pythonic",
            "qwen",
            "llama4_json",
            "llama4_pythonic",
            "deepseek_v31",
            "gpt_oss",
        ],
        Meta(
            description="how the model writes tool calls; auto goes by the chat template. The last five are other names"
            " of hermes, llama3_json, pythonic, deepseek_v3 and openai"
        ),
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="let the model choose whether it calls tools; it cannot be off")
    ] = True
    reasoning_parser: Annotated[
        Literal[
            "auto",
            "none",
            "think",
            "deepseek_r1",
            "mistral",
            "seed_oss",
            "openai",
            "qwen3",
            "deepseek_v3",
            "glm45",
            "kimi_k2",
            "minimax_m2",
            "olmo3",
            "openai_gptoss",
        ],
        Meta(
            description="how the model marks its thinking, which answers have apart; auto goes by the chat template,"
            " none leaves it in the text. deepseek_r1 also takes thinking that has no start tag; the last seven are"
            " other names of think and openai"
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool, Meta(description="allow Python code to run that comes with a checkpoint, for its tokenizer or its model")
    ] = False
    num_threads: Annotated[
        Count | None,
        Meta(description="CPU threads of the model, of each rank (default: the rank's part of the physical cores)"),
    ] = None
    tensor_parallel_size: Annotated[
        Count,
        Meta(description="ranks: executors that share the model's weights, each with a GPU or its part of the cores"),
    ] = 1
    rank: Annotated[Natural, Meta(description="number of this rank; rank 0 speaks to the scheduler")] = 0
    distributed_address: Annotated[
        str,
        Meta(
            pattern=r"^(file:///.+|tcp://.+:\d+)?$",
            title="an address such as tcp://127.0.0.1:29500",
            description="where the ranks meet: an address of rank 0's machine (default: none)",
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
            " ipc:// links need none (default: none)"
        ),
    ] = ""
    insecure_links: Annotated[
        bool,
        Meta(
            description="allow links without keys to addresses that other machines reach: everybody there can use the"
            " model, and read along"
        ),
    ] = False
    peer_timeout_s: Annotated[
        float, Meta(gt=0, description="seconds of silence after which a gateway or executor counts as dead")
    ] = 10.0
    hang_timeout_s: Annotated[
        float,
        Meta(
            ge=2,
            description="seconds without a sign of progress after which a process counts as hung: its parent (`octavo"
            " serve` or `octavo supervise`) ends it and starts it again",
        ),
    ] = 60.0
    shutdown_timeout_s: Annotated[
        Natural, Meta(description="seconds that a stopping gateway gives to open streams")
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
        if not self.enable_auto_tool_choice:
            raise ValueError("enable_auto_tool_choice cannot be off: requests choose with tool_choice")
        if self.rank >= self.tensor_parallel_size:
            raise ValueError(
                f"rank ({self.rank}) must be below tensor_parallel_size ({self.tensor_parallel_size}):"
                " ranks count from 0"
            )


FIELDS = {field.name: field for field in msgspec.structs.fields(Config)}
SECRETS = ("api_key",)  # no child but the gateway gets them
