"""A gateway without HTTP: it keeps the protocol's rules, and remembers everything that a client would have seen."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import zmq

from octavo.protocol.link_keys import ClientKeys
from octavo.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Admitted,
    Hello,
    Logprobs,
    Output,
    Outputs,
    Ready,
    Rejected,
    Stats,
    Submit,
    ToGateway,
    Unknown,
    decode_to_gateway,
    encode,
    pack_ids,
    unpack_ids,
)
from octavo.protocol.sampling import Sampling
from octavo.protocol.sockets import connect_dealer, new_identity
from tests.fakes.peer_thread import PeerThread


@dataclass
class Stream:
    """One request, as its client sees it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    options: dict[str, object] = field(default_factory=dict)  # of the Submit
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    rejected: Rejected | None = None
    is_admitted: bool = False
    num_submits: int = 0
    submitted_s: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        assert not self.ended.is_set(), f"{self.request_id} ended twice"
        self.ended.set()


class FakeGateway(PeerThread):
    """One gateway's life, in a thread. `check` raises what it found wrong with what it was told."""

    def __init__(
        self,
        address: str,
        *,
        hello_interval_s: float = 0.05,
        resubmit_after_s: float = 0.3,
        high_water_mark: int = 1000,
        protocol_version: int = PROTOCOL_VERSION,
        keys: ClientKeys | None = None,
    ) -> None:
        super().__init__()
        self.address, self.keys = address, keys
        self.identity = new_identity()
        self.hello_interval_s = hello_interval_s
        self.resubmit_after_s = resubmit_after_s
        self.high_water_mark = high_water_mark
        self.protocol_version = protocol_version
        self.streams: dict[str, Stream] = {}
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.incarnations: list[str] = []  # of schedulers, as seen
        self.num_duplicates = 0  # tokens that came again
        self.num_gaps = 0
        self._in_flight: dict[str, Stream] = {}
        self._hello_seq = 0
        self._hello_sent_s = 0.0
        self._lock = threading.Lock()  # between the thread and those who start and abort streams
        self._outbox: list[Submit | Abort] = []
        self._reading = threading.Event()  # cleared: says Hello, and reads nothing
        self._reading.set()
        self._is_ready = threading.Event()
        self._has_stats = threading.Event()

    def stop_reading(self) -> None:
        self._reading.clear()

    def read_again(self) -> None:
        self._reading.set()

    def wait_ready(self, timeout_s: float = 10.0) -> Ready:
        assert self._is_ready.wait(timeout_s), "no Ready"
        assert self.ready is not None
        return self.ready

    def wait_stats(self, timeout_s: float = 10.0) -> Stats:
        """Return Stats that were sent after this was called."""
        self._has_stats.clear()
        assert self._has_stats.wait(timeout_s), "no Stats"
        assert self.stats is not None
        return self.stats

    def start(self, request_id: str, prompt_token_ids: Iterable[int], sampling: Sampling, **options: object) -> Stream:
        stream = Stream(request_id, list(prompt_token_ids), sampling, options)
        self.resume(stream)
        return stream

    def start_without_prompt(
        self, request_id: str, prompt_token_ids: Iterable[int], sampling: Sampling, **options: object
    ) -> Stream:
        """Start a request whose first Submit names its prompt only, as if another with its tokens had been lost."""
        stream = Stream(request_id, list(prompt_token_ids), sampling, options)
        with self._lock:
            self.streams[request_id] = self._in_flight[request_id] = stream
            self._submit(stream)
            self._outbox[-1] = msgspec.structs.replace(self._outbox[-1], prompt_token_ids=b"")
        return stream

    def resume(self, stream: Stream) -> None:
        """Submit a stream with the tokens that it has."""
        with self._lock:
            assert stream.request_id not in self.streams
            self.streams[stream.request_id] = self._in_flight[stream.request_id] = stream
            self._submit(stream)

    def abort(self, stream: Stream, *, stopped: bool = False) -> None:
        """Leave a stream, as a client that disconnects, or at a stop string: whatever comes later is ignored."""
        with self._lock:
            if not stream.ended.is_set():
                self._outbox.append(Abort(stream.request_id, stopped))
                self._end(stream, "stop" if stopped else "abort")

    def wait_turn(self) -> None:
        """Wait until something else may have arrived."""
        self.check()
        self._stop.wait(0.002)

    def wait_all(self, timeout_s: float = 30.0) -> None:
        """Wait until every stream has ended; raise what was found wrong."""
        deadline_s = time.monotonic() + timeout_s
        for stream in list(self.streams.values()):
            while not stream.ended.wait(0.1):
                self.check()
                assert time.monotonic() < deadline_s, (
                    f"{stream.request_id} has {len(stream.token_ids)} tokens and no end"
                )
        self.check()

    def _run(self) -> None:
        with (
            zmq.Context() as context,
            connect_dealer(
                context.socket(zmq.DEALER), self.address, self.identity, self.keys, high_water_mark=self.high_water_mark
            ) as socket,
        ):
            while not self._stop.is_set():
                self._running.wait()
                with self._lock:
                    try:
                        self._turn(socket)
                    except AssertionError as error:
                        self.error = error
                        return
                if self._reading.is_set():
                    socket.poll(2)
                else:
                    self._stop.wait(0.01)

    def _turn(self, socket: "zmq.Socket[bytes]") -> None:
        while self._reading.is_set() and socket.poll(0):
            self._on_message(decode_to_gateway(socket.recv()))
        now_s = time.monotonic()
        for stream in self._in_flight.values():
            if not stream.is_admitted and now_s - stream.submitted_s > self.resubmit_after_s:
                self._submit(stream)
        if now_s - self._hello_sent_s >= self.hello_interval_s:
            self._say_hello(socket, now_s)
        while self._outbox:
            socket.send(encode(self._outbox.pop(0)))

    def _say_hello(self, socket: "zmq.Socket[bytes]", now_s: float) -> None:
        self._hello_seq += 1
        in_flight = [(stream.request_id, len(stream.token_ids)) for stream in self._in_flight.values()]
        unanswered = [stream.request_id for stream in self._in_flight.values() if not stream.is_admitted]
        socket.send(encode(Hello(self.protocol_version, self.identity, self._hello_seq, in_flight, unanswered)))
        self._hello_sent_s = now_s

    def _submit(self, stream: Stream) -> None:
        stream.num_submits += 1
        stream.submitted_s = time.monotonic()
        stream.is_admitted = False
        self._outbox.append(
            Submit(
                stream.request_id,
                self._hello_seq,
                pack_ids(stream.prompt_token_ids),
                stream.sampling,
                pack_ids(stream.token_ids),
                **stream.options,
            )
        )

    def _on_message(self, message: ToGateway) -> None:
        match message:
            case Ready():
                self._on_ready(message)
            case Admitted(request_id):
                if request_id in self._in_flight:
                    self._in_flight[request_id].is_admitted = True
            case Rejected(request_id):
                if request_id in self._in_flight:
                    self._in_flight[request_id].rejected = message
                    self._end(self._in_flight[request_id], "rejected")
            case Outputs(outputs):
                for output in outputs:
                    if output.request_id in self._in_flight:
                        self._on_output(self._in_flight[output.request_id], output)
            case Unknown(request_ids):
                for request_id in request_ids:
                    if request_id in self._in_flight:
                        self._submit(self._in_flight[request_id])
            case Stats():
                self.stats = message
                self._has_stats.set()

    def _on_ready(self, ready: Ready) -> None:
        before, self.ready = self.ready, ready
        self._is_ready.set()
        if ready.scheduler_incarnation in self.incarnations:
            return  # the present one, or a message delayed past its sender's end
        self.incarnations.append(ready.scheduler_incarnation)
        for stream in list(self._in_flight.values()):
            if before is not None and before.model_fingerprint != ready.model_fingerprint:
                stream.error = "another model"
                self._end(stream, "error")
            elif stream.num_submits:
                self._submit(stream)

    def _on_output(self, stream: Stream, output: Output) -> None:
        stream.is_admitted = True
        token_ids = unpack_ids(output.token_ids).tolist()
        num_known = len(stream.token_ids) - output.first_token_index
        if num_known < 0:
            self.num_gaps += 1
            self._hello_sent_s = 0.0  # say at once what is here
            return
        repeated = token_ids[:num_known]
        known = stream.token_ids[output.first_token_index :][: len(repeated)]
        assert repeated == known, f"{stream.request_id}: token {output.first_token_index} and on were sent differently"
        self.num_duplicates += len(repeated)
        if output.first_token_index == 0 and output.prompt_logprobs is not None and stream.prompt_logprobs is None:
            stream.prompt_logprobs = output.prompt_logprobs
        if new := token_ids[num_known:]:
            stream.token_ids += new
            if output.logprobs is not None:
                logprobs = output.logprobs.tail(num_known)
                stream.logprobs = stream.logprobs + logprobs if stream.logprobs else logprobs
        stream.num_cached_tokens = max(stream.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason is not None:
            assert num_known <= len(token_ids), f"{stream.request_id}: the end came before tokens that are here"
            stream.error = output.error
            self._end(stream, output.finish_reason)

    def _end(self, stream: Stream, reason: str) -> None:
        stream.finish_reason = reason
        del self._in_flight[stream.request_id]
        stream.end()
