"""10,000 random traces of at least 50 steps: integrity after every move, the reference's tokens at every end."""

import random

import pytest

from tests.scheduler.fake_executor import VOCAB_SIZE, Driver

NUM_TRACES, NUM_CHUNKS = 10_000, 20
MIN_STEPS, MAX_SEQS = 50, 8


class Trace:
    """One run of random moves over at most 32 blocks and 8 sequences at a time, until 50 steps are done."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.max_blocks = self.random.randint(6, 32)
        self.driver = Driver(
            self.max_blocks,
            block_size=choose((1, 2, 4)),
            max_model_len=choose((12, 24, 1000)),
            max_num_seqs=choose((1, 3, MAX_SEQS)),
            max_num_batched_tokens=choose((1, 5, 16, 64)),
            enable_prefix_caching=self.random.random() < 0.8,
        )
        self.max_in_flight = choose((1, 2))
        self.trouble = choose((0.0, 0.02, 0.1))  # probability of a reset or NeedInit at each move
        self.prefix = [self.random.randrange(VOCAB_SIZE) for _ in range(12)]

    def run(self) -> None:
        driver = self.driver
        while len(driver.steps) < MIN_STEPS:
            self.move()
        if self.random.random() < 0.3:
            for seq_id in list(driver.scheduler.sequences):
                driver.scheduler.abort(seq_id)
                driver.settle()
        driver.run(ahead=self.max_in_flight == 2)
        driver.assert_complete()
        assert set(driver.executor.states) <= set(driver.scheduler.forget)

    def move(self) -> None:
        driver, live = self.driver, self.driver.scheduler.sequences
        chance = self.random.random()
        if chance < self.trouble and driver.sent:
            self.disturb()
        elif len(live) < MAX_SEQS and (not live or chance < 0.3):
            self.add()
        elif chance > 0.98:
            driver.scheduler.abort(self.random.randrange(len(driver.sequences) + 2))
            driver.settle()
        elif len(driver.sent) < self.max_in_flight and driver.send():
            pass
        elif driver.sent:
            planned = [share.seq_id for share in driver.sent[0].sequences]
            not_ready = [self.random.choice(planned)] if self.random.random() < 0.05 else []
            driver.receive(not_ready, computes_void=self.random.random() < 0.5)

    def disturb(self) -> None:
        driver = self.driver
        if self.random.random() < 0.5:
            driver.reset(self.random.randint(4, self.max_blocks))
        else:
            seq_ids = list(driver.executor.states)
            driver.need_init(self.random.sample(seq_ids, self.random.randint(0, len(seq_ids))))

    def add(self) -> None:
        choose, chance = self.random.choice, self.random.random
        prompt = self.prefix[: self.random.randint(0, 12)]
        prompt += [self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 8))]
        sequence = self.driver.make(
            len(self.driver.sequences),
            prompt[: self.driver.limits.max_model_len],
            max_tokens=choose((0, 1, 3, 10, 20)),
            min_tokens=choose((0, 0, 4)),
            stop_token_ids=choose(((), (), (1,), (2, 5))),
            num_prompt_logprobs=0 if chance() < 0.2 else None,
            tenant=choose(("", "a")),
            priority=choose((0, 0, 1)),
        )
        if self.driver.scheduler.refusal(sequence) is None:
            self.driver.add(sequence)


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_traces(chunk: int) -> None:
    for seed in range(chunk, NUM_TRACES, NUM_CHUNKS):
        try:
            Trace(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
