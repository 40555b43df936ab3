"""Turns requests into streams of text. HTTP routes, the Python API and the command line all use it."""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from octavo.gateway.link.client import SchedulerClient
from octavo.gateway.link.in_flight import Event
from octavo.gateway.text.delta import Delta
from octavo.gateway.text.text_stream import TextStream
from octavo.gateway.text.tokenizer import Tokenizer
from octavo.protocol.config import Config
from octavo.protocol.link_keys import ClientKeys
from octavo.protocol.messages import Output, Ready, Rejected, Stats, Submit, Task, pack_ids
from octavo.protocol.sampling import Sampling

RETRY_S = 0.05  # while the scheduler is full, or a process restarts


class Overloaded(Exception):  # noqa: N818  (what the scheduler answered)
    """The scheduler's queue is full: try again after `retry_after_s`. Nothing was started."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_s = reason, retry_after_s


class Refused(Exception):  # noqa: N818  (what the scheduler answered)
    """The scheduler will never take this request."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unavailable(Exception):  # noqa: N818  (what the scheduler answered)
    """No scheduler can make progress now."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """A prompt that the choices of a request share. `prompt_id` is unique over the life of the gateway."""

    prompt_id: str
    token_ids: list[int]
    packed: bytes  # `token_ids` as int32

    @classmethod
    def of(cls, prompt_id: str, token_ids: list[int]) -> "EncodedPrompt":
        return cls(prompt_id, token_ids, pack_ids(token_ids))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one sequence: n choices are n requests. `request_id` is unique over the life of the gateway."""

    request_id: str
    prompt: EncodedPrompt
    sampling: Sampling
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_token_ids: frozenset[int] = frozenset()  # special tokens that are not skipped
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""
    body_id: str = ""  # the same for all requests of one body
    task: Task = "generate"
    grammar: str = ""


class Generation:
    """An async iterator over the Deltas of one request; the last Delta has the `finish_reason`. One task reads it."""

    def __init__(self, client: SchedulerClient, request: GenerationRequest, stream: TextStream) -> None:
        self._client, self._request_id, self._stream = client, request.request_id, stream
        self._events: deque[Event] = deque()
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None  # wakes the reader that waits for an event
        self._ended = False
        client.submit(_submit(request), self._deliver)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Delta:
        while not self._ended:
            if not self._events:
                self._arrival = self._loop.create_future()
                await self._arrival
                continue
            event = self._events.popleft()
            delta = self._stream.push(event) if isinstance(event, Output) else None
            if delta is not None:
                if delta.finish_reason is not None:
                    self._end(stopped=delta.finish_reason == "stop")
                return delta
        raise StopAsyncIteration

    async def admitted(self) -> None:
        """Return once the scheduler has admitted the request. Raises Overloaded, Refused or Unavailable."""
        if not self._events:
            self._arrival = self._loop.create_future()
            await self._arrival
        match self._events[0]:
            case Rejected(_, reason, None):
                raise Refused(reason)
            case Rejected(_, reason, float(retry_after_s)):
                raise Overloaded(reason, retry_after_s)
            case Output(error=str(error)):
                raise Unavailable(error)

    def close(self) -> None:
        """Abort the request if it still runs; may be called repeatedly, at any time. A reader gets no more Deltas."""
        self._end(stopped=False)

    def _end(self, *, stopped: bool) -> None:
        if not self._ended:
            self._ended = True
            self._client.abandon(self._request_id, stopped=stopped)
            self._events.clear()
            self._wake_reader()

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _deliver(self, event: Event) -> None:
        self._events.append(event)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class Engine:
    """Starts generations on the schedulers that `clients` reach. Use it as `async with Engine(...) as engine`."""

    def __init__(self, clients: Sequence[SchedulerClient], tokenizer: Tokenizer) -> None:
        self._clients, self._tokenizer = list(clients), tokenizer

    async def __aenter__(self) -> "Engine":
        for client in self._clients:
            client.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    async def first_answer(self, timeout_s: float) -> None:
        """Return once a scheduler has answered, and at the latest after `timeout_s`."""
        waits = [asyncio.create_task(client.first_answer()) for client in self._clients]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    @property
    def ready(self) -> Ready | None:
        """The last Ready of the scheduler that would get the next request; None while no scheduler answers."""
        return max(self._clients, key=_preference).ready

    @property
    def num_in_flight(self) -> int:
        """How many requests this gateway has in flight, a choice each."""
        return sum(client.num_in_flight for client in self._clients)

    @property
    def num_idle_executors(self) -> int:
        """How many executors hold memory for nothing, because their scheduler has another executor."""
        return sum(client.ready.num_idle_executors for client in self._clients if client.ready)

    @property
    def healthy(self) -> bool:
        """Whether at least one scheduler answers and can make progress."""
        return any(client.healthy for client in self._clients)

    @property
    def reports(self) -> dict[int, tuple[Ready, Stats]]:
        """The last Ready and Stats of each scheduler that answers, by its index among the configured schedulers."""
        reports = {number: (client.ready, client.stats) for number, client in enumerate(self._clients)}
        return {number: (ready, stats) for number, (ready, stats) in reports.items() if ready and stats}

    async def start(self, request: GenerationRequest) -> Generation:
        """Return once the request is admitted. Raises Overloaded, Refused or Unavailable."""
        client = max(self._clients, key=_preference)
        if not client.healthy:
            raise Unavailable("the model is not ready" if client.ready else "no scheduler answers")
        stream = TextStream(
            self._tokenizer.detokenizer(
                skip_special_tokens=request.skip_special_tokens, shown_token_ids=request.shown_token_ids
            ),
            request.sampling,
            request.prompt.token_ids,
            request.stop,
            request.include_stop_str_in_output,
        )
        generation = Generation(client, request, stream)
        admitted = False
        try:
            await generation.admitted()
            admitted = True
        finally:
            if not admitted:
                generation.close()
        return generation

    async def start_patiently(self, request: GenerationRequest) -> Generation:
        """Return once the request is admitted; wait while the schedulers are full or away. Raises Refused."""
        for attempt in itertools.count():
            try:
                return await self.start(replace(request, request_id=f"{request.request_id}-{attempt}"))
            except (Overloaded, Unavailable):
                await asyncio.sleep(RETRY_S)
        raise AssertionError("attempts do not end")


def scheduler_addresses(config: Config) -> tuple[str, ...]:
    return config.schedulers or (config.frontend_address,)


def scheduler_clients(config: Config, keys: ClientKeys | None = None) -> list[SchedulerClient]:
    """Return a client for each scheduler that `config` names; `keys` are for schedulers at tcp:// addresses."""
    return [
        SchedulerClient(address, peer_timeout_s=config.peer_timeout_s, keys=keys)
        for address in scheduler_addresses(config)
    ]


def _preference(client: SchedulerClient) -> tuple[bool, bool, int]:
    return client.healthy, client.ready is not None, -client.num_in_flight


def _submit(request: GenerationRequest) -> Submit:
    return Submit(
        request_id=request.request_id,
        hello_seq=0,  # the client sets it
        prompt_token_ids=request.prompt.packed,
        sampling=request.sampling,
        tenant=request.tenant,
        priority=request.priority,
        cache_salt=request.cache_salt,
        prompt_id=request.prompt.prompt_id,
        body_id=request.body_id,
        task=request.task,
        grammar=request.grammar,
    )
