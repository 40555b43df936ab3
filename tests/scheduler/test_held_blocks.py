"""What paging saves: sequences hold blocks for the tokens they have, not for tokens that they may get later."""

from tests.fakes.scheduler_driver import SchedulerDriver

BLOCK_SIZE, MAX_MODEL_LEN = 16, 512
NUM_SEQS, NUM_RUNNING = 48, 16


def test_mixed_lengths_hold_at_least_40_percent_less_than_reserving_the_longest() -> None:
    """Prompts of 8 to 255 tokens and as many outputs, evenly spread, 16 at a time and nothing shared."""
    blocks_reserved = MAX_MODEL_LEN // BLOCK_SIZE  # for a sequence, if room for the longest were kept from the start
    driver = SchedulerDriver(
        NUM_RUNNING * blocks_reserved,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_RUNNING,
        enable_prefix_caching=False,
        checks_moves=False,
    )
    for seq_id in range(NUM_SEQS):
        num_prompt_tokens, num_output_tokens = 8 + seq_id * 53 % 248, 8 + seq_id * 101 % 248
        driver.start(seq_id, range(num_prompt_tokens), max_tokens=num_output_tokens)

    held, reserved = [], []
    while driver.scheduler.has_work:
        driver.send()
        held.append(driver.scheduler.num_used_blocks)
        reserved.append(driver.scheduler.num_running * blocks_reserved)
        driver.receive()
    assert max(held) <= 0.6 * max(reserved)
    assert sum(held) <= 0.6 * sum(reserved)
    driver.assert_complete()
