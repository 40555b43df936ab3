"""What each gateway was sent: a pure ledger that makes every token arrive once, whatever the link does.

A request's output is kept from its Submit until a Hello no longer lists the request. `num_sent_tokens` moves forward
with each message that the socket took, and back to the number that a Hello says was received. So one rule serves new
tokens, lost messages and slow gateways: send the tokens after `num_sent_tokens`.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.protocol.messages import Hello, Logprobs, Output, Outputs, Submit, logprob_bytes
from octavo.scheduler.scheduler import Update

MAX_OUTPUTS_BYTES = 8 << 20  # of one message; log probabilities of one prompt may come on top
RETRY_S = 0.02  # between attempts to send to a gateway whose queue is full


class LogprobColumns:
    """The log probabilities of one request's tokens; appending is cheap."""

    def __init__(self, num_alternatives: int) -> None:
        self.num_alternatives = num_alternatives
        self._columns = [bytearray() for _ in range(4)]

    def append(self, logprobs: Logprobs) -> None:
        for column, new in zip(self._columns, logprobs.columns, strict=True):
            column += new

    def part(self, start: int, end: int) -> Logprobs:
        """Return the log probabilities of the tokens from `start` to `end`."""
        return Logprobs.cut(self.num_alternatives, self._columns, start, end)


@dataclass(slots=True)
class RequestRecord:
    """One request's output. Token indexes count from its first output token, over all lives of the scheduler."""

    request_id: str
    seq_id: int
    hello_seq: int  # of its Submit
    first_token_index: int  # the number of output tokens that its Submit brought
    num_sent_tokens: int
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))  # from first_token_index on
    logprobs: LogprobColumns | None = None  # None until the first come
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    embedding: bytes = b""
    is_finish_sent: bool = False

    @property
    def num_tokens(self) -> int:
        return self.first_token_index + len(self.token_ids)

    @property
    def is_behind(self) -> bool:
        """Whether the gateway lacks something: not sent yet, or lost."""
        return self.num_sent_tokens < self.num_tokens or (self.finish_reason is not None and not self.is_finish_sent)

    def extend(self, update: Update) -> None:
        for token_id in update.token_ids:
            self.token_ids.append(token_id)
        if update.logprobs is not None:
            self.logprobs = self.logprobs or LogprobColumns(update.logprobs.num_alternatives)
            self.logprobs.append(update.logprobs)
        if update.prompt_logprobs is not None:
            earlier = self.prompt_logprobs
            self.prompt_logprobs = earlier + update.prompt_logprobs if earlier else update.prompt_logprobs
        self.num_cached_tokens = self.num_cached_tokens or update.num_cached_tokens
        self.finish_reason = update.finish_reason
        self.error = update.error
        self.embedding = update.embedding

    def rewind(self, num_received_tokens: int) -> None:
        """Go back to the number of tokens that the gateway has received. Its finish is sent again."""
        self.num_sent_tokens = min(self.num_sent_tokens, max(num_received_tokens, self.first_token_index))
        self.is_finish_sent = False

    def outputs(self) -> list[Output]:
        """Return what the gateway lacks, in pieces that fit into a message. The last piece has the finish."""
        start, end = self.num_sent_tokens - self.first_token_index, len(self.token_ids)
        num_token_bytes = 4 if self.logprobs is None else 4 + logprob_bytes(self.logprobs.num_alternatives)
        most = MAX_OUTPUTS_BYTES // num_token_bytes or 1
        if end - start <= most:
            return [self._output(start, end, self.finish_reason)]
        *early, last = range(start, end, most)
        pieces = [self._output(first, first + most, None) for first in early]
        return [*pieces, self._output(last, end, self.finish_reason)]

    def _output(self, start: int, end: int, finish_reason: str | None) -> Output:
        first = self.first_token_index + start
        return Output(
            request_id=self.request_id,
            first_token_index=first,
            token_ids=self.token_ids[start:end].tobytes(),
            finish_reason=finish_reason,
            logprobs=self.logprobs.part(start, end) if self.logprobs is not None else None,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self.prompt_logprobs if first == 0 else None,
            error=self.error if finish_reason else None,
            embedding=self.embedding if finish_reason else b"",
        )

    def mark_sent(self, output: Output) -> bool:
        """Count an output as sent; return whether the gateway lacks nothing more."""
        self.num_sent_tokens = num_sent_tokens = output.first_token_index + len(output.token_ids) // 4
        self.is_finish_sent = output.finish_reason is not None
        return num_sent_tokens == self.num_tokens and (self.is_finish_sent or self.finish_reason is None)


@dataclass(slots=True)
class Gateway:
    """What the scheduler knows about one gateway's life."""

    identity: bytes
    hello_seq: int = 0
    last_heard_s: float = 0.0
    blocked_since_s: float | None = None  # when its queue stopped taking messages
    next_try_s: float = 0.0  # before this, nothing is sent to a blocked gateway
    listed: frozenset[str] = frozenset()  # request_ids of its last Hello
    records: dict[str, RequestRecord] = field(default_factory=dict)
    behind: dict[str, RequestRecord] = field(default_factory=dict)  # the `records` that lack something


@dataclass(frozen=True, slots=True)
class HelloOutcome:
    unknown: list[str]  # request_ids to submit again
    unwanted: list[int]  # seq_ids to abort


class Ledger:
    """All gateways and their requests. Times are seconds of one clock that the caller reads."""

    def __init__(self, peer_timeout_s: float) -> None:
        self.peer_timeout_s = peer_timeout_s
        self.gateways: dict[bytes, Gateway] = {}
        self._by_seq_id: dict[int, tuple[Gateway, RequestRecord]] = {}

    @property
    def num_records(self) -> int:
        return len(self._by_seq_id)

    def hello(self, identity: bytes, hello: Hello, now_s: float) -> HelloOutcome | None:
        """Return what follows from a Hello; None if a later Hello has overtaken it."""
        gateway = self.gateways.setdefault(identity, Gateway(identity))
        if hello.hello_seq <= gateway.hello_seq:
            return None
        gateway.hello_seq, gateway.last_heard_s = hello.hello_seq, now_s
        gateway.listed = frozenset(request_id for request_id, _ in hello.in_flight)
        unknown = []
        for request_id, num_received_tokens in hello.in_flight:
            record = gateway.records.get(request_id)
            if record is None:
                unknown.append(request_id)
            else:
                record.rewind(num_received_tokens)
                if record.is_behind:
                    gateway.behind[request_id] = record
        return HelloOutcome(unknown, self._forget_unlisted(gateway))

    def hear(self, identity: bytes, now_s: float) -> None:
        """Note that a known gateway is alive: it sent some message."""
        if gateway := self.gateways.get(identity):
            gateway.last_heard_s = now_s

    def _forget_unlisted(self, gateway: Gateway) -> list[int]:
        unlisted = [
            record
            for request_id, record in gateway.records.items()
            if request_id not in gateway.listed and record.hello_seq < gateway.hello_seq
        ]
        for record in unlisted:
            self._forget(gateway, record)
        return [record.seq_id for record in unlisted if record.finish_reason is None]

    def find(self, identity: bytes, request_id: str) -> RequestRecord | None:
        gateway = self.gateways.get(identity)
        return gateway.records.get(request_id) if gateway else None

    def is_wanted(self, identity: bytes, submit: Submit) -> bool:
        """Return whether the gateway is known, and no later Hello of it left the request out."""
        gateway = self.gateways.get(identity)
        if gateway is None:
            return False
        return submit.hello_seq >= gateway.hello_seq or submit.request_id in gateway.listed

    def admit(self, identity: bytes, submit: Submit, seq_id: int) -> None:
        """From now on, keep the output of sequence `seq_id` for a request of a known gateway."""
        gateway = self.gateways[identity]
        num_tokens = len(submit.output_token_ids) // 4
        record = RequestRecord(
            request_id=submit.request_id,
            seq_id=seq_id,
            hello_seq=submit.hello_seq,
            first_token_index=num_tokens,
            num_sent_tokens=num_tokens,
        )
        gateway.records[submit.request_id] = record
        self._by_seq_id[seq_id] = (gateway, record)

    def extend(self, update: Update) -> None:
        """Add new output. Output of a request that was forgotten is ignored."""
        known = self._by_seq_id.get(update.seq_id)
        if known is not None:
            gateway, record = known
            record.extend(update)
            if record.is_behind:
                gateway.behind[record.request_id] = record

    def gateways_behind(self, now_s: float) -> list[Gateway]:
        """Return the gateways that lack something and can be sent to now."""
        return [gateway for gateway in self.gateways.values() if gateway.behind and gateway.next_try_s <= now_s]

    def batches(self, gateway: Gateway) -> Iterator[tuple[Outputs, list[RequestRecord]]]:
        """Yield messages with everything the gateway lacks, each with the records of its outputs, for `mark_sent`."""
        outputs: list[Output] = []
        records: list[RequestRecord] = []
        num_bytes = 0
        for record in list(gateway.behind.values()):
            for output in record.outputs():
                num_output_bytes = _size_bytes(output)
                if outputs and num_bytes + num_output_bytes > MAX_OUTPUTS_BYTES:
                    yield Outputs(outputs), records
                    outputs, records, num_bytes = [], [], 0
                outputs.append(output)
                records.append(record)
                num_bytes += num_output_bytes
        if outputs:
            yield Outputs(outputs), records

    def mark_sent(self, gateway: Gateway, outputs: Outputs, records: list[RequestRecord]) -> None:
        gateway.blocked_since_s, gateway.next_try_s = None, 0.0
        for output, record in zip(outputs.outputs, records, strict=True):
            if record.mark_sent(output):
                gateway.behind.pop(record.request_id, None)

    def mark_blocked(self, gateway: Gateway, now_s: float) -> None:
        """Remember that the socket took nothing for the gateway."""
        if gateway.blocked_since_s is None:
            gateway.blocked_since_s = now_s
        gateway.next_try_s = now_s + RETRY_S

    def drop_dead(self, now_s: float, all_heard_s: float) -> dict[bytes, list[int]]:
        """Forget gateways that sent or read nothing for `peer_timeout_s`; return the seq_ids to abort of each.

        All messages that gateways had sent by `all_heard_s` were read.
        """
        dead = [gateway for gateway in self.gateways.values() if self._is_dead(gateway, now_s, all_heard_s)]
        return {gateway.identity: self._drop(gateway) for gateway in dead}

    def _is_dead(self, gateway: Gateway, now_s: float, all_heard_s: float) -> bool:
        is_blocked = gateway.blocked_since_s is not None and now_s - gateway.blocked_since_s > self.peer_timeout_s
        return is_blocked or all_heard_s - gateway.last_heard_s > self.peer_timeout_s

    def _drop(self, gateway: Gateway) -> list[int]:
        del self.gateways[gateway.identity]
        records = list(gateway.records.values())
        for record in records:
            self._forget(gateway, record)
        return [record.seq_id for record in records if record.finish_reason is None]

    def _forget(self, gateway: Gateway, record: RequestRecord) -> None:
        del gateway.records[record.request_id]
        gateway.behind.pop(record.request_id, None)
        del self._by_seq_id[record.seq_id]


def _size_bytes(output: Output) -> int:
    num_bytes = len(output.token_ids) + len(output.embedding) + 64
    if output.logprobs is not None:
        num_bytes += _logprobs_size_bytes(output.logprobs)
    if output.prompt_logprobs is not None:
        num_bytes += _logprobs_size_bytes(output.prompt_logprobs)
    return num_bytes


def _logprobs_size_bytes(logprobs: Logprobs) -> int:
    return 2 * len(logprobs.token_logprobs) + 2 * len(logprobs.top_logprobs)
