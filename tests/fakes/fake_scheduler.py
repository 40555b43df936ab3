"""A small honest scheduler over a real ROUTER socket, for everything that talks to one."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import zmq

from octavo.protocol.messages import (
    Abort,
    Admitted,
    Hello,
    Output,
    Outputs,
    Ready,
    Rejected,
    Stats,
    Submit,
    Task,
    ToGateway,
    ToScheduler,
    Unknown,
    decode_to_scheduler,
    encode,
    pack_ids,
    unpack_ids,
)
from octavo.protocol.sockets import bind_router, new_identity, try_send
from tests.fakes.toy_model import EMBEDDING_SIZE, embedding_of, logprobs_of

Reply = Callable[[Submit], Sequence[int]]
Item = TypeVar("Item")
AnyMessage = TypeVar("AnyMessage", Hello, Submit, Abort)


def computed_reply(submit: Submit) -> list[int]:
    """Return max_tokens ids that depend on the seed and their position alone, in 100..999."""
    return [
        100 + random.Random(submit.sampling.seed * 1_000_003 + position).randrange(900)
        for position in range(submit.sampling.max_tokens)
    ]


@dataclass
class Faults:
    """What a bad network does to whole messages, drawn from one seed; `delay` lets later ones overtake."""

    seed: int
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    held: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def carry(self, item: Item) -> list[Item]:
        """Return what arrives now that `item` was sent: it, nothing, it twice, and what was held up before."""
        arriving: list[Item] = []
        if self.random.random() >= self.drop:
            arriving.append(item)
            if self.random.random() < self.duplicate:
                arriving.append(item)
            if self.random.random() < self.delay:
                self.held.append(arriving.pop())
        if self.held and self.random.random() < 0.5:
            arriving.append(self.held.pop(self.random.randrange(len(self.held))))
        return arriving


@dataclass
class LoseFirst:
    """A network that loses the first message of `kind` and no other."""

    kind: type
    lost: bool = False

    def carry(self, item: Item) -> list[Item]:
        if not self.lost and isinstance(item, tuple) and isinstance(item[1], self.kind):
            self.lost = True
            return []
        return [item]


@dataclass
class Record:
    """One request of one gateway, kept until a Hello says that the finish arrived."""

    submit: Submit
    token_ids: list[int]  # all that it will ever have
    num_tokens: int  # of these, computed
    num_sent_tokens: int
    finish_reason: str | None = None
    error: str | None = None
    sent_finish: bool = False


class FakeScheduler:
    """Admits what it is sent and streams `reply(submit)`, `tokens_per_step` a step, over a real ROUTER.

    Tests may set `reply`, `rejection` (an answer for every new Submit), `can_progress`, `frozen` (it neither reads nor
    writes), `paused` (it reads and answers but computes no step), `faults`, `num_cached_tokens`, `stats` (sent with
    every Ready), and call `restart` and `fail`. `received` is what arrived, in order.
    """

    def __init__(
        self,
        address: str,
        *,
        reply: Reply = computed_reply,
        tokens_per_step: int = 1,
        step_s: float = 0.001,
        faults: Faults | LoseFirst | None = None,
        max_model_len: int = 8192,
        vocab_size: int = 49152,
    ) -> None:
        self.address, self.reply = address, reply
        self.tokens_per_step, self.step_s, self.faults = tokens_per_step, step_s, faults
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.incarnation, self.model_fingerprint = new_identity(), "fingerprint"
        self.can_progress, self.frozen, self.paused = True, False, False
        self.num_idle_executors = 0
        self.num_cached_tokens = 0
        self.tasks: tuple[Task, ...] = ("generate", "embed")
        self.stats: Stats | None = None
        self.rejection: Callable[[Submit], Rejected | None] = lambda submit: None
        self.received: list[ToScheduler] = []
        self.records: dict[tuple[bytes, str], Record] = {}
        self.prompts: dict[tuple[bytes, str], bytes] = {}  # by gateway and prompt_id
        self._hello_seqs: dict[bytes, int] = {}
        self._arrived = asyncio.Condition()

    def restart(self, *, model_fingerprint: str | None = None) -> None:
        """Come back as another life that knows nothing, perhaps with another model."""
        self.incarnation = new_identity()
        self.model_fingerprint = model_fingerprint or self.model_fingerprint
        self.records.clear()
        self.prompts.clear()
        self._hello_seqs.clear()

    def send_frame(self, frame: bytes) -> None:
        """Send `frame`, whatever it is, to every gateway that said Hello."""
        for identity in self._hello_seqs:
            try_send(self._router, [identity, frame])

    async def wait_for(self, kind: type[AnyMessage], count: int = 1) -> list[AnyMessage]:
        """Return the first `count` messages of `kind` once they have arrived."""
        async with asyncio.timeout(10), self._arrived:
            await self._arrived.wait_for(lambda: len(self.messages(kind)) >= count)
        return self.messages(kind)[:count]

    async def wait_for_requests(self, kind: type[Submit] | type[Abort], count: int) -> None:
        """Return once `count` requests were submitted or aborted; a gateway that is in doubt says so again."""
        async with asyncio.timeout(10), self._arrived:
            await self._arrived.wait_for(lambda: len({m.request_id for m in self.messages(kind)}) >= count)

    def messages(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        return [message for message in self.received if isinstance(message, kind)]

    def prompt_of(self, submit: Submit) -> list[int]:
        """Return the prompt of a request that may have named one whose tokens another brought."""
        named = (prompt for (_, prompt_id), prompt in self.prompts.items() if prompt_id == submit.prompt_id)
        return unpack_ids(submit.prompt_token_ids or next(named)).tolist()

    def fail(self, error: str) -> None:
        """End everything that runs with an error."""
        for record in self.records.values():
            self._end(record, "error", error)

    def open(self) -> None:
        """Bind; a wildcard in `address` is replaced by what was found."""
        self._context = zmq.Context()
        self._router = bind_router(self._context, self.address)
        self.address = str(self._router.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            if not self.frozen:
                await self._read()
                if not self.paused and self.can_progress:
                    self._step()
            await asyncio.sleep(self.step_s)

    def close(self) -> None:
        """Be gone, address and all."""
        self._router.close()
        self._context.term()

    async def _read(self) -> None:
        while self._router.poll(0):
            identity, frame = self._router.recv_multipart()
            for arrived in self._carry((identity, decode_to_scheduler(frame))):
                await self._take(*arrived)

    async def _take(self, identity: bytes, message: ToScheduler) -> None:
        async with self._arrived:
            self.received.append(message)
            self._arrived.notify_all()
        match message:
            case Hello():
                self._hello(identity, message)
            case Submit():
                self._submit(identity, message)
            case Abort(request_id):
                self._end(self.records.get((identity, request_id)), "abort")

    def _hello(self, identity: bytes, hello: Hello) -> None:
        if hello.hello_seq <= self._hello_seqs.get(identity, 0):
            return
        self._hello_seqs[identity] = hello.hello_seq
        self._send(identity, self._ready())
        if self.stats:
            self._send(identity, self.stats)
        listed = dict(hello.in_flight)
        for key, record in list(self.records.items()):
            if key[0] == identity and key[1] not in listed and record.submit.hello_seq < hello.hello_seq:
                del self.records[key]
        outputs = []
        for request_id, num_received_tokens in hello.in_flight:
            known = self.records.get((identity, request_id))
            if known and (num_received_tokens < known.num_sent_tokens or known.finish_reason):
                known.num_sent_tokens, known.sent_finish = num_received_tokens, False
                outputs.append(self._output(known))
        if outputs:
            self._send(identity, Outputs(outputs))
        unknown = [request_id for request_id in listed if (identity, request_id) not in self.records]
        if unknown:
            self._send(identity, Unknown(unknown, hello.hello_seq))
        for request_id in hello.unanswered:
            if (identity, request_id) in self.records:
                self._send(identity, Admitted(request_id))

    def _submit(self, identity: bytes, submit: Submit) -> None:
        key = identity, submit.request_id
        if key not in self.records:
            if submit.prompt_token_ids:
                self.prompts[identity, submit.prompt_id] = submit.prompt_token_ids
            elif (prompt := self.prompts.get((identity, submit.prompt_id))) and submit.prompt_id:
                submit = msgspec.structs.replace(submit, prompt_token_ids=prompt)
            else:
                return  # the next Hello finds it out
            if rejected := self.rejection(submit):
                self._send(identity, rejected)
                return
            num_tokens = len(unpack_ids(submit.output_token_ids))
            self.records[key] = Record(submit, list(self.reply(submit)), num_tokens, num_tokens)
        self._send(identity, Admitted(submit.request_id))

    def _step(self) -> None:
        outputs: dict[bytes, list[Output]] = {}
        for (identity, _), record in self.records.items():
            self._advance(record)
            if record.num_sent_tokens < record.num_tokens or (record.finish_reason and not record.sent_finish):
                outputs.setdefault(identity, []).append(self._output(record))
        for identity, batch in outputs.items():
            self._send(identity, Outputs(batch))

    def _advance(self, record: Record) -> None:
        sampling = record.submit.sampling
        stops = {*sampling.eos_token_ids, *sampling.stop_token_ids}
        for _ in range(self.tokens_per_step):
            if record.finish_reason:
                return
            if record.num_tokens < min(len(record.token_ids), sampling.max_tokens):
                record.num_tokens += 1
                if record.token_ids[record.num_tokens - 1] in stops:
                    self._end(record, "stop")
            if record.num_tokens >= min(len(record.token_ids), sampling.max_tokens):
                self._end(record, "length")

    def _end(self, record: Record | None, finish_reason: str, error: str | None = None) -> None:
        if record and not record.finish_reason:
            record.finish_reason, record.error = finish_reason, error

    def _output(self, record: Record) -> Output:
        """Return all of `record` that was not sent, and count it as sent."""
        sampling, first = record.submit.sampling, record.num_sent_tokens
        token_ids = record.token_ids[first : record.num_tokens]
        logprobs = prompt_logprobs = None
        if sampling.num_logprobs is not None:
            logprobs = logprobs_of(token_ids, sampling.num_logprobs)
        if sampling.num_prompt_logprobs is not None and first == 0:
            prompt = unpack_ids(record.submit.prompt_token_ids)[1:]
            prompt_logprobs = logprobs_of(prompt, sampling.num_prompt_logprobs)
        record.num_sent_tokens, record.sent_finish = record.num_tokens, record.finish_reason is not None
        return Output(
            record.submit.request_id,
            first,
            pack_ids(token_ids),
            record.finish_reason,
            logprobs,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            error=record.error,
            embedding=self._embedding(record),
        )

    def _embedding(self, record: Record) -> bytes:
        wanted = record.submit.task == "embed" and record.finish_reason == "length"
        return embedding_of(unpack_ids(record.submit.prompt_token_ids)) if wanted else b""

    def _ready(self) -> Ready:
        return Ready(
            scheduler_incarnation=self.incarnation,
            model_fingerprint=self.model_fingerprint,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            block_size=16,
            num_blocks=1024,
            max_num_seqs=128,
            can_progress=self.can_progress,
            num_idle_executors=self.num_idle_executors,
            tasks=self.tasks,
            embedding_size=EMBEDDING_SIZE,
        )

    def _send(self, identity: bytes, message: ToGateway) -> None:
        for to, arriving in self._carry((identity, message)):
            try_send(self._router, [to, encode(arriving)])

    def _carry(self, item: Item) -> list[Item]:
        return self.faults.carry(item) if self.faults else [item]


@asynccontextmanager
async def running(scheduler: FakeScheduler) -> AsyncIterator[FakeScheduler]:
    """Run `scheduler` while the context lasts, in this event loop."""
    scheduler.open()
    task = asyncio.create_task(scheduler.run())
    try:
        yield scheduler
    finally:
        task.cancel()
        await asyncio.wait([task])
        scheduler.close()
        if not task.cancelled():
            task.result()
