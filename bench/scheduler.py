"""`octavo bench scheduler`: what one step costs the scheduler's process, part by part, in CPU time of its thread.

The scheduler, its frontend and one gateway on a real socket, all in this thread, and an executor that answers at once.
"""

import argparse
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import zmq

from octavo.bench.flags import not_negative, positive
from octavo.bench.results import write_results
from octavo.protocol.config import Config
from octavo.protocol.messages import (
    PROTOCOL_VERSION,
    Admitted,
    Hello,
    Message,
    Outputs,
    Ready,
    SequenceResult,
    Step,
    StepResult,
    Submit,
    decode_from_executor,
    decode_to_executor,
    decode_to_gateway,
    encode,
    unpack_ids,
)
from octavo.protocol.sampling import Sampling
from octavo.protocol.sockets import bind_router, connect_dealer
from octavo.scheduler.frontend import Frontend, Offer
from octavo.scheduler.measures import Measures
from octavo.scheduler.scheduler import Limits, PlannedStep, Scheduler

SUMMARY = "time the scheduler's work for a step"
PARTS = ("schedule", "apply", "encode step", "decode step", "encode result", "decode result", "deliver")
TOTALS = {
    "schedule + apply": ("schedule", "apply"),
    "encode + decode": ("encode step", "decode step", "encode result", "decode result"),
}
SHOWN = (*TOTALS, "deliver")
VOCAB_SIZE, TOKEN_ID = 49_152, 1_000
MAX_NUM_BATCHED_TOKENS = 8192
ADDRESS = "inproc://frontend"
NUM_WARM_UP_STEPS = 20
NUM_STEPS_A_HELLO = 20
SHORT_PROMPT_TOKENS, SHORT_OUTPUT_TOKENS = 32, 2

Times = Mapping[str, Sequence[float]]  # milliseconds of each step, by part


def describe(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time what the scheduler does for one decode step: planning it, applying its result, the messages to and from"
        " the executor, and handing the tokens to a gateway. CPU time of one thread, in milliseconds."
    )
    parser.add_argument("--num-seqs", type=positive, default=256, metavar="N", help="running sequences (default: 256)")
    parser.add_argument(
        "--context", type=positive, default=4096, metavar="TOKENS", help="prompt of each (default: 4096)"
    )
    parser.add_argument("--block-size", type=positive, default=16, metavar="TOKENS", help="of a KV block (default: 16)")
    parser.add_argument("--steps", type=positive, default=200, metavar="N", help="steps to time (default: 200)")
    parser.add_argument(
        "--finished",
        type=not_negative,
        nargs="+",
        default=[0, 1000, 10_000],
        metavar="N",
        help="requests to finish before; one row each (default: 0 1000 10000)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    parser.set_defaults(run=run)


def run(flags: Mapping[str, Any]) -> int:
    num_seqs, context, num_steps = flags["num_seqs"], flags["context"], flags["steps"]
    nums_finished = sorted(flags["finished"])
    rows = []
    num_timed_steps = (num_steps + NUM_WARM_UP_STEPS) * len(nums_finished)
    with open_rig(num_seqs, context, flags["block_size"], num_timed_steps, max(nums_finished)) as rig:
        for num_finished in nums_finished:
            rig.finish_requests(num_finished - rig.num_finished)
            rig.run(NUM_WARM_UP_STEPS)
            rows.append({"num_finished": rig.num_finished, "ms": summary(rig.run(num_steps))})
    print(f"{num_seqs} sequences of {context} tokens, {num_steps} steps; milliseconds of CPU time a step\n")
    print(table(rows))
    if flags["json"]:
        write_results(flags["json"], "scheduler", flags, rows)
    return 0


@contextmanager
def open_rig(num_seqs: int, context: int, block_size: int, num_steps: int, num_finished: int) -> Iterator["Rig"]:
    """Yield a rig with `num_seqs` running sequences, and room for so many steps and requests beside them."""
    max_tokens = num_steps + num_seqs * context // MAX_NUM_BATCHED_TOKENS + 8 * (num_finished // num_seqs + 2)
    num_blocks = num_seqs * (-(-(context + max_tokens) // block_size) + -(-4 * SHORT_PROMPT_TOKENS // block_size))
    limits = Limits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=1 << 20,
        max_num_seqs=2 * num_seqs,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_waiting_seqs=2 * num_seqs,
    )
    with (
        zmq.Context() as sockets,
        bind_router(sockets, ADDRESS) as router,
        connect_dealer(sockets.socket(zmq.DEALER), ADDRESS, "gateway") as gateway,
    ):
        rig = Rig(Scheduler(limits), router, gateway)
        rig.start_requests(num_seqs, context, max_tokens)
        yield rig


class Rig:
    """Everything that a decode step passes through in the scheduler's process, with a gateway that asks for it."""

    def __init__(self, scheduler: Scheduler, router: "zmq.Socket[bytes]", gateway: "zmq.Socket[bytes]") -> None:
        self._scheduler, self._gateway = scheduler, gateway
        self._measures = Measures()
        self._frontend = Frontend(router, Config(), time.monotonic)
        self._frontend.offer(Offer(scheduler, VOCAB_SIZE, self._ready, self._measures))
        self._in_flight: PlannedStep | None = None
        self._hello_seq = self._num_requests = 0
        self.num_received: dict[str, int] = {}  # tokens, of the requests that have not ended
        self.num_finished = 0

    def start_requests(self, num_requests: int, num_prompt_tokens: int, max_tokens: int) -> None:
        """Submit requests, each with a prompt of its own, and run them until each has a token."""
        self._hello()
        for number in range(self._num_requests, self._num_requests + num_requests):
            prompt = array("i", ((number + index) % VOCAB_SIZE for index in range(num_prompt_tokens)))
            self.num_received[f"request-{number}"] = 0
            self._send(Submit(f"request-{number}", self._hello_seq, prompt.tobytes(), Sampling(max_tokens, seed=0)))
        self._num_requests += num_requests
        while not all(self.num_received.values()):
            self._step(_no_times())

    def finish_requests(self, num_requests: int) -> None:
        """Run short requests beside the others until so many more have ended."""
        end, num_long = self.num_finished + num_requests, len(self.num_received)
        while self.num_finished < end:
            self.start_requests(min(num_long, end - self.num_finished), SHORT_PROMPT_TOKENS, SHORT_OUTPUT_TOKENS)
            while len(self.num_received) > num_long:
                self._step(_no_times())

    def run(self, num_steps: int) -> Times:
        """Return what each of the next steps takes."""
        times = _no_times()
        for index in range(num_steps):
            if index % NUM_STEPS_A_HELLO == 0:
                self._hello()
            self._step(times)
        return times

    def _step(self, times: dict[str, list[float]]) -> None:
        """Plan one step while another is in flight, then take the result of that one and pass its tokens on."""
        with timed(times["schedule"]):
            planned = self._scheduler.schedule(MAX_NUM_BATCHED_TOKENS)  # a limit is looked up, as when serving
        previous, self._in_flight = self._in_flight, planned
        if planned is not None:
            self._measures.plan(planned.sequences, time.monotonic())
            with timed(times["encode step"]):
                frame = encode(Step("scheduler", "executor", planned.step_id, planned.sequences, planned.forget))
            with timed(times["decode step"]):
                decode_to_executor(frame)
        if previous is not None:
            with timed(times["encode result"]):
                frame = encode(_result(previous))
            with timed(times["decode result"]):
                result = decode_from_executor(frame)
            assert isinstance(result, StepResult)
            with timed(times["apply"]):
                self._scheduler.apply(result)
            with timed(times["deliver"]):
                self._frontend.deliver()
        self._receive()

    def _hello(self) -> None:
        """Acknowledge what has come, so that the scheduler forgets what has ended."""
        self._hello_seq += 1
        self._send(Hello(PROTOCOL_VERSION, "gateway", self._hello_seq, list(self.num_received.items())))

    def _send(self, message: Message) -> None:
        self._gateway.send(encode(message))
        self._frontend.receive()

    def _receive(self) -> None:
        while self._gateway.poll(0):
            match decode_to_gateway(self._gateway.recv()):
                case Outputs(outputs):
                    for output in outputs:
                        self.num_received[output.request_id] += len(unpack_ids(output.token_ids))
                        if output.finish_reason:
                            del self.num_received[output.request_id]
                            self.num_finished += 1
                case Ready() | Admitted():
                    pass
                case message:
                    raise AssertionError(f"the scheduler answered {message}")

    def _ready(self) -> Ready:
        limits = self._scheduler.limits
        sizes = (VOCAB_SIZE, limits.max_model_len, limits.block_size, limits.num_blocks, limits.max_num_seqs)
        return Ready("scheduler", "fingerprint", *sizes)


def _no_times() -> dict[str, list[float]]:
    return {part: [] for part in PARTS}


def _result(planned: PlannedStep) -> StepResult:
    """Return what an executor answers."""
    given = [SequenceResult([TOKEN_ID] if sequence.sample else []) for sequence in planned.sequences]
    return StepResult("scheduler", "executor", planned.step_id, given)


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Append the milliseconds of CPU time that this thread spends inside."""
    started_ns = time.thread_time_ns()
    yield
    times.append((time.thread_time_ns() - started_ns) / 1e6)


def summary(times: Times) -> dict[str, dict[str, float]]:
    """Return mean, median and 99th percentile of each part, and of the sums that are promised."""
    totals = {
        name: [sum(step) for step in zip(*map(times.__getitem__, parts), strict=True)] for name, parts in TOTALS.items()
    }
    return {
        name: {"mean": fmean(values), "median": median(values), "p99": quantiles(values, n=100, method="inclusive")[-1]}
        for name, values in {**times, **totals}.items()
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as two tables in Markdown: the first row by part, and the promised sums of every row."""
    lines = ["| part | mean | median | p99 |", "|---|---|---|---|"]
    for part, ms in rows[0]["ms"].items():
        lines.append(f"| {part} | {ms['mean']:.3f} | {ms['median']:.3f} | {ms['p99']:.3f} |")
    lines += ["", f"| requests finished before | {' | '.join(SHOWN)} |", "|---|" + "---|" * len(SHOWN)]
    for row in rows:
        cells = " | ".join(f"{row['ms'][part]['median']:.3f}" for part in SHOWN)
        lines.append(f"| {row['num_finished']} | {cells} |")
    return "\n".join(lines)
