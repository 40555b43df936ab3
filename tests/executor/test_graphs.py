"""Decode steps through recordings, of which all but the recording itself is what runs on a GPU."""

import pytest
import torch

from octavo.executor.models import LoadPlan, load_model, read_model_config
from octavo.executor.models.kv_caches import allocate_kv_caches
from octavo.executor.start.warm_up import capture_graphs
from octavo.executor.step.graphs import DecodeGraphs, at_least, batch_sizes, table_widths
from octavo.executor.step.packing import StepArrays, pack, pad
from octavo.executor.step.runner import ModelRunner
from octavo.kernels import cpu
from tests.fakes.cache_model import CacheModel, make_runner
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.lazy_device import LazyDevice
from tests.fakes.runner_driver import RunnerDriver, init, step

BLOCK_SIZE = 4


def test_sizes_are_few_ascending_and_end_with_the_largest():
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(32) == [1, 2, 4, 8, 16, 32]
    assert batch_sizes(100) == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 100]
    assert batch_sizes(256)[-4:] == [112, 128, 192, 256]
    assert batch_sizes(4000)[-1] == 512


def test_widths_reach_the_longest_sequence_in_few_steps():
    assert table_widths(100, 16) == [7]
    assert table_widths(2048, 16) == [128]
    assert table_widths(8192, 16) == [128, 512]
    assert table_widths(131_072, 16) == [128, 512, 2048, 8192]


def test_a_step_takes_the_least_that_it_fits_into():
    assert [at_least([1, 2, 4, 6], needed) for needed in (1, 3, 4, 5, 6, 7)] == [1, 4, 4, 6, 6, None]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    directory = make_checkpoint(tmp_path_factory.mktemp("tiny"))
    config = read_model_config(directory)
    return load_model(LoadPlan(directory, config, torch.float32, max_model_len=256, backend=cpu, progress=False))


def make_decoder_runner(decoder, device=None):
    kv_caches = allocate_kv_caches(decoder.kv_shapes, 64, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    return ModelRunner(decoder, kv_caches, cpu, block_size=BLOCK_SIZE, num_blocks=64, device=device)


PROMPTS = {1: [5, 9, 2, 7, 7], 2: [3], 3: [300, 8, 8, 8, 8, 17, 4, 4, 31], 4: [2] * 14}
SAMPLING = {
    1: {"num_logprobs": 2},
    2: {"temperature": 1.0, "seed": 3},
    3: {"temperature": 0.9, "seed": 8, "num_logprobs": 0},
    4: {},
}


def run(runner, num_steps=6):
    """Return the results of steps launched one ahead: first chunks, then decode steps of ever fewer sequences."""
    driver = RunnerDriver(runner)
    launched = [driver.launch(*(driver.share(i, p, init=init(p, **SAMPLING[i])) for i, p in PROMPTS.items()))]
    results = []
    for number in range(num_steps):
        running = list(PROMPTS)[: max(1, 4 - number // 2)]
        launched.append(driver.launch(*(driver.share(i, []) for i in running)))
        results.append(launched[-2].wait().sequences)
    return [*results, launched[-1].wait().sequences]


def test_recorded_steps_give_the_same_bits(decoder):
    """Padding included: 3 sequences run as 4, and block tables are as wide as the longest sequence's may become."""
    device = LazyDevice()
    runner = make_decoder_runner(decoder, device)
    runner.graphs = DecodeGraphs(lambda inputs: decoder(inputs, runner.kv_caches), device, [1, 2, 4], [3, 8])
    assert len(runner.graphs) == len(list(runner.graphs.capture())) == device.num_recorded == 6
    assert all((cache == 0).all() for layer in runner.kv_caches for cache in layer), "padding was stored"
    assert run(runner) == run(make_decoder_runner(decoder))
    assert device.num_replays == 6


def test_what_has_no_recording_is_launched_as_it_is():
    device = LazyDevice()
    runner = make_runner(CacheModel(), device=device, num_blocks=64)
    runner.graphs = DecodeGraphs(lambda inputs: runner.model.forward(inputs, runner.kv_caches), device, [2], [2])
    list(runner.graphs.capture())
    driver = RunnerDriver(runner)
    prompts = {1: [1, 2, 3], 2: [4], 3: [5]}
    driver.do(*(driver.share(i, prompt, init=init(prompt)) for i, prompt in prompts.items()))
    driver.do(*(driver.share(i, []) for i in prompts))  # three sequences
    driver.do(driver.share(1, []), driver.share(4, [7, 7], init=init([7, 7])))  # a prompt among them
    driver.do(driver.share(5, [1] * 9, init=init([1] * 9)))
    assert device.num_replays == 0
    driver.do(driver.share(2, []), driver.share(3, []))
    assert device.num_replays == 1
    driver.do(driver.share(5, []))  # ten tokens are three blocks
    assert device.num_replays == 1


@pytest.mark.parametrize("looks", [False, True])
def test_a_model_that_asks_for_values_is_not_recorded(looks, caplog):
    class Looking(CacheModel):
        def forward(self, inputs, kv_caches):
            hidden_TE = inputs.positions_T[:, None].float()
            return hidden_TE[hidden_TE[:, 0] >= 0] if looks else hidden_TE

    runner = make_runner(Looking(), device=LazyDevice())
    capture_graphs(runner, max_num_seqs=2, max_model_len=8)
    assert (runner.graphs is None) == looks
    assert ("waits for the device" in caplog.text) == looks


def test_padding_sees_block_0_and_is_stored_nowhere():
    runner = make_runner()
    driver = RunnerDriver(runner)
    shares, _ = runner._take_shares(step(1, driver.share(1, [9], init=init([9])), driver.share(2, [8], init=init([8]))))
    padded = pad(pack(shares, 4, 32), 4, 3)
    assert [array.tolist() for array in padded] == [
        [9, 8, 0, 0],
        [0, 0, 0, 0],
        [0, 4, -1, -1],
        [0, 1, 2, 3, 4],
        [1, 1, 1, 1],
        [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]],
    ]
    assert [array.dtype for array in padded] == [array.dtype for array in pack(shares, 4, 32)]
    assert isinstance(padded, StepArrays)
