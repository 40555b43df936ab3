"""Steps that are launched before the last one's tokens reach the host."""

import pytest
import torch

from octavo.executor.models import LoadPlan, load_model, read_model_config
from octavo.kernels import cpu
from octavo.protocol.messages import NeedInit
from tests.fakes.cache_model import CacheModel, make_runner
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.lazy_device import LazyDevice
from tests.fakes.runner_driver import RunnerDriver, init, sampling, share, step
from tests.fakes.scheduler_with_runner import SchedulerWithRunner

PROMPTS = {1: [5, 9, 2, 7, 7, 1, 30], 2: [3], 3: [8, 8, 8, 8], 4: [40, 2, 17, 6, 6]}
SAMPLING = {
    1: {"num_logprobs": 2, "num_prompt_logprobs": 1},
    2: {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    3: {"temperature": 0.7, "seed": (1 << 64) - 5, "min_tokens": 6, "eos_token_ids": tuple(range(30))},
    4: {"logit_bias": ((3, 1.0), (9, -2.0)), "num_logprobs": 0},
}
PENALIZED = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0.8, "seed": 1}


def run(device, *, ahead, sampling=SAMPLING, num_steps=8, chunk=3):
    """Return the results of each step, with step n + 1 launched before n is waited for if `ahead`."""
    driver = RunnerDriver(make_runner(num_blocks=64, device=device))
    todo = {seq_id: list(prompt) for seq_id, prompt in PROMPTS.items()}
    launched, results = [], []
    for _ in range(num_steps):
        shares = []
        for seq_id, rest in todo.items():
            begins = rest and len(rest) == len(PROMPTS[seq_id])
            begin = init(PROMPTS[seq_id], **sampling[seq_id]) if begins else None
            shares.append(driver.share(seq_id, rest[:chunk], sample=len(rest) <= chunk, init=begin))
            todo[seq_id] = rest[chunk:]
        launched.append(driver.launch(*shares))
        if not ahead or len(launched) > 1:
            results.append(launched[-2 if ahead else -1].wait())
    return [*results, launched[-1].wait()] if ahead else results


def test_a_step_launched_ahead_gives_what_it_gives_after_the_last():
    device = LazyDevice()
    assert run(device, ahead=True) == run(None, ahead=False)
    order = ["launched 0", "launched 1", "waited for 0", "launched 2", "waited for 1"]
    assert device.events[:5] == order


def test_a_batch_whose_penalties_count_the_last_token_waits_for_it():
    sampling = SAMPLING | {2: PENALIZED}
    device = LazyDevice()
    assert run(device, ahead=True, sampling=sampling) == run(None, ahead=False, sampling=sampling)
    assert device.events[:4] == ["launched 0", "waited for 0", "launched 1", "waited for 1"]


def test_a_share_that_names_the_token_in_flight_waits_for_it():
    [token] = RunnerDriver(make_runner()).do(share(1, 0, [1, 2], [0], init=init([1, 2])))[0].token_ids
    device = LazyDevice()
    runner = make_runner(device=device)
    runner.launch(step(1, share(1, 0, [1, 2], [0], init=init([1, 2]))))
    assert isinstance(runner.launch(step(2, share(1, 2, [token + 1], [0]))), NeedInit)
    [named] = runner.run(step(2, share(1, 2, [token], [0]))).sequences
    assert device.events[:3] == ["launched 0", "waited for 0", "launched 1"]
    driver = RunnerDriver(make_runner())
    driver.do(driver.share(1, [1, 2], init=init([1, 2])))
    assert driver.do(driver.share(1, [])) == [named]


def test_what_is_not_waited_for_is_settled_two_steps_later_and_in_order():
    """A token that is pending is always the last step's."""
    device = LazyDevice()
    driver = RunnerDriver(make_runner(device=device))
    begin = init([1, 2])
    steps = [driver.launch(driver.share(1, [1, 2], init=begin))]
    steps += [driver.launch(driver.share(1, [])) for _ in range(3)]
    assert device.events == ["launched 0", "launched 1", "waited for 0", "launched 2", "waited for 1", "launched 3"]
    last = steps[3].wait()
    assert device.events[6:] == ["waited for 2", "waited for 3"]
    assert [launched.wait().step_id for launched in steps] == [1, 2, 3, 4]
    assert steps[3].wait() is last


def test_a_sequence_that_sat_a_step_out_goes_on_with_its_token():
    def tokens(device):
        driver = RunnerDriver(make_runner(device=device))
        steps = [driver.launch(driver.share(1, [1, 2], init=init([1, 2])), driver.share(2, [3], init=init([3])))]
        for shares in ([2], [1, 2], [1], [2, 1]):
            steps.append(driver.launch(*(driver.share(seq_id, []) for seq_id in shares)))
        return [[sequence.token_ids for sequence in launched.wait().sequences] for launched in steps]

    assert tokens(LazyDevice()) == tokens(None)


@pytest.mark.parametrize("output", [[], [4]])
def test_an_init_replaces_a_state_whose_token_is_in_flight(output):
    runner = make_runner(device=LazyDevice())
    first = runner.launch(step(1, share(1, 0, [1, 2], [0], init=init([1, 2]))))
    second = runner.launch(step(2, share(1, 0, [6, 6, *output], [5], init=init([6, 6], output))))
    assert len(first.wait().sequences[0].token_ids) == 1
    [result] = second.wait().sequences
    expected = make_runner().run(step(1, share(1, 0, [6, 6, *output], [0], init=init([6, 6], output))))
    assert result == expected.sequences[0]


def test_a_reset_forgets_what_is_in_flight():
    model = CacheModel()
    runner = make_runner(model, device=LazyDevice())
    runner.launch(step(1, share(1, 0, [1, 2], [0], init=init([1, 2]))))
    runner.reset()
    assert isinstance(runner.launch(step(2, share(1, 2, [], [0]))), NeedInit)
    assert model.num_forwards == 1


def test_behind_a_scheduler_that_preempts_tokens_are_those_of_a_cpu(tmp_path):
    """Its steps end sequences, cut prompts, share prefixes and come back to what lost its blocks."""
    directory = make_checkpoint(tmp_path)
    config = read_model_config(directory)
    decoder = load_model(LoadPlan(directory, config, torch.float32, max_model_len=256, backend=cpu, progress=False))
    prefix = [(3 * i * i + 7) % 317 for i in range(9)]
    fields = [{"temperature": 0.0, "num_logprobs": 1}, {"temperature": 0.9}, {"frequency_penalty": 0.7}]
    requests = [
        (prefix[: 3 + i] + [11 * i + 5] * i, sampling(max_tokens=14 + i, seed=i, **fields[i % 3])) for i in range(9)
    ]
    together = []
    for device, steps_ahead in ((None, 0), (LazyDevice(), 1)):
        both = SchedulerWithRunner(
            *(decoder, torch.float32),
            num_blocks=12,
            block_size=4,
            max_model_len=40,
            max_num_batched_tokens=24,
            max_num_seqs=6,
            steps_ahead=steps_ahead,
            device=device,
        )
        results = both.generate(requests, arrivals={7: 4, 8: 6})
        assert both.scheduler.counters.num_preemptions > 0
        together.append([(result.token_ids, result.logprobs, result.finish_reasons) for result in results])
    assert together[0] == together[1]
    assert "launched 1" in device.events[:2]
