"""What a gateway has under way at one scheduler: which messages to send, and what arrived for the first time.

Pure: no socket and no clock. Whatever happens to single messages, each request is delivered every output token once
and one finish; `Hello` says what arrived, and the scheduler repeats the rest.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from octavo.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Admitted,
    Hello,
    Output,
    Outputs,
    Ready,
    Rejected,
    Stats,
    Submit,
    ToGateway,
    ToScheduler,
    Unknown,
)

HELLO_INTERVAL_S = 0.5
GAP_HELLO_INTERVAL_S = 0.05  # what one Hello asks for again is on its way for about this long

# A request is delivered one Admitted and then Outputs without gap or overlap up to a finish; or a Rejected, or, at any
# time, an Output that ends it with an error.
Event = Admitted | Rejected | Output


@dataclass(slots=True)
class Request:
    """One request that has not ended, and all that arrived for it."""

    submit: Submit  # the last one, with its prompt's tokens whether or not they were sent again
    deliver: Callable[[Event], None]
    output_token_ids: bytearray = field(default_factory=bytearray)
    answered: bool = False  # the last Submit
    retry_at_s: float = math.inf  # when to ask a scheduler again that was full
    admitted: bool = False  # at any scheduler, once
    prompt_logprobs_arrived: bool = False

    @property
    def num_received_tokens(self) -> int:
        return len(self.output_token_ids) // 4


class InFlight:
    """The requests of one gateway at one scheduler; every method returns what to send now."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._requests: dict[str, Request] = {}
        self._num_requests_of: Counter[str] = Counter()  # by prompt_id
        self._hello_seq = 0
        self._next_hello_s = -math.inf
        self._next_gap_hello_s = -math.inf
        self._past_incarnations: deque[str] = deque(maxlen=16)
        self.ready: Ready | None = None
        self.stats: Stats | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, submit: Submit, deliver: Callable[[Event], None]) -> list[ToScheduler]:
        """Take on a new request, whose events go to `deliver`."""
        is_prompt_known = self._num_requests_of[submit.prompt_id] > 0
        request = self._requests[submit.request_id] = Request(submit, deliver)
        if submit.prompt_id:
            self._num_requests_of[submit.prompt_id] += 1
        return self._submits([request], {submit.prompt_id} if is_prompt_known else ())

    def abandon(self, request_id: str, *, stopped: bool = False) -> list[ToScheduler]:
        """Forget a request; what still arrives for it is dropped. If it was under way, it is aborted."""
        return [Abort(request_id, stopped)] if self._forget(request_id) else []

    def due(self, now_s: float, *, seek: bool = False) -> list[ToScheduler]:
        """Return the Submits to a scheduler that was full, and Hello if its time has come or to `seek` a scheduler."""
        full = [request for request in self._requests.values() if request.retry_at_s <= now_s]
        return [*self._submits(full), *(self._hello(now_s) if seek or self._next_hello_s <= now_s else [])]

    def receive(self, message: ToGateway, now_s: float) -> list[ToScheduler]:
        """Deliver what `message` brings that is new, and return what it asks for."""
        match message:
            case Outputs(outputs):
                gaps = [output for output in outputs if not self._output(output)]
                return self._hello(now_s) if gaps and self._next_gap_hello_s <= now_s else []
            case Admitted(request_id):
                if request := self._requests.get(request_id):
                    self._admit(request)
            case Rejected():
                self._rejected(message, now_s)
            case Unknown(request_ids, hello_seq):
                return self._unknown(request_ids, hello_seq)
            case Ready():
                return self._ready(message)
            case Stats(scheduler_incarnation) if scheduler_incarnation not in self._past_incarnations:
                self.stats = message
        return []

    def fail(self, error: str, *, only_new: bool = False) -> list[ToScheduler]:
        """End all requests, or only those not yet admitted, with `error`."""
        failed = [request for request in self._requests.values() if not (only_new and request.admitted)]
        for request in failed:
            self._end(request, error)
        return [Abort(request.submit.request_id) for request in failed]

    def _hello(self, now_s: float) -> list[ToScheduler]:
        self._hello_seq += 1
        self._next_hello_s = now_s + HELLO_INTERVAL_S
        self._next_gap_hello_s = now_s + GAP_HELLO_INTERVAL_S
        listed = [(request_id, request.num_received_tokens) for request_id, request in self._requests.items()]
        unanswered = [request_id for request_id, request in self._requests.items() if not request.answered]
        return [Hello(PROTOCOL_VERSION, self._gateway_id, self._hello_seq, listed, unanswered)]

    def _end(self, request: Request, error: str) -> None:
        request_id = request.submit.request_id
        self._forget(request_id)
        request.deliver(Output(request_id, request.num_received_tokens, finish_reason="error", error=error))

    def _forget(self, request_id: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        if request is not None and (prompt_id := request.submit.prompt_id):
            self._num_requests_of[prompt_id] -= 1
            if not self._num_requests_of[prompt_id]:
                del self._num_requests_of[prompt_id]
        return request

    def _submits(self, requests: Iterable[Request], known_prompt_ids: Iterable[str] = ()) -> list[ToScheduler]:
        """Return Submits of `requests` with what they have by now; the tokens of each prompt stand in one of them."""
        messages: list[ToScheduler] = []
        known = set(known_prompt_ids)
        for request in requests:
            request.answered, request.retry_at_s = False, math.inf
            submit = request.submit = msgspec.structs.replace(
                request.submit, hello_seq=self._hello_seq, output_token_ids=bytes(request.output_token_ids)
            )
            messages.append(
                msgspec.structs.replace(submit, prompt_token_ids=b"") if submit.prompt_id in known else submit
            )
            if submit.prompt_id:
                known.add(submit.prompt_id)
        return messages

    def _admit(self, request: Request) -> None:
        request.answered = True
        if not request.admitted:
            request.admitted = True
            request.deliver(Admitted(request.submit.request_id))

    def _rejected(self, message: Rejected, now_s: float) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.answered:
            return  # overtaken by the answer to a repeated Submit
        request.answered = True
        if not request.admitted:
            self._forget(message.request_id)
            request.deliver(message)
        elif message.retry_after_s is not None:
            # It streams already and must go on: a new scheduler that is full is asked again.
            request.retry_at_s = now_s + message.retry_after_s
        else:
            self._end(request, f"the scheduler was restarted and refuses to go on: {message.reason}")

    def _output(self, output: Output) -> bool:
        """Deliver what is new of `output`; return False if something before it is missing."""
        request = self._requests.get(output.request_id)
        if request is None:
            return True
        num_known_tokens = request.num_received_tokens - output.first_token_index
        if num_known_tokens < 0:
            return False
        self._admit(request)
        if num_known_tokens or (output.prompt_logprobs and request.prompt_logprobs_arrived):
            output = _without_known(output, num_known_tokens, request.prompt_logprobs_arrived)
        if output.token_ids or output.finish_reason or output.prompt_logprobs:
            request.output_token_ids += output.token_ids
            request.prompt_logprobs_arrived |= output.prompt_logprobs is not None
            if output.finish_reason:
                self._forget(output.request_id)
            request.deliver(output)
        return True

    def _unknown(self, request_ids: list[str], hello_seq: int) -> list[ToScheduler]:
        requests = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        # A Submit since that Hello is on its way; one that is to wait because the scheduler was full has its own time.
        lost = [r for r in requests if r.submit.hello_seq < hello_seq and r.retry_at_s == math.inf]
        return self._submits(lost)

    def _ready(self, ready: Ready) -> list[ToScheduler]:
        if ready.scheduler_incarnation in self._past_incarnations:
            return []  # was under way when the next one took over
        before, self.ready = self.ready, ready
        if before is None:
            return []
        if before.model_fingerprint != ready.model_fingerprint:
            return self.fail("the model was replaced while this request ran")
        if before.scheduler_incarnation == ready.scheduler_incarnation:
            return []
        self._past_incarnations.append(before.scheduler_incarnation)
        return self._submits(self._requests.values())


def _without_known(output: Output, num_known_tokens: int, prompt_logprobs_known: bool) -> Output:
    """Return `output` less its first tokens, of which there may be fewer."""
    return msgspec.structs.replace(
        output,
        first_token_index=output.first_token_index + num_known_tokens,
        token_ids=output.token_ids[4 * num_known_tokens :],
        logprobs=output.logprobs and output.logprobs.tail(num_known_tokens),
        prompt_logprobs=None if prompt_logprobs_known else output.prompt_logprobs,
    )
