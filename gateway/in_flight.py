"""What a gateway has under way at one scheduler: which messages to send, and what arrived for the first time.

Pure: no socket and no clock. Whatever happens to single messages, each request is delivered every output token once
and one finish; `Hello` says what arrived, and the scheduler repeats the rest.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from protocol.messages import (
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
REPEAT_SUBMIT_S = 1.0

# A request is delivered one Admitted and then Outputs without gap or overlap up to a finish; or a Rejected, or, at any
# time, an Output that ends it with an error.
Event = Admitted | Rejected | Output


@dataclass(slots=True)
class Request:
    """One request that has not ended, and all that arrived for it."""

    submit: Submit
    deliver: Callable[[Event], None]
    repeat_submit_at_s: float  # unless answered before; inf once it is
    output_token_ids: bytearray = field(default_factory=bytearray)
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
        self._hello_seq = 0
        self._next_hello_s = -math.inf
        self._next_gap_hello_s = -math.inf
        self._past_incarnations: deque[str] = deque(maxlen=16)
        self.ready: Ready | None = None
        self.stats: Stats | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, submit: Submit, deliver: Callable[[Event], None], now_s: float) -> list[ToScheduler]:
        """Take on a new request, whose events go to `deliver`."""
        submit = msgspec.structs.replace(submit, hello_seq=self._hello_seq)
        self._requests[submit.request_id] = Request(submit, deliver, now_s + REPEAT_SUBMIT_S)
        return [submit]

    def abandon(self, request_id: str, *, stopped: bool = False) -> list[ToScheduler]:
        """Forget a request; what still arrives for it is dropped. If it was under way, it is aborted."""
        return [Abort(request_id, stopped)] if self._requests.pop(request_id, None) else []

    def due(self, now_s: float, *, seek: bool = False) -> list[ToScheduler]:
        """Return the repeated Submits whose time has come, and Hello if its time has or to `seek` a scheduler."""
        messages = [
            self._resubmit(request, now_s) for request in self._requests.values() if request.repeat_submit_at_s <= now_s
        ]
        return [*messages, *(self._hello(now_s) if seek or self._next_hello_s <= now_s else [])]

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
            case Unknown(request_ids):
                return self._unknown(request_ids, now_s)
            case Ready():
                return self._ready(message, now_s)
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
        return [Hello(PROTOCOL_VERSION, self._gateway_id, self._hello_seq, listed)]

    def _end(self, request: Request, error: str) -> None:
        request_id = request.submit.request_id
        del self._requests[request_id]
        request.deliver(Output(request_id, request.num_received_tokens, finish_reason="error", error=error))

    def _resubmit(self, request: Request, now_s: float) -> Submit:
        request.repeat_submit_at_s = now_s + REPEAT_SUBMIT_S
        request.submit = msgspec.structs.replace(
            request.submit, hello_seq=self._hello_seq, output_token_ids=bytes(request.output_token_ids)
        )
        return request.submit

    def _admit(self, request: Request) -> None:
        request.repeat_submit_at_s = math.inf
        if not request.admitted:
            request.admitted = True
            request.deliver(Admitted(request.submit.request_id))

    def _rejected(self, message: Rejected, now_s: float) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.repeat_submit_at_s == math.inf:
            return  # overtaken by the answer to a repeated Submit
        if not request.admitted:
            del self._requests[message.request_id]
            request.deliver(message)
        elif message.retry_after_s is not None:
            # It streams already and must go on: a new scheduler that is full is asked again.
            request.repeat_submit_at_s = now_s + message.retry_after_s
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
                del self._requests[output.request_id]
            request.deliver(output)
        return True

    def _unknown(self, request_ids: list[str], now_s: float) -> list[ToScheduler]:
        requests = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        # Where a Submit is on its way, or is to wait because the scheduler was full, its own time decides.
        return [self._resubmit(request, now_s) for request in requests if request.repeat_submit_at_s == math.inf]

    def _ready(self, ready: Ready, now_s: float) -> list[ToScheduler]:
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
        return [self._resubmit(request, now_s) for request in self._requests.values()]


def _without_known(output: Output, num_known_tokens: int, prompt_logprobs_known: bool) -> Output:
    """Return `output` less its first tokens, of which there may be fewer."""
    return msgspec.structs.replace(
        output,
        first_token_index=output.first_token_index + num_known_tokens,
        token_ids=output.token_ids[4 * num_known_tokens :],
        logprobs=output.logprobs and output.logprobs.tail(num_known_tokens),
        prompt_logprobs=None if prompt_logprobs_known else output.prompt_logprobs,
    )
