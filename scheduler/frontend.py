"""The gateways' side: messages of gateways become calls of the scheduler, its updates become Outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import zmq

from octavo.protocol.config import Config
from octavo.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Admitted,
    Hello,
    Message,
    Ready,
    Rejected,
    Stats,
    Submit,
    Unknown,
    decode_to_scheduler,
    encode,
)
from octavo.protocol.sockets import try_send
from octavo.scheduler.admission import SubmitError, make_prompt, make_sequence
from octavo.scheduler.delivery import Ledger
from octavo.scheduler.finish_rate import FinishRate
from octavo.scheduler.inbox import Inbox
from octavo.scheduler.measures import Measures
from octavo.scheduler.scheduler import Prompt, Scheduler

MAX_MESSAGES_A_TURN = 64
MAX_REFUSED_GATEWAYS = 1024


@dataclass(frozen=True, slots=True)
class Offer:
    """What gateways are offered once an executor has said which model it holds."""

    scheduler: Scheduler
    vocab_size: int
    ready: Callable[[], Ready]
    measures: Measures


class Frontend:
    """All gateways of one scheduler."""

    def __init__(self, socket: "zmq.Socket[bytes]", config: Config, clock: Callable[[], float]) -> None:
        self._socket = socket
        self._inbox = Inbox(socket, decode_to_scheduler, "a gateway", clock)
        self._clock = clock
        self._peer_timeout_s = config.peer_timeout_s
        self._offer: Offer | None = None
        self._next_seq_id = 1
        # By gateway, its prompt_id, tenant and cache salt; a prompt stays as long as a sequence has it.
        self._prompts: WeakValueDictionary[tuple[bytes, str, str, str], Prompt] = WeakValueDictionary()
        self._drained_s = clock()  # when all that gateways had sent was read
        self._refused_identities: set[bytes] = set()
        self.ledger = Ledger(config.peer_timeout_s)
        self.finish_rate = FinishRate()

    def offer(self, offer: Offer) -> None:
        """Serve with `offer` from now on. Requests in flight of an earlier offer are forgotten."""
        self._offer = offer
        self.ledger = Ledger(self._peer_timeout_s)

    def receive(self) -> bool:
        """Take a bounded number of messages; return whether one of them can change the next plan."""
        has_changed = False
        for identity, message in self._inbox.take(MAX_MESSAGES_A_TURN):
            if self._is_refused(identity, message) or self._offer is None:
                continue
            has_changed = True
            self.ledger.hear(identity, self._clock())
            match message:
                case Hello():
                    self._on_hello(identity, message, self._offer)
                case Submit():
                    self._on_submit(identity, message, self._offer)
                case Abort(request_id, stopped):
                    record = self.ledger.find(identity, request_id)
                    if record is not None:
                        self._offer.scheduler.abort(record.seq_id, "stop" if stopped else "abort")
        if self._inbox.is_drained:
            self._drained_s = self._clock()
        return has_changed

    def deliver(self) -> None:
        """Send each gateway what it lacks, until its queue is full."""
        if self._offer is None:
            return
        updates, now_s = self._offer.scheduler.take_updates(), self._clock()
        for update in updates:
            self.ledger.extend(update)
        self._offer.measures.progress(updates, now_s)
        for gateway in self.ledger.gateways_behind(now_s):
            for outputs, records in self.ledger.batches(gateway):
                if not try_send(self._socket, [gateway.identity, encode(outputs)]):
                    self.ledger.mark_blocked(gateway, now_s)
                    break
                self.ledger.mark_sent(gateway, outputs, records)

    def broadcast(self, stats: Stats) -> None:
        for identity in self.ledger.gateways:
            self._send(identity, stats)

    def drop_dead(self) -> list[tuple[bytes, int]]:
        """Abort the sequences of dead gateways; return each gateway with the number of its aborted sequences.

        A gateway is not silent as long as its messages have not been read.
        """
        dead = self.ledger.drop_dead(self._clock(), self._drained_s)
        for seq_ids in dead.values():
            for seq_id in seq_ids:
                if self._offer is not None:
                    self._offer.scheduler.abort(seq_id)
        return [(identity, len(seq_ids)) for identity, seq_ids in dead.items()]

    @property
    def next_try_s(self) -> float | None:
        """When to try again to send to a gateway whose queue was full; None if there is no such gateway."""
        return min((gateway.next_try_s for gateway in self.ledger.gateways.values() if gateway.behind), default=None)

    def _is_refused(self, identity: bytes, message: Message) -> bool:
        """Return whether to drop a message: its gateway has another protocol version, or another socket's identity."""
        match message:
            case Hello(gateway_id=gateway_id) if gateway_id.encode() != identity:
                self._inbox.complain(f"gateway {gateway_id} has another socket's identity")
                return True
            case Hello(protocol_version, gateway_id) if protocol_version != PROTOCOL_VERSION:
                if len(self._refused_identities) < MAX_REFUSED_GATEWAYS:
                    self._refused_identities.add(identity)
                self._inbox.complain(
                    f"gateway {gateway_id} speaks protocol {protocol_version}, this scheduler {PROTOCOL_VERSION}"
                )
                return True
            case Submit(request_id) if identity in self._refused_identities:
                reason = f"the gateway speaks another protocol than the scheduler, whose version is {PROTOCOL_VERSION}"
                self._send(identity, Rejected(request_id, reason))
        return identity in self._refused_identities

    def _on_hello(self, identity: bytes, hello: Hello, offer: Offer) -> None:
        self._send(identity, offer.ready())
        outcome = self.ledger.hello(identity, hello, self._clock())
        if outcome is None:
            return
        for seq_id in outcome.unwanted:
            offer.scheduler.abort(seq_id)
        if outcome.unknown:
            self._send(identity, Unknown(outcome.unknown, hello.hello_seq))
        for request_id in hello.unanswered:
            if self.ledger.find(identity, request_id) is not None:
                self._send(identity, Admitted(request_id))

    def _on_submit(self, identity: bytes, submit: Submit, offer: Offer) -> None:
        if not self.ledger.is_wanted(identity, submit):
            return  # a gateway that still wants it lists it in a Hello, and is told that it is unknown
        if self.ledger.find(identity, submit.request_id) is not None:
            self._send(identity, Admitted(submit.request_id))
        elif answer := self._admit(identity, submit, offer):
            self._send(identity, answer)

    def _admit(self, identity: bytes, submit: Submit, offer: Offer) -> Admitted | Rejected | None:
        """Return the answer to a new Submit. None: its prompt must come first, so the Submit is dropped."""
        scheduler = offer.scheduler
        try:
            prompt = self._prompt(identity, submit, offer.vocab_size)
            if prompt is None:
                return None
            sequence = make_sequence(submit, prompt, self._next_seq_id, offer.vocab_size)
        except SubmitError as error:
            return Rejected(submit.request_id, str(error))
        refusal = scheduler.refusal(sequence)
        # A request that an earlier life admitted is not turned away because the queue is full: it was in that queue.
        if refusal is not None and not (refusal.temporary and submit.output_token_ids):
            retry_after_s = self.finish_rate.retry_after_s(scheduler.num_waiting) if refusal.temporary else None
            return Rejected(submit.request_id, refusal.reason, retry_after_s)
        self._next_seq_id += 1
        self.ledger.admit(identity, submit, sequence.seq_id)
        offer.measures.arrive(sequence.seq_id, self._clock())
        scheduler.add(sequence)
        return Admitted(submit.request_id)

    def _prompt(self, identity: bytes, submit: Submit, vocab_size: int) -> Prompt | None:
        """Return the prompt that `submit` brings or names; None if a named prompt is not here."""
        if not submit.prompt_id:
            return make_prompt(submit, vocab_size)
        key = (identity, submit.prompt_id, submit.tenant, submit.cache_salt)
        prompt = self._prompts.get(key)
        if prompt is None and submit.prompt_token_ids:
            prompt = self._prompts[key] = make_prompt(submit, vocab_size)
        return prompt

    def _send(self, identity: bytes, message: Message) -> None:
        """Send a message, or lose it: a gateway that misses it asks again."""
        try_send(self._socket, [identity, encode(message)])
