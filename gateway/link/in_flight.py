"""The requests that a gateway has in flight at one scheduler: which messages to send, and which events are new.

Pure: no socket and no clock. Messages may be lost or repeated; each request still gets every output token once and one
finish. `Hello` tells the scheduler which tokens arrived, and the scheduler repeats the others.
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
GAP_HELLO_INTERVAL_S = 0.05  # tokens that a Hello asks for again take about this long to arrive

# A request gets one Admitted and then Outputs without gap or overlap until a finish; or one Rejected. An Output with an
# error can end it at any time.
Event = Admitted | Rejected | Output


@dataclass(slots=True)
class RequestInFlight:
    """A request that has not ended, and its output so far."""

    submit: Submit  # the last one, always with the prompt's tokens, which are not always sent again
    deliver: Callable[[Event], None]
    output_token_ids: bytearray = field(default_factory=bytearray)
    answered: bool = False  # whether the last Submit was answered
    retry_at_s: float = math.inf  # when to submit again to a scheduler that was full
    admitted: bool = False  # whether any scheduler has ever admitted the request
    prompt_logprobs_arrived: bool = False

    @property
    def num_received_tokens(self) -> int:
        return len(self.output_token_ids) // 4


class InFlight:
    """The requests of one gateway at one scheduler. Every method returns the messages to send now."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._requests: dict[str, RequestInFlight] = {}
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
        """Add a new request, whose events go to `deliver`."""
        is_prompt_known = self._num_requests_of[submit.prompt_id] > 0
        request = self._requests[submit.request_id] = RequestInFlight(submit, deliver)
        if submit.prompt_id:
            self._num_requests_of[submit.prompt_id] += 1
        return self._submits([request], {submit.prompt_id} if is_prompt_known else ())

    def abandon(self, request_id: str, *, stopped: bool = False) -> list[ToScheduler]:
        """Forget a request; later events of it are dropped. If the request has not ended, it is aborted."""
        return [Abort(request_id, stopped)] if self._forget(request_id) else []

    def due(self, now_s: float, *, seek: bool = False) -> list[ToScheduler]:
        """Return the Submits to repeat after a scheduler was full, and a Hello if it is due or if `seek` is true."""
        full = [request for request in self._requests.values() if request.retry_at_s <= now_s]
        return [*self._submits(full), *(self._hello(now_s) if seek or self._next_hello_s <= now_s else [])]

    def receive(self, message: ToGateway, now_s: float) -> list[ToScheduler]:
        """Deliver the new events in `message`, and return the messages that it calls for."""
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
        """End all requests with `error`, or only the requests that were never admitted."""
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
        return [
            Hello(
                protocol_version=PROTOCOL_VERSION,
                gateway_id=self._gateway_id,
                hello_seq=self._hello_seq,
                in_flight=listed,
                unanswered=unanswered,
            )
        ]

    def _end(self, request: RequestInFlight, error: str) -> None:
        request_id = request.submit.request_id
        self._forget(request_id)
        request.deliver(Output(request_id, request.num_received_tokens, finish_reason="error", error=error))

    def _forget(self, request_id: str) -> RequestInFlight | None:
        request = self._requests.pop(request_id, None)
        if request is not None and (prompt_id := request.submit.prompt_id):
            self._num_requests_of[prompt_id] -= 1
            if not self._num_requests_of[prompt_id]:
                del self._num_requests_of[prompt_id]
        return request

    def _submits(self, requests: Iterable[RequestInFlight], known_prompt_ids: Iterable[str] = ()) -> list[ToScheduler]:
        """Return Submits of `requests` with their output so far. Only one Submit has the tokens of a shared prompt."""
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

    def _admit(self, request: RequestInFlight) -> None:
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
            # The request streams already and must go on: ask a new scheduler that is full again later.
            request.retry_at_s = now_s + message.retry_after_s
        else:
            self._end(request, f"the scheduler was restarted and refuses to go on: {message.reason}")

    def _output(self, output: Output) -> bool:
        """Deliver the new part of `output`; return False if tokens before it are missing."""
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
        # A Submit after this Hello is on its way; a request that was rejected for now waits until `retry_at_s`.
        lost = [r for r in requests if r.submit.hello_seq < hello_seq and r.retry_at_s == math.inf]
        return self._submits(lost)

    def _ready(self, ready: Ready) -> list[ToScheduler]:
        if ready.scheduler_incarnation in self._past_incarnations:
            return []  # sent before the next incarnation took over
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
    """Return `output` without its first `num_known_tokens` tokens; it may have fewer tokens."""
    return msgspec.structs.replace(
        output,
        first_token_index=output.first_token_index + num_known_tokens,
        token_ids=output.token_ids[4 * num_known_tokens :],
        logprobs=output.logprobs and output.logprobs.tail(num_known_tokens),
        prompt_logprobs=None if prompt_logprobs_known else output.prompt_logprobs,
    )
