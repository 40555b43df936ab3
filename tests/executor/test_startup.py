"""From a Config to a runner, on a device that only seems to be a GPU."""

import pytest
import torch

from octavo.executor.dtypes import choose_kv_dtype
from octavo.executor.models import LoadPlan, load_model, read_model_config
from octavo.executor.start.startup import make_runner, start_executor
from octavo.executor.start.warm_up import capture_graphs, largest_step, warm_up
from octavo.executor.step.device import CpuDevice
from octavo.kernels import reference
from octavo.kernels.choice import choose_backend
from octavo.protocol.config import Config
from octavo.protocol.messages import unpack_ids
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.lazy_device import LazyDevice
from tests.fakes.paged_decoding import PagedDecoding
from tests.fakes.runner_driver import RunnerDriver, init

REFERENCE = choose_backend("reference")
FP8 = torch.float8_e4m3fn
TOKENS = [5, 300, 7, 7, 120, 9, 31, 2, 250, 64]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def decoder(checkpoint):
    config = read_model_config(checkpoint)
    return load_model(LoadPlan(checkpoint, config, torch.float32, max_model_len=256, backend=reference, progress=False))


def runner_of(decoder, kv_dtype=torch.float32, device=None, **fields):
    config = Config(**{"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 16} | fields)
    return make_runner(config, decoder, 40, kv_dtype, REFERENCE.backend, device or CpuDevice())


def test_the_largest_step_has_as_many_tokens_and_sequences_as_a_scheduler_may_plan():
    step = largest_step(Config(max_num_seqs=3, max_num_batched_tokens=16, block_size=4), 256)
    assert [len(unpack_ids(part.token_ids)) for part in step.sequences] == [6, 5, 5]
    assert [len(unpack_ids(part.block_table)) for part in step.sequences] == [2, 2, 2]
    step = largest_step(Config(max_num_seqs=2, max_num_batched_tokens=512), 40)
    assert [len(unpack_ids(part.token_ids)) for part in step.sequences] == [40, 40]


def test_the_pool_takes_what_the_largest_step_leaves(decoder):
    device = LazyDevice(peak=1 << 60)
    with pytest.raises(ValueError, match="room for 0"):
        runner_of(decoder, device=device)
    assert device.events == ["launched 0", "waited for 0"]  # it was tried
    assert runner_of(decoder, device=LazyDevice()).num_blocks == 3 * 10


def test_an_fp8_cache_takes_a_quarter_of_float32_and_gives_nearly_the_same_logits(decoder):
    pools = [runner_of(decoder, dtype, kv_cache_memory_bytes=3 << 20).num_blocks for dtype in (torch.float32, FP8)]
    assert pools[1] == 4 * pools[0]
    exact, near = (PagedDecoding(decoder, 8, 4, dtype).score(TOKENS) for dtype in (torch.float32, FP8))
    # Three bits of mantissa: keys and values are off by up to 1 / 16 each, over three layers.
    relative = (near - exact).norm() / exact.norm()
    assert 0 < relative < 0.125, relative


def test_a_runner_with_an_fp8_cache_generates_in_chunks_what_it_does_in_one_piece(decoder):
    def tokens(chunk):
        driver = RunnerDriver(runner_of(decoder, FP8))
        for start in range(0, len(TOKENS), chunk):
            begin = init(TOKENS) if start == 0 else None
            part = TOKENS[start : start + chunk]
            results = driver.do(driver.share(1, part, sample=start + chunk >= len(TOKENS), init=begin))
        results += [result for _ in range(5) for result in driver.do(driver.share(1, []))]
        return [result.token_ids for result in results]

    assert tokens(3) == tokens(100)


def test_values_beyond_the_range_of_fp8_become_its_largest():
    k_cache, v_cache = torch.zeros(1, 1, 2, 4, dtype=FP8), torch.zeros(1, 1, 4, 2, dtype=FP8)
    x_TKD = torch.tensor([[[1e6, -1e6]]])
    reference.store_kv(x_TKD, x_TKD, k_cache, v_cache, torch.tensor([1]))
    assert k_cache.float()[0, 0, :, 1].tolist() == v_cache.float()[0, 0, 1].tolist() == [448, -448]


def test_the_cpu_kernels_refuse_an_fp8_cache_by_name(checkpoint):
    config = Config(model=str(checkpoint), kv_cache_dtype="fp8", attention_backend="cpu")
    with pytest.raises(ValueError, match="kv_cache_dtype fp8 is not supported by the cpu kernels"):
        start_executor(config)
    assert choose_kv_dtype("auto", torch.bfloat16, choose_backend("cpu")) == torch.bfloat16
    assert choose_kv_dtype("fp8", torch.bfloat16, REFERENCE) == FP8


def test_graphs_are_recorded_for_every_size_and_used(decoder):
    device = LazyDevice()
    runner = runner_of(decoder, device=device)
    warm_up(runner, 40)
    capture_graphs(runner, 3, 40)
    assert device.num_recorded == 3  # 1, 2 and 3 sequences of 40 tokens
    warm_up(runner, 40)
    assert device.num_replays == 1
    assert runner.num_sequences == 0


def test_enforce_eager_is_said_to_do_nothing_on_the_cpu(checkpoint, caplog):
    given = {"attention_backend": "reference", "block_size": 4, "kv_cache_memory_bytes": 1 << 20}
    config = Config(model=str(checkpoint), enforce_eager=True, **given)
    with caplog.at_level("INFO"):
        executor = start_executor(config)
    assert "enforce_eager has no effect on the CPU" in caplog.text
    assert executor.runner.graphs is None
