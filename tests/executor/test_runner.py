import numpy as np
import pytest
import torch

from octavo.executor.step import runner as runner_module
from octavo.protocol.messages import NeedInit, StepResult
from tests.fakes.cache_model import CacheModel, make_runner
from tests.fakes.runner_driver import EXECUTOR, SCHEDULER, RunnerDriver, init, share, step

PROMPT = [5, 9, 2, 7, 7, 1, 30, 12, 8, 3, 11]


def generate(driver, seq_id, prompt, num_tokens, *, chunk=100, output=(), **fields):
    """Return the tokens and results of one sequence that runs alone, its known tokens computed in chunks."""
    known = [*prompt, *output]
    results = []
    for start in range(0, len(known), chunk):
        part = known[start : start + chunk]
        begin = init(prompt, output, **fields) if start == 0 else None
        results += driver.do(driver.share(seq_id, part, sample=start + chunk >= len(known), init=begin))
    while len(results[-1].token_ids) + sum(len(r.token_ids) for r in results[:-1]) < num_tokens:
        results += driver.do(driver.share(seq_id, []))
    return [token for result in results for token in result.token_ids], results


def reference(prompt, num_tokens, vocab_size=64, **fields):
    """Return what a fresh runner with one block for everything generates."""
    driver = RunnerDriver(make_runner(CacheModel(vocab_size), block_size=256, num_blocks=1))
    return generate(driver, 0, prompt, num_tokens, **fields)[0]


def test_a_step_samples_where_it_is_asked_to():
    driver = RunnerDriver(make_runner())
    first, second = driver.do(
        driver.share(1, PROMPT[:6], sample=False, init=init(PROMPT)),
        driver.share(2, [4, 4], init=init([4, 4])),
    )
    assert first.token_ids == []
    assert second.token_ids == reference([4, 4], 1)
    [first] = driver.do(driver.share(1, PROMPT[6:]))
    assert first.token_ids == reference(PROMPT, 1)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.2}], ids=str)
def test_chunks_and_blocks_do_not_change_tokens(block_size, chunk, fields):
    driver = RunnerDriver(make_runner(block_size=block_size, num_blocks=64))
    assert generate(driver, 1, PROMPT, 12, chunk=chunk, **fields)[0] == reference(PROMPT, 12, **fields)


def test_sequences_share_steps_without_touching_each_other():
    prompts = {1: PROMPT, 2: [3], 3: [8, 8, 8, 8], 4: PROMPT[::-1]}
    fields = {seq_id: {"temperature": 0.5 * seq_id, "seed": seq_id, "top_p": 0.9} for seq_id in prompts}
    driver = RunnerDriver(make_runner(num_blocks=64))
    results = driver.do(*(driver.share(i, p, init=init(p, **fields[i])) for i, p in prompts.items()))
    tokens = {i: list(result.token_ids) for i, result in zip(prompts, results, strict=True)}
    for _ in range(10):
        for i, result in zip(prompts, driver.do(*(driver.share(i, []) for i in prompts)), strict=True):
            tokens[i] += result.token_ids
    assert tokens == {i: reference(p, 11, **fields[i]) for i, p in prompts.items()}


def test_a_preempted_sequence_goes_on_with_what_it_has():
    fields = {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    expected = reference(PROMPT, 12, **fields)
    driver = RunnerDriver(make_runner())
    tokens, _ = generate(driver, 1, PROMPT, 5, **fields)
    driver.preempt(1)
    generate(driver, 2, [9] * 20, 3)  # overwrites its blocks
    more, _ = generate(driver, 1, PROMPT, 7, chunk=6, output=tokens, **fields)
    assert tokens + more == expected


def test_a_prefix_that_is_cached_is_not_computed_again():
    driver = RunnerDriver(make_runner())
    generate(driver, 1, PROMPT, 1)
    # another sequence with the same 8 tokens: blocks 0 and 1 of the first, then one of its own
    suffix = [40, 41]
    [result] = driver.do(share(2, 8, suffix, [0, 1, 20], init=init(PROMPT[:8] + suffix)))
    assert result.token_ids == reference(PROMPT[:8] + suffix, 1)


def missing(runner, *shares):
    outcome = runner.run(step(7, *shares))
    assert isinstance(outcome, NeedInit)
    assert (outcome.scheduler_incarnation, outcome.executor_incarnation, outcome.step_id) == (SCHEDULER, EXECUTOR, 7)
    return outcome.seq_ids


def test_an_unknown_sequence_needs_an_init_and_nothing_is_computed():
    model = CacheModel()
    runner = make_runner(model)
    assert missing(runner, share(5, 0, PROMPT, [0, 1, 2])) == [5]
    assert model.num_forwards == 0
    assert missing(runner, share(6, 0, [1], [4], init=init([1])), share(5, 3, [], [0]), share(4, 0, [2], [3])) == [5, 4]
    assert model.num_forwards == 0
    # what came with an init is known from then on
    assert isinstance(runner.run(step(8, share(6, 0, [1], [4]))), StepResult)


@pytest.mark.parametrize(
    "wrong",
    [
        share(1, 10, [], [0, 1, 2, 3]),  # behind
        share(1, 12, [], [0, 1, 2, 3]),  # ahead
        share(1, 0, PROMPT, [0, 1, 2, 3]),  # from the start again, without an init
        share(1, 11, [63], [0, 1, 2, 3]),  # another token than the one that was sampled
        share(1, 11, [0, 0], [0, 1, 2, 3]),  # more tokens than are known
    ],
)
def test_a_share_that_does_not_continue_the_state_needs_an_init(wrong):
    runner = make_runner()
    [first] = runner.run(step(1, share(1, 0, PROMPT, [0, 1, 2, 3], init=init(PROMPT)))).sequences
    assert first.token_ids not in ([63], [0])
    assert missing(runner, wrong) == [1]
    # and it is as it was
    [second] = runner.run(step(8, share(1, 11, [], [0, 1, 2, 3]))).sequences
    assert first.token_ids + second.token_ids == reference(PROMPT, 2)


def test_the_last_token_may_be_named_or_left_to_the_executor():
    runner = make_runner()
    [first] = runner.run(step(1, share(1, 0, PROMPT, [0, 1, 2], init=init(PROMPT)))).sequences
    [second] = runner.run(step(2, share(1, 11, first.token_ids, [0, 1, 2]))).sequences
    assert first.token_ids + second.token_ids == reference(PROMPT, 2)


def test_in_the_middle_of_a_prompt_there_is_no_last_token_and_no_sample():
    runner = make_runner()
    runner.run(step(1, share(1, 0, PROMPT[:4], [0], sample=False, init=init(PROMPT))))
    assert missing(runner, share(1, 4, [], [0, 1])) == [1]
    assert missing(runner, share(1, 4, PROMPT[4:6], [0, 1], sample=True)) == [1]


def test_forgotten_sequences_are_gone():
    driver = RunnerDriver(make_runner())
    generate(driver, 1, PROMPT, 2)
    generate(driver, 2, [1], 2)
    assert driver.runner.num_sequences == 2
    driver.do(forget=[1, 99])
    assert driver.runner.num_sequences == 1
    assert missing(driver.runner, share(1, 12, [], [0, 1, 2, 3])) == [1]
    driver.runner.reset()
    assert driver.runner.num_sequences == 0


def test_an_init_forgets_what_was_before():
    runner = make_runner()
    runner.run(step(1, share(1, 0, PROMPT, [0, 1, 2], init=init(PROMPT))))
    [result] = runner.run(step(2, share(1, 0, [6, 6], [5], init=init([6, 6])))).sequences
    assert result.token_ids == reference([6, 6], 1)


def test_what_contradicts_itself_is_an_error_that_says_so():
    def run(*shares):
        return make_runner().run(step(1, *shares))

    with pytest.raises(ValueError, match="3 are needed"):
        run(share(1, 0, PROMPT, [0, 1], init=init(PROMPT)))
    for block in (-1, 32):
        with pytest.raises(ValueError, match="not among the 32"):
            run(share(1, 0, PROMPT, [0, block, 2], init=init(PROMPT)))
    with pytest.raises(ValueError, match="sequence 1 does not fit its own init"):
        run(share(1, 0, [1, 2, 3], [0], init=init([1, 2])))


def expected_prompt_logprobs(prompt, vocab_size=64):
    """Return the log-softmax of every position but the last, from a whole forward pass, in float64."""
    model = CacheModel(vocab_size)
    seen = []

    class Watched(CacheModel):
        def forward(self, inputs, kv_caches):
            seen.append(model.forward(inputs, kv_caches))
            return seen[-1]

    RunnerDriver(make_runner(Watched(vocab_size), block_size=256, num_blocks=1)).do(
        share(1, 0, prompt, [0], init=init(prompt))
    )
    return model.compute_logits(seen[0]).double().log_softmax(-1)[:-1].numpy()


@pytest.mark.parametrize("chunk", [1, 3, 4, 10, 100])
def test_prompt_logprobs_are_complete_across_chunks_and_none_comes_twice(chunk):
    driver = RunnerDriver(make_runner())
    tokens, results = generate(driver, 1, PROMPT, 3, chunk=chunk, num_prompt_logprobs=2, num_logprobs=1)
    parts = [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]
    whole = sum(parts[1:], parts[0])
    expected = expected_prompt_logprobs(PROMPT)
    assert whole.num_tokens == len(PROMPT) - 1
    np.testing.assert_allclose(
        np.frombuffer(whole.token_logprobs, np.float32), expected[np.arange(10), PROMPT[1:]], atol=1e-5
    )
    best = np.argsort(-expected, axis=-1)[:, :2]
    assert np.frombuffer(whole.top_token_ids, np.int32).reshape(-1, 2).tolist() == best.tolist()
    ranks = [1 + int((row > row[token]).sum()) for row, token in zip(expected, PROMPT[1:], strict=True)]
    assert np.frombuffer(whole.token_ranks, np.int32).tolist() == ranks
    assert tokens == reference(PROMPT, 3)
    assert [result.logprobs.num_tokens for result in results if result.token_ids] == [1, 1, 1]


def test_prompt_logprobs_of_long_prompts_come_in_slices_of_the_same_bits():
    prompt = [index % 64 for index in range(3 * runner_module.PROMPT_LOGPROB_ROWS + 5)]
    [whole] = RunnerDriver(make_runner(block_size=256)).do(
        share(1, 0, prompt, [0], init=init(prompt, num_prompt_logprobs=1))
    )
    driver = RunnerDriver(make_runner(block_size=256))
    _, results = generate(driver, 1, prompt, 1, chunk=50, num_prompt_logprobs=1)
    parts = [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]
    assert whole.prompt_logprobs == sum(parts[1:], parts[0])
    assert whole.prompt_logprobs.num_tokens == len(prompt) - 1


def test_prompt_logprobs_of_a_prompt_that_is_only_scored():
    """max_tokens=0: nothing is sampled."""
    [result] = RunnerDriver(make_runner()).do(
        share(1, 0, PROMPT, [0, 1, 2], sample=False, init=init(PROMPT, max_tokens=0, num_prompt_logprobs=0))
    )
    assert result.token_ids == []
    assert result.logprobs is None
    assert result.prompt_logprobs.num_tokens == len(PROMPT) - 1


def test_a_sequence_with_output_has_delivered_its_prompt_logprobs():
    driver = RunnerDriver(make_runner())
    _, results = generate(driver, 1, PROMPT, 1, output=[5], num_prompt_logprobs=2)
    assert all(result.prompt_logprobs is None for result in results)


def test_a_step_may_have_no_sequences():
    result = make_runner().run(step(1, forget=[3]))
    assert result.sequences == []


def test_the_runner_leaves_no_gradients():
    runner = make_runner()
    seen = []

    class Watched(CacheModel):
        def compute_logits(self, hidden_SE):
            seen.append(torch.is_inference_mode_enabled())
            return super().compute_logits(hidden_SE)

    runner.model = Watched()
    runner.run(step(1, share(1, 0, [1], [0], init=init([1]))))
    assert seen == [True]


def test_logits_that_are_not_finite_are_logged_once_the_host_sees_them(caplog):
    class Broken(CacheModel):
        def compute_logits(self, hidden_SE):
            return torch.full((len(hidden_SE), self.vocab_size), torch.nan)

    runner = make_runner(Broken())
    launched = runner.launch(step(1, share(1, 0, [1, 2], [0], init=init([1, 2], num_prompt_logprobs=1))))
    assert caplog.text == ""
    [result] = launched.wait().sequences
    assert 0 <= result.token_ids[0] < 64
    assert caplog.text.count("logits of 1 sequences are not finite") == 2  # of the prompt's token and of the next
