"""Everything that crosses a socket: one union of messages and one reused decoder per direction.

Token ids and block tables travel as `bytes` of int32, log probabilities as `bytes` of float32, both in the byte order
of the machine (all processes of one replica share it). New fields go last and have a default. A receiver is one
`match`. A malformed frame raises `msgspec.MsgspecError`, and its receiver drops it.

Any message of either link may be lost, repeated, delayed or overtaken. Between gateway and scheduler, `Hello` repairs
everything: it lists all that the gateway has in flight, and `hello_seq` numbers it. Between executor and scheduler,
steps are numbered without a gap, and the executor says when it has nothing to do.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import add, getitem
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.protocol.grammars import MAX_GRAMMAR_BYTES
from octavo.protocol.sampling import Sampling

PROTOCOL_VERSION = 4
MAX_PROMPT_LOGPROBS_BYTES = 32 << 20  # of one prompt, since one message carries them all


def _decoder(union: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes one frame to `union`. It raises `msgspec.MsgspecError` for any other frame."""
    decode = msgspec.msgpack.Decoder(union).decode

    def decode_frame(frame: bytes) -> Any:
        try:
            return decode(frame)
        except RecursionError:
            raise msgspec.DecodeError("nested too deeply") from None

    return decode_frame


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all messages."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the records inside messages."""


Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Task = Literal["generate", "embed"]
GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Return integers as int32 bytes. Raises OverflowError if one does not fit."""
    return array("i", token_ids).tobytes()


def unpack_ids(packed: bytes) -> "array[int]":
    """Return the integers of int32 bytes. Raises ValueError if the length is not a multiple of four."""
    ids = array("i")
    ids.frombytes(packed)
    return ids


class Logprobs(Record, frozen=True):
    """Log probabilities of T tokens with K alternatives each, of the raw distribution (before any sampling parameter).

    The alternatives are the K most likely tokens, the most likely first. The token itself may be one of them.
    """

    num_alternatives: int = 0
    token_logprobs: bytes = b""  # float32, T
    token_ranks: bytes = b""  # int32, T; 1 is the likeliest
    top_token_ids: bytes = b""  # int32, T x K
    top_logprobs: bytes = b""  # float32, T x K

    @property
    def num_tokens(self) -> int:
        return len(self.token_logprobs) // 4

    @property
    def columns(self) -> tuple[bytes, bytes, bytes, bytes]:
        return self.token_logprobs, self.token_ranks, self.top_token_ids, self.top_logprobs

    def __add__(self, other: "Logprobs") -> "Logprobs":
        """Return the log probabilities of these tokens and then the other's; both have the same K."""
        return Logprobs(self.num_alternatives, *map(add, self.columns, other.columns))

    @staticmethod
    def cut(num_alternatives: int, columns: "Sequence[bytes | bytearray]", start: int, end: int) -> "Logprobs":
        """Return tokens `start` to `end` of four columns that are laid out as those of Logprobs are."""
        row, wide = slice(4 * start, 4 * end), slice(4 * start * num_alternatives, 4 * end * num_alternatives)
        return Logprobs(num_alternatives, *map(bytes, map(getitem, columns, (row, row, wide, wide))))

    def part(self, start: int, end: int) -> "Logprobs":
        """Return the same for the tokens from `start` to `end`."""
        return self.cut(self.num_alternatives, self.columns, start, end)

    def tail(self, first_token: int) -> "Logprobs":
        """Return the same from token `first_token` on."""
        return self.part(first_token, self.num_tokens)


def logprob_bytes(num_alternatives: int) -> int:
    """Return the size of the log probabilities of one token."""
    return 8 + 8 * num_alternatives


def excess_of_prompt_logprobs(num_prompt_tokens: int, num_alternatives: int | None) -> str | None:
    """Return why the log probabilities of such a prompt do not fit into one message, or None if they fit."""
    num_bytes = 0 if num_alternatives is None else num_prompt_tokens * logprob_bytes(num_alternatives)
    if num_bytes <= MAX_PROMPT_LOGPROBS_BYTES:
        return None
    return (
        f"the log probabilities of {num_prompt_tokens} prompt tokens take {num_bytes >> 20} MiB,"
        f" of {MAX_PROMPT_LOGPROBS_BYTES >> 20} at most: ask for fewer alternatives, or for less of the prompt"
    )


# Gateway to scheduler


class Hello(Message, frozen=True):
    """All that the gateway has in flight, every half second and after each gap; it acknowledges the received tokens.

    The scheduler ends a request that an earlier `Submit` announced and a later `Hello` does not list. `hello_seq`
    counts the Hellos of one gateway's life from 1. A Hello that arrives after a later one is ignored.
    """

    protocol_version: int
    gateway_id: str  # equals the identity of its socket; any other is refused
    hello_seq: int
    in_flight: list[tuple[str, int]] = []  # request_id, num_received_tokens
    unanswered: list[str] = []  # request_ids whose last Submit has no answer: Admitted may have been lost


class Submit(Message, frozen=True):
    """Start one generation, or go on with it. Idempotent by `request_id`.

    Requests with one prompt have one `prompt_id`: one of them brings the prompt's tokens, the others leave them out.
    The scheduler drops a Submit whose prompt it lacks; the next Hello shows that the request is missing.
    """

    request_id: str
    hello_seq: int  # of the last Hello sent before this
    prompt_token_ids: bytes
    sampling: Sampling
    output_token_ids: bytes = b""  # that the gateway has already, in a resubmission
    tenant: str = ""
    priority: int = 0  # lower goes first
    cache_salt: str = ""
    prompt_id: str = ""  # unique in this gateway; empty if no other request has this prompt
    body_id: str = ""  # of one HTTP body: its requests take turns with the requests of other bodies
    task: Task = "generate"  # "embed" generates nothing: `sampling.max_tokens` is 0, and the vector comes with the end
    grammar: GrammarText = ""  # that the output follows, as llguidance reads it; empty: any text


class Abort(Message, frozen=True):
    request_id: str
    stopped: bool = False  # True: at a stop string, and the client has the whole answer; False: the client left


ToScheduler = Hello | Submit | Abort
decode_to_scheduler: Callable[[bytes], ToScheduler] = _decoder(ToScheduler)


# Scheduler to gateway


class Ready(Message, frozen=True):
    """Answers every Hello. A gateway never resumes a request on another `model_fingerprint`.

    `can_progress` is False while no executor can run a step; requests in flight wait.
    """

    scheduler_incarnation: str
    model_fingerprint: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    block_size: int  # tokens
    num_blocks: int
    max_num_seqs: int
    can_progress: bool = True
    num_idle_executors: int = 0  # executors that still run although another one took their place
    tasks: tuple[Task, ...] = ("generate",)
    embedding_size: int = 0  # numbers of a vector; 0 without the task "embed"


class Admitted(Message, frozen=True):
    request_id: str


class Rejected(Message, frozen=True):
    """The scheduler refuses the request: for now (`retry_after_s`), or for ever (None)."""

    request_id: str
    reason: str
    retry_after_s: float | None = None


class Output(Record, frozen=True):
    """New tokens of one request, and its end if `finish_reason` is set ("stop", "length", "abort" or "error").

    `first_token_index` counts from the request's first output token, tokens of a resubmission included. The gateway
    drops tokens that it has. An index beyond them is a gap, and the gateway says Hello.
    """

    request_id: str
    first_token_index: int
    token_ids: bytes = b""
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    prompt_logprobs: Logprobs | None = None  # from prompt token 1 on; with the first output only
    error: str | None = None
    embedding: bytes = b""  # float32, of the prompt; with the end of an "embed" request


class Outputs(Message, frozen=True):
    outputs: list[Output]


class Unknown(Message, frozen=True):
    """Requests that a Hello listed and this scheduler lacks: submit each again, unless it was submitted since."""

    request_ids: list[str]
    hello_seq: int


class HistogramCounts(Record, frozen=True):
    """The number of observations in each bucket (`measures.py` has the bounds; the last has none), and their sum."""

    counts: tuple[int, ...] = ()
    sum: float = 0.0


class EngineHistograms(Record, frozen=True):
    """Observations since the scheduler's start. Times are in seconds."""

    queue_s: HistogramCounts = HistogramCounts()  # from arrival to the first step
    prefill_s: HistogramCounts = HistogramCounts()  # from the first step's planning to the first token
    decode_s: HistogramCounts = (
        HistogramCounts()
    )  # from the first token to the end, of requests that ended with stop or length
    inference_s: HistogramCounts = HistogramCounts()  # prefill and decode together
    step_s: HistogramCounts = HistogramCounts()  # the executor's own time
    step_seqs: HistogramCounts = HistogramCounts()
    step_tokens: HistogramCounts = HistogramCounts()


class Stats(Message, frozen=True):
    """Once a second. Counts run from the scheduler's start; all other numbers are of this moment."""

    scheduler_incarnation: str
    num_running_seqs: int
    num_waiting_seqs: int
    num_used_blocks: int  # referenced by a sequence
    num_prompt_tokens: int
    num_generated_tokens: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_steps: int
    num_evicted_blocks: int
    num_executor_restarts: int
    finished: dict[str, int] = {}  # by finish_reason
    histograms: EngineHistograms = EngineHistograms()
    loop_lag_s: float = 0.0  # the longest recent wait of an arrived message for the scheduler
    device_bytes: dict[str, int] = {}  # the executor's memory: weights, kv_cache, used (now), total


ToGateway = Ready | Admitted | Rejected | Outputs | Unknown | Stats
decode_to_gateway: Callable[[bytes], ToGateway] = _decoder(ToGateway)


# Executor to scheduler


class ExecutorReady(Message, frozen=True):
    """Sent at the start until a Welcome answers it, and every half second while the executor is idle.

    If steps are unanswered then, the steps or their results were lost, and the scheduler sends the steps again.
    """

    executor_incarnation: str
    num_blocks: Count  # with several ranks: the smallest number of a rank
    block_size: Count
    max_model_len: Count
    vocab_size: Count
    model_fingerprint: str
    scheduler_incarnation: str = ""  # of the last Welcome
    device_bytes: dict[str, int] = {}  # of rank 0: weights, kv_cache, total (of the device)
    process: str = ""  # its machine and number, for people
    tasks: tuple[Task, ...] = ("generate",)
    embedding_size: int = 0  # numbers of a vector; 0 without the task "embed"
    embeds_all_tokens: bool = False  # a vector needs each token of its prompt computed: none may come from the cache
    whole_prompts: bool = False  # the tokens of a prompt attend to later ones: one share computes the whole prompt


class SequenceResult(Record, frozen=True):
    """The result of one sequence's share of a step: no token for a chunk of a prompt, otherwise one or more."""

    token_ids: list[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of prompt tokens whose predecessors this step computed
    embedding: bytes = b""  # float32; with the last token of the prompt of an "embed" sequence
    error: str = ""  # why this sequence cannot go on: it ends, and the others of the step do not


class StepResult(Message, frozen=True):
    scheduler_incarnation: str
    executor_incarnation: str
    step_id: int
    sequences: list[SequenceResult]  # in the order of the Step
    not_ready: list[int] = []  # seq_ids that sat this step out: their shares were not computed
    busy_s: float = 0.0  # the executor's own time for this step
    waited_s: float = 0.0  # the executor's idle time before this step
    launch_s: float = 0.0  # time to hand the step to a device that computes later: the step must come that early


class StepFailed(Message, frozen=True):
    """The step raised. The executor then ends, and a new one takes its place."""

    scheduler_incarnation: str
    executor_incarnation: str
    step_id: int
    error: str


class NeedInit(Message, frozen=True):
    """The step was not done: the executor lacks state for these sequences. It does no later step until a Welcome."""

    scheduler_incarnation: str
    executor_incarnation: str
    step_id: int
    seq_ids: list[int]


class Progress(Message, frozen=True):
    """From a thread with a socket of its own: it tells a long step from one that hangs."""

    executor_incarnation: str
    step_id: int
    layers_done: int
    used_bytes: int = 0  # of the device's memory, by this process, at this moment


FromExecutor = ExecutorReady | StepResult | StepFailed | NeedInit | Progress
decode_from_executor: Callable[[bytes], FromExecutor] = _decoder(FromExecutor)


# Scheduler to executor


class Displaced(Message, frozen=True):
    """Answers ExecutorReady of an executor whose place another one took: it gets no steps as long as it lives.

    Once the other one is gone (`by` is empty), this executor ends, and the new life that its supervisor starts gets
    the place.
    """

    scheduler_incarnation: str
    executor_incarnation: str
    by: str  # the other executor's `process`; empty if that one is gone


class Welcome(Message, frozen=True):
    """Answers ExecutorReady.

    With a new scheduler incarnation, the executor drops the state of the one before. It does steps strictly by number
    from `next_step_id`: an older step is answered again from the last results, a later step is ignored, and
    ExecutorReady then asks for the missing one.
    """

    scheduler_incarnation: str
    executor_incarnation: str
    next_step_id: int


class SequenceInit(Record, frozen=True):
    """All that an executor must know of a sequence beyond its shares: on admission, resumption and after NeedInit.

    A share brings the tokens that it computes; the init brings only tokens that sampling looks back at. So a long
    prompt travels once, and the part in the prefix cache not at all.
    """

    sampling: Sampling
    num_prompt_tokens: int
    num_output_tokens: int = 0
    prompt_token_ids: bytes = b""  # the whole prompt, while log probabilities of its tokens are wanted
    distinct_prompt_token_ids: bytes = b""  # with a repetition penalty: the tokens of the prompt, each once
    output_token_ids: bytes = b""  # with a penalty or a grammar: the whole output
    task: Task = "generate"
    grammar: GrammarText = ""


class SequenceStep(Record, frozen=True):
    """One sequence's share of a step: positions from `num_computed_tokens` on.

    Empty `token_ids` mean one token: the token that this executor sampled last for the sequence. `sample` says that
    the share ends at the sequence's last token, so that its logits give the next token.
    """

    seq_id: int
    num_computed_tokens: int
    token_ids: bytes
    block_table: bytes  # the blocks of positions 0 to the end of this share
    sample: bool
    init: SequenceInit | None = None


class Step(Message, frozen=True):
    scheduler_incarnation: str
    executor_incarnation: str
    step_id: int
    sequences: list[SequenceStep]
    forget: list[int] = []  # seq_ids whose state the executor drops before this step


ToExecutor = Welcome | Displaced | Step
decode_to_executor: Callable[[bytes], ToExecutor] = _decoder(ToExecutor)

encode = msgspec.msgpack.Encoder().encode
