"""An executor without tensors: it keeps the protocol's rules, and checks what it is told on a simulated KV pool."""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import zmq

from octavo.protocol.link_keys import ClientKeys
from octavo.protocol.messages import (
    Displaced,
    ExecutorReady,
    NeedInit,
    Progress,
    SequenceInit,
    SequenceResult,
    SequenceStep,
    Step,
    StepFailed,
    StepResult,
    ToExecutor,
    Welcome,
    decode_to_executor,
    encode,
    unpack_ids,
)
from octavo.protocol.sockets import MAX_MESSAGE_BYTES, connect_dealer, new_identity
from tests.fakes.peer_thread import PeerThread
from tests.fakes.toy_model import EMBEDDING_SIZE, VOCAB_SIZE, embedding_of, logprobs_of, next_token

NUM_KEPT_RESULTS = 2
DEVICE_BYTES = {"weights": 100, "kv_cache": 200, "total": 1000}
USED_BYTES = 350


@dataclass
class SequenceState:
    """Soft state of one sequence."""

    init: SequenceInit
    token_ids: list[int]  # those in the cache when it came, and of its shares
    num_tokens: int  # prompt and output
    num_computed_tokens: int


class KvPool:
    """Which token at which position each slot holds."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.slots: dict[int, tuple[int, int]] = {}

    def slots_of(self, block_table: bytes, num_tokens: int) -> list[int]:
        blocks = unpack_ids(block_table)
        assert all(0 <= block < self.num_blocks for block in blocks), f"no such block: {blocks.tolist()}"
        assert len(set(blocks)) == len(blocks), f"a block twice in one table: {blocks.tolist()}"
        assert len(blocks) == -(-num_tokens // self.block_size), f"{len(blocks)} blocks for {num_tokens} tokens"
        return [blocks[position // self.block_size] * self.block_size + position % self.block_size
                for position in range(num_tokens)]  # fmt: skip

    def read(self, slots: list[int]) -> list[int]:
        """Return the tokens whose keys and values the slots hold, from position 0 on."""
        held = [self.slots.get(slot) for slot in slots]
        for position, entry in enumerate(held):
            assert entry is not None, f"slot {slots[position]} holds nothing"
            assert entry[0] == position, f"slot {slots[position]} holds {entry}, not position {position}"
        return [entry[1] for entry in held if entry is not None]

    def require(self, slots: list[int], token_ids: list[int]) -> None:
        """Assert that the slots hold the keys and values of these tokens from position 0 on."""
        for position, (slot, token_id) in enumerate(zip(slots, token_ids, strict=True)):
            held = self.slots.get(slot)
            assert held == (position, token_id), f"slot {slot} holds {held}, not token {token_id} at {position}"


@dataclass
class StepLog:
    """What was seen of one step."""

    step_id: int
    num_tokens: dict[int, int] = field(default_factory=dict)  # by seq_id


class FakeExecutor(PeerThread):
    """One executor's life, in a thread. `check` raises what it found wrong with what it was told."""

    def __init__(
        self,
        address: str,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 1024,
        fingerprint: str = "toy",
        step_s: float = 0.0,
        reported_token_s: float | None = None,
        ready_interval_s: float = 0.05,
        checks_kv: bool = True,
        fail_at_step: int | None = None,
        max_frame_bytes: int = MAX_MESSAGE_BYTES,
        keys: ClientKeys | None = None,
    ) -> None:
        super().__init__()
        self.address, self.keys = address, keys
        self.incarnation = new_identity()
        self.max_model_len = max_model_len
        self.fingerprint = fingerprint
        self.step_s = step_s
        self.reported_token_s = reported_token_s  # busy_s is said to be this times the step's tokens
        self.ready_interval_s = ready_interval_s
        self.checks_kv = checks_kv
        self.fail_at_step = fail_at_step
        self.max_frame_bytes = max_frame_bytes  # longer ones never arrive
        self.kv = KvPool(num_blocks, block_size)
        self.scheduler_incarnation = ""
        self.steps: list[StepLog] = []
        self.longest_frame_bytes = 0
        self.num_repeated = 0  # steps that came again and were answered from the last results
        self.num_ignored = 0  # messages of a wrong incarnation or number
        self.num_need_inits = 0
        self.displaced_by = ""  # the process that has its place
        self._next_step_id = 0  # 0: not welcomed
        self._free_since_s = time.monotonic()
        self._retired_schedulers: set[str] = set()
        self._states: dict[int, SequenceState] = {}
        self._results: OrderedDict[int, StepResult] = OrderedDict()
        self._forget = threading.Event()

    def forget_all(self) -> None:
        """Lose the soft state before the next step that needs some, as a bug would; the KV stays."""
        self._forget.set()

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(sum(step.num_tokens.values()) for step in self.steps)

    def _run(self) -> None:
        with (
            zmq.Context() as context,
            connect_dealer(context.socket(zmq.DEALER), self.address, new_identity(), self.keys) as socket,
            connect_dealer(context.socket(zmq.DEALER), self.address, new_identity(), self.keys) as progress_socket,
        ):
            ready_sent_s = 0.0
            while not self._stop.is_set():
                self._running.wait()
                if time.monotonic() - ready_sent_s >= self.ready_interval_s:
                    socket.send(encode(self._ready()))
                    ready_sent_s = time.monotonic()
                while not self._stop.is_set() and self._running.is_set() and socket.poll(5):
                    frame = socket.recv()
                    self.longest_frame_bytes = max(self.longest_frame_bytes, len(frame))
                    if len(frame) > self.max_frame_bytes:
                        continue
                    message = decode_to_executor(frame)
                    try:
                        answers = self._answer(message, progress_socket)
                    except AssertionError as error:
                        self.error = error
                        return
                    for answer in answers:
                        socket.send(encode(answer))
                        if isinstance(answer, StepFailed):
                            socket.set(zmq.LINGER, 1000)  # let it leave
                            return
                    ready_sent_s = time.monotonic()

    def _ready(self) -> ExecutorReady:
        return ExecutorReady(
            self.incarnation,
            self.kv.num_blocks,
            self.kv.block_size,
            self.max_model_len,
            VOCAB_SIZE,
            self.fingerprint,
            self.scheduler_incarnation,
            DEVICE_BYTES,
            f"process {self.incarnation}",
            tasks=("generate", "embed"),
            embedding_size=EMBEDDING_SIZE,
        )

    def _answer(self, message: ToExecutor, progress_socket: "zmq.Socket[bytes]") -> list[object]:
        if message.executor_incarnation != self.incarnation:
            self.num_ignored += 1
            return []
        if isinstance(message, Welcome):
            self._on_welcome(message)
            return []
        if isinstance(message, Displaced):
            self.displaced_by = message.by
            return []
        if message.scheduler_incarnation != self.scheduler_incarnation:
            self.num_ignored += 1
            return []
        if message.step_id in self._results:
            self.num_repeated += 1
            return [self._results[message.step_id]]
        if message.step_id != self._next_step_id:
            self.num_ignored += 1
            return []
        progress_socket.send(encode(Progress(self.incarnation, message.step_id, 0, USED_BYTES)))
        return [self._do(message)]

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.scheduler_incarnation in self._retired_schedulers:
            return
        if welcome.scheduler_incarnation != self.scheduler_incarnation:
            self._retired_schedulers.add(self.scheduler_incarnation)
            self.scheduler_incarnation = welcome.scheduler_incarnation
            self._next_step_id = 0
            self._states.clear()
            self._results.clear()
            self.kv.slots.clear()
        self._next_step_id = max(self._next_step_id, welcome.next_step_id)

    def _do(self, step: Step) -> StepResult | NeedInit | StepFailed:
        started_s = time.monotonic()
        if step.step_id == self.fail_at_step:
            return StepFailed(self.scheduler_incarnation, self.incarnation, step.step_id, "told to fail")
        if self._forget.is_set():
            self._states.clear()
        assert step.sequences, "a step without sequences"
        assert len({sequence.seq_id for sequence in step.sequences}) == len(step.sequences), "a sequence twice"
        if lacking := [sequence.seq_id for sequence in step.sequences if not self._fits(sequence)]:
            self.num_need_inits += 1
            self._forget.clear()
            return NeedInit(self.scheduler_incarnation, self.incarnation, step.step_id, lacking)
        for seq_id in step.forget:
            self._states.pop(seq_id, None)
        results = self._compute(step)
        if self.step_s:
            time.sleep(self.step_s)
        waited_s, self._free_since_s = started_s - self._free_since_s, time.monotonic()
        result = StepResult(
            self.scheduler_incarnation,
            self.incarnation,
            step.step_id,
            results,
            busy_s=self._busy_s(self._free_since_s - started_s),
            waited_s=waited_s,
        )
        self._results[step.step_id] = result
        if len(self._results) > NUM_KEPT_RESULTS:
            self._results.popitem(last=False)
        self._next_step_id += 1
        return result

    def _busy_s(self, measured_s: float) -> float:
        if self.reported_token_s is None:
            return measured_s
        return self.reported_token_s * sum(self.steps[-1].num_tokens.values())

    def _fits(self, sequence: SequenceStep) -> bool:
        """Return whether the share goes on from what this executor has."""
        if sequence.init is not None:
            return True
        state = self._states.get(sequence.seq_id)
        if state is None or state.num_computed_tokens != sequence.num_computed_tokens:
            return False
        return bool(sequence.token_ids) or len(state.token_ids) == sequence.num_computed_tokens + 1

    def _compute(self, step: Step) -> list[SequenceResult]:
        log = StepLog(step.step_id)
        self.steps.append(log)
        written: set[int] = set()
        shares = []
        for sequence in step.sequences:
            state = self._state(sequence)
            token_ids = list(unpack_ids(sequence.token_ids)) or state.token_ids[sequence.num_computed_tokens :]
            end = sequence.num_computed_tokens + len(token_ids)
            state.token_ids += token_ids[len(state.token_ids) - sequence.num_computed_tokens :]
            assert state.token_ids[sequence.num_computed_tokens : end] == token_ids, "tokens that the sequence lacks"
            assert end <= state.num_tokens, f"{end} of {state.num_tokens} tokens"
            if state.init.sampling.max_tokens:
                assert sequence.sample == (end == state.num_tokens), f"sample={sequence.sample} at {end}"
            assert end <= self.max_model_len, f"{end} tokens"
            slots = self.kv.slots_of(sequence.block_table, end)
            new_slots = slots[sequence.num_computed_tokens :]
            assert written.isdisjoint(new_slots), "two sequences write one slot"
            written.update(new_slots)
            if self.checks_kv:
                self.kv.require(slots[: sequence.num_computed_tokens], state.token_ids[: sequence.num_computed_tokens])
            log.num_tokens[sequence.seq_id] = len(token_ids)
            shares.append((sequence, state, end, slots))
        for sequence, state, end, slots in shares:
            for position in range(sequence.num_computed_tokens, end):
                self.kv.slots[slots[position]] = (position, state.token_ids[position])
        # What was read above must not have been overwritten in the same step.
        if self.checks_kv:
            for _, state, end, slots in shares:
                self.kv.require(slots, state.token_ids[:end])
        return [self._result(sequence, state, end) for sequence, state, end, _ in shares]

    def _state(self, sequence: SequenceStep) -> SequenceState:
        if (init := sequence.init) is not None:
            assert sequence.token_ids, "an init comes with the tokens of its share"
            num_computed_tokens = sequence.num_computed_tokens
            slots = self.kv.slots_of(sequence.block_table, num_computed_tokens + len(sequence.token_ids) // 4)
            token_ids = self.kv.read(slots[:num_computed_tokens])
            num_tokens = init.num_prompt_tokens + init.num_output_tokens
            state = SequenceState(init, token_ids, num_tokens, num_computed_tokens)
            self._states[sequence.seq_id] = state
        return self._states[sequence.seq_id]

    def _result(self, sequence: SequenceStep, state: SequenceState, end: int) -> SequenceResult:
        sampling = state.init.sampling
        prompt_logprobs = None
        if sampling.num_prompt_logprobs is not None:
            prompt = list(unpack_ids(state.init.prompt_token_ids))[sequence.num_computed_tokens + 1 : end + 1]
            prompt_logprobs = logprobs_of(prompt, sampling.num_prompt_logprobs) if prompt else None
        state.num_computed_tokens = end
        if not sequence.sample:
            ends = state.init.task == "embed" and end == state.init.num_prompt_tokens
            embedding = embedding_of(state.token_ids[:end]) if ends else b""
            return SequenceResult([], None, prompt_logprobs, embedding)
        token_id = next_token(state.token_ids, sampling.seed)
        state.token_ids.append(token_id)
        state.num_tokens += 1
        logprobs = logprobs_of([token_id], sampling.num_logprobs) if sampling.num_logprobs is not None else None
        return SequenceResult([token_id], logprobs, prompt_logprobs)
