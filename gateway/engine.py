"""From a prompt to a stream of text: the one path of HTTP routes, the Python API and the command line."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from gateway.client import SchedulerClient
from gateway.tokenizer import Tokenizer
from protocol.messages import Ready, Stats
from protocol.sampling import SamplingParams


class Overloaded(Exception):
    """The scheduler's queue is full: try again after `retry_after_s`. Nothing was begun."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_s = reason, retry_after_s


class Refused(Exception):
    """The scheduler will never take this request."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unavailable(Exception):
    """No scheduler can make progress now."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate: n choices are n requests. `request_id` is unique over the life of the gateway."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token, its rank (1 is the likeliest) and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new: text that cannot change any more, and the tokens whose text is out (or which have none).

    Every Delta has text, `prompt_logprobs` or a `finish_reason`; the last one, and only it, has the `finish_reason`.
    `stop_reason` is the stop string or the user's stop token id that ended it. `prompt_logprobs` (one entry a prompt
    token, the first None) comes with the first Delta, if asked for. Usage is the sum of `len(token_ids)`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    error: str | None = None


class Generation:
    """An async iterator of Delta over one admitted request."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        raise StopAsyncIteration

    def close(self) -> None:
        """Abort what still runs; may be called at any time, any number of times."""

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Engine:
    """Starts generations on the schedulers that `clients` reach. Run it as `async with Engine(...)`."""

    def __init__(self, clients: Sequence[SchedulerClient], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    async def __aenter__(self) -> "Engine":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Abort what runs and close the sockets."""

    @property
    def ready(self) -> Ready | None:
        """The latest that a scheduler said of itself; None while none can be reached."""
        return None

    @property
    def healthy(self) -> bool:
        """Whether a scheduler answers and can make progress."""
        return False

    @property
    def stats(self) -> Stats | None:
        return None

    async def start(self, request: GenerationRequest) -> Generation:
        """Return once the request is admitted. Raises Overloaded, Refused or Unavailable."""
        raise Unavailable("no scheduler is connected")
