"""The gateways' side: what they send becomes calls of the scheduler, what it makes becomes Outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import zmq

from protocol.config import Config
from protocol.messages import (
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
from protocol.sockets import try_send
from scheduler.admission import SubmitError, make_prompt, make_sequence
from scheduler.delivery import Ledger
from scheduler.finish_rate import FinishRate
from scheduler.inbox import Inbox
from scheduler.measures import Measures
from scheduler.scheduler import Prompt, Scheduler

MAX_MESSAGES_A_TURN = 64
MAX_REFUSED_GATEWAYS = 1024


@dataclass(frozen=True, slots=True)
class Service:
    """What gateways are offered, from when an executor has said what it holds."""

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
        self._service: Service | None = None
        self._next_seq_id = 1
        # By gateway, the name that it gave, and what else a cached block depends on; as long as a sequence has it.
        self._prompts: WeakValueDictionary[tuple[bytes, str, str, str], Prompt] = WeakValueDictionary()
        self._drained_s = clock()  # when nothing that gateways sent was left unread
        self._refused_identities: set[bytes] = set()
        self.ledger = Ledger(config.peer_timeout_s)
        self.finish_rate = FinishRate()

    def offer(self, service: Service) -> None:
        """Serve with `service` from now on; what another one had in flight is forgotten."""
        self._service = service
        self.ledger = Ledger(self._peer_timeout_s)

    def receive(self) -> bool:
        """Take a bounded number of messages; return whether any came that can change what is planned next."""
        has_changed = False
        for identity, message in self._inbox.take(MAX_MESSAGES_A_TURN):
            if self._is_refused(identity, message) or self._service is None:
                continue
            has_changed = True
            self.ledger.hear(identity, self._clock())
            match message:
                case Hello():
                    self._on_hello(identity, message, self._service)
                case Submit():
                    self._on_submit(identity, message, self._service)
                case Abort(request_id, stopped):
                    record = self.ledger.find(identity, request_id)
                    if record is not None:
                        self._service.scheduler.abort(record.seq_id, "stop" if stopped else "abort")
        if self._inbox.is_drained:
            self._drained_s = self._clock()
        return has_changed

    def deliver(self) -> None:
        """Send each gateway what it lacks, as far as its queue takes it."""
        if self._service is None:
            return
        updates, now_s = self._service.scheduler.take_updates(), self._clock()
        for update in updates:
            self.ledger.extend(update)
        self._service.measures.progress(updates, now_s)
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
        """Abort what gateways that are dead had in flight; return each with how many sequences that was.

        A gateway is not silent if what it said has not been read yet.
        """
        dead = self.ledger.drop_dead(self._clock(), self._drained_s)
        for seq_ids in dead.values():
            for seq_id in seq_ids:
                if self._service is not None:
                    self._service.scheduler.abort(seq_id)
        return [(identity, len(seq_ids)) for identity, seq_ids in dead.items()]

    @property
    def next_try_s(self) -> float | None:
        """When to try again to send to gateways whose queue was full, None if there is none."""
        return min((gateway.next_try_s for gateway in self.ledger.gateways.values() if gateway.behind), default=None)

    def _is_refused(self, identity: bytes, message: Message) -> bool:
        """Return whether the gateway speaks another version of the protocol; if so, tell it and the operator."""
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

    def _on_hello(self, identity: bytes, hello: Hello, service: Service) -> None:
        self._send(identity, service.ready())
        outcome = self.ledger.hello(identity, hello, self._clock())
        if outcome is None:
            return
        for seq_id in outcome.unwanted:
            service.scheduler.abort(seq_id)
        if outcome.unknown:
            self._send(identity, Unknown(outcome.unknown, hello.hello_seq))
        for request_id in hello.unanswered:
            if self.ledger.find(identity, request_id) is not None:
                self._send(identity, Admitted(request_id))

    def _on_submit(self, identity: bytes, submit: Submit, service: Service) -> None:
        if not self.ledger.is_wanted(identity, submit):
            return  # whoever does want it lists it in a Hello, and is told that it is unknown
        if self.ledger.find(identity, submit.request_id) is not None:
            self._send(identity, Admitted(submit.request_id))
        elif answer := self._admit(identity, submit, service):
            self._send(identity, answer)

    def _admit(self, identity: bytes, submit: Submit, service: Service) -> Admitted | Rejected | None:
        """Return the answer to a new Submit; None, and nothing is begun, if its prompt has to come first."""
        scheduler = service.scheduler
        try:
            prompt = self._prompt(identity, submit, service.vocab_size)
            if prompt is None:
                return None
            sequence = make_sequence(submit, prompt, self._next_seq_id, service.vocab_size)
        except SubmitError as error:
            return Rejected(submit.request_id, str(error))
        refusal = scheduler.refusal(sequence)
        # What was admitted in an earlier life is not turned away for a queue that it helps to fill.
        if refusal is not None and not (refusal.temporary and submit.output_token_ids):
            retry_after_s = self.finish_rate.retry_after_s(scheduler.num_waiting) if refusal.temporary else None
            return Rejected(submit.request_id, refusal.reason, retry_after_s)
        self._next_seq_id += 1
        self.ledger.admit(identity, submit, sequence.seq_id)
        service.measures.arrive(sequence.seq_id, self._clock())
        scheduler.add(sequence)
        return Admitted(submit.request_id)

    def _prompt(self, identity: bytes, submit: Submit, vocab_size: int) -> Prompt | None:
        """Return the prompt that `submit` brings, or names; None if that is not here."""
        if not submit.prompt_id:
            return make_prompt(submit, vocab_size)
        key = (identity, submit.prompt_id, submit.tenant, submit.cache_salt)
        prompt = self._prompts.get(key)
        if prompt is None and submit.prompt_token_ids:
            prompt = self._prompts[key] = make_prompt(submit, vocab_size)
        return prompt

    def _send(self, identity: bytes, message: Message) -> None:
        """Send, or lose it: whoever misses it asks again."""
        try_send(self._socket, [identity, encode(message)])
