"""10,000 random traces of at least 50 steps: integrity holds after every step, tokens are the reference's."""

import os
import random
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from octavo.protocol.messages import SequenceResult, StepResult
from octavo.scheduler.sizes import MAX_STEP_BYTES
from tests.fakes.scheduler_driver import VOCAB_SIZE, SchedulerDriver

NUM_TRACES, NUM_CHUNKS = 10_000, 20
MIN_STEPS, MAX_SEQS = 50, 8


class Trace:
    """Random moves over at most 32 blocks and 8 sequences at a time, until 50 steps are planned; then all must end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.max_blocks = self.random.randint(8, 32)
        self.driver = SchedulerDriver(
            self.max_blocks,
            block_size=choose((1, 3, 4, 4)),
            max_model_len=choose((26, 1000)),
            max_num_seqs=choose((3, MAX_SEQS)),
            max_num_batched_tokens=choose((3, 16, 64)),
            enable_prefix_caching=self.random.random() < 0.8,
            max_num_prompt_tokens=choose((None, 1, 2, 7)),
            max_step_bytes=choose((MAX_STEP_BYTES, MAX_STEP_BYTES, 300, 1000)),
            checks_moves=False,
        )
        self.max_in_flight = choose((1, 2))
        self.trouble = choose((0.0, 0.0, 0.02, 0.1))  # probability of a reset or a lost state at each move
        self.prefix = self.tokens(12)

    def run(self) -> None:
        driver = self.driver
        while len(driver.steps) < MIN_STEPS:
            self.move()
        driver.run(ahead=self.max_in_flight == 2)
        driver.assert_complete()
        assert set(driver.executor.states) <= set(driver.scheduler.forget)

    def move(self) -> None:
        driver, live = self.driver, self.driver.scheduler.sequences
        chance = self.random.random()
        if chance < self.trouble and driver.sent:
            self.disturb()
        elif not live or (chance < 0.4 and len(live) < MAX_SEQS and len(driver.steps) < MIN_STEPS - 20):
            self.add()
        elif chance > 0.98:
            driver.scheduler.abort(self.random.randrange(len(driver.sequences) + 2))
            driver.settle()
        elif len(driver.sent) < self.max_in_flight and driver.send():
            pass
        elif driver.sent:
            self.receive()

    def receive(self) -> None:
        chance, not_ready = self.random.random(), []
        if chance < 0.05:
            not_ready = [self.random.choice(self.driver.sent[0].sequences).seq_id]
        self.driver.receive(not_ready, computes_void=chance < 0.025)

    def disturb(self) -> None:
        driver = self.driver
        if self.random.random() < 0.5:
            late = driver.sent[0]
            driver.reset(self.random.randint(4, self.max_blocks))
            driver.scheduler.apply(StepResult("", "", late.step_id, [SequenceResult([0]) for _ in late.sequences]))
        else:
            seq_ids = list(driver.executor.states)
            driver.executor.lose(self.random.sample(seq_ids, self.random.randint(0, len(seq_ids))))

    def add(self) -> None:
        choose = self.random.choice
        prompt = self.prefix[: choose((0, 4, 8, 9, 12))] + self.tokens(self.random.randint(1, 8))
        sampling: dict[str, Any] = {
            "max_tokens": choose((0, 2, 15, 25)),
            "min_tokens": choose((0, 0, 4)),
            "stop_token_ids": choose(((), (), (), (2, 5))),
            "num_prompt_logprobs": choose((0, None, None, None)),
        }
        outputs = self.driver.expect(prompt, **sampling)[0][:5] if self.random.random() < 0.1 else []
        sequence = self.driver.make(
            len(self.driver.sequences),
            prompt,
            outputs,
            tenant=choose(("", "a")),
            priority=choose((0, 0, 1)),
            body_id=choose(("", "a", "b")),
            **sampling,
        )
        if self.driver.scheduler.refusal(sequence) is None:
            self.driver.add(sequence)

    def tokens(self, num_tokens: int) -> list[int]:
        return self.random.choices(range(VOCAB_SIZE), k=num_tokens)


def run_traces(seeds: range) -> None:
    for seed in seeds:
        try:
            Trace(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_random_traces() -> None:
    """On all cores: a minute of one."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        chunks = [pool.submit(run_traces, range(chunk, NUM_TRACES, NUM_CHUNKS)) for chunk in range(NUM_CHUNKS)]
        for chunk in as_completed(chunks):
            chunk.result()
