"""`octavo bench step`: the floor's arithmetic, and the executor of a tiny model timed and taken apart."""

import argparse
import time
from pathlib import Path
from typing import Any

from octavo.kernels import cpu  # before torch

# isort: split
import msgspec
import pytest
import torch

from octavo.bench import step
from octavo.bench.machine import Place
from octavo.bench.step import floor, results
from octavo.bench.step.ceilings import better_of, measure_ceilings
from octavo.bench.step.floor import AttentionLayer, Ceilings, ModelWork, Product, StepShape, Work
from octavo.bench.step.measure import Request, measure
from octavo.bench.step.model_work import model_work, product_names
from octavo.bench.step.results import Result
from octavo.bench.step.steps import Case, why_not
from octavo.bench.step.timed import PART_OF, Stopwatch, TimedBackend
from octavo.executor.models import Decoder, LoadPlan, load_model, read_model_config
from octavo.executor.models.compiled import compile_decoder
from octavo.executor.models.kv_caches import allocate_kv_caches
from octavo.executor.step.runner import ModelRunner
from octavo.kernels.backend import Backend
from octavo.protocol.config import Config, ConfigError
from tests.fakes import runner_driver as driver
from tests.fakes.checkpoints import make_checkpoint

SLOW = Ceilings(read_bytes_per_s=1000.0, flops_per_s={"float32": 500.0, "bfloat16": 2000.0})


def test_a_part_takes_what_the_slower_of_reading_and_multiplying_takes() -> None:
    assert floor.part_floor_s(Work(num_bytes=3000, num_flops=1000), SLOW) == 3.0
    assert floor.part_floor_s(Work(num_bytes=1000, num_flops=2000), SLOW) == 4.0
    assert floor.part_floor_s(Work(num_bytes=1000, num_flops=4000, dtype="bfloat16"), SLOW) == 2.0
    assert floor.step_floor_s({"one": Work(3000, 1000), "other": Work(1000, 2000)}, SLOW) == 7.0


def test_a_product_reads_its_weights_once_and_multiplies_for_each_row() -> None:
    projection = Product("o_proj", num_weights=600, num_bytes=300, dtype="float32", only_sampled=False)
    head = projection._replace(name="lm_head", only_sampled=True)
    three_chunks = StepShape(num_seqs=3, num_new_tokens=5, seq_len=5)
    assert floor.product_work(projection, three_chunks) == Work(300, 2 * 15 * 600)
    assert floor.product_work(head, three_chunks) == Work(300, 2 * 3 * 600)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 7, 100])
@pytest.mark.parametrize(("num_new_tokens", "seq_len"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_what_is_seen_is_what_a_mask_shows(num_new_tokens: int, seq_len: int, window: int | None) -> None:
    queries, keys = torch.arange(seq_len)[-num_new_tokens:, None], torch.arange(seq_len)[None]
    mask = (keys <= queries) & (queries - keys < (window or seq_len))
    shape = StepShape(1, num_new_tokens, seq_len)
    assert floor.seen_tokens(shape, window) == mask.any(0).sum()
    assert floor.seen_pairs(shape, window) == mask.sum()


def test_attention_reads_all_keys_and_values_of_each_sequence() -> None:
    layer = AttentionLayer(num_heads=4, num_kv_heads=2, key_size=8, value_size=6, sliding_window=None)
    work = floor.attention_work(layer, StepShape(num_seqs=3, num_new_tokens=1, seq_len=10), kv_itemsize=2)
    assert work == Work(num_bytes=3 * 10 * 2 * (8 + 6) * 2, num_flops=3 * 10 * 4 * 2 * (8 + 6))


def test_parts_are_the_sums_over_layers() -> None:
    layer = AttentionLayer(4, 2, 8, 8, None)
    down = Product("down_proj", 100, 50, "float32", False)
    work = ModelWork([down, down], [layer, layer, layer], kv_itemsize=4, norm_bytes=7)
    parts = work.parts(StepShape(2, 1, 5))
    assert parts == {
        "attention": Work(3 * 2 * 5 * 2 * 16 * 4, 3 * 2 * 2 * 5 * 4 * 16),
        "rotary, KV store": Work(3 * 2 * 2 * 16 * 4),
        "norms": Work(7),
        "down_proj": Work(100, 2 * 2 * 2 * 100),
    }


def test_ceilings_are_measured_and_the_better_ones_count() -> None:
    measured = measure_ceilings(num_bytes=1 << 20, squares=(64,))
    assert measured.read_bytes_per_s > 0
    assert measured.flops_per_s["float32"] > 0
    other = Ceilings(2000.0, {"float32": 400.0, "bfloat16": 3000.0})
    assert better_of(SLOW, other) == Ceilings(2000.0, {"float32": 500.0, "bfloat16": 3000.0})


def test_a_step_that_no_server_would_do_is_left_out_by_the_setting_that_forbids_it() -> None:
    config = Config(max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
    reasons = [
        why_not(case, config, max_model_len=100, num_blocks=12)
        for case in (Case(8, 1, 16), Case(9, 1, 16), Case(1, 65, 65), Case(1, 1, 101), Case(2, 1, 97), Case(1, 64, 64))
    ]
    assert reasons == [
        None,
        "max_num_seqs is 8",
        "max_num_batched_tokens is 64",
        "max_model_len is 100",
        "it needs 14 KV blocks, and there is room for 12",
        None,
    ]


def test_a_timed_backend_has_all_functions_and_returns_what_they_return() -> None:
    weight_NE = torch.randn(32, 16)
    packed = cpu.pack_linear(weight_NE)
    timed = TimedBackend(cpu, {id(packed): "o_proj"})
    functions = {name for name in vars(Backend) if not name.startswith("_")}
    assert functions <= vars(timed).keys()
    assert PART_OF.keys() <= functions
    x_TE = torch.randn(3, 16)
    assert torch.equal(timed.linear(x_TE, packed), cpu.linear(x_TE, packed))
    assert torch.equal(timed.silu_and_mul(x_TE), cpu.silu_and_mul(x_TE))
    assert [list(call) for call in timed.calls] == [["o_proj"], ["activation"]]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPTNeoXForCausalLM"])
def test_the_work_of_a_model_is_what_its_layers_hold(tmp_path: Path, architecture: str) -> None:
    make_checkpoint(tmp_path, architecture)
    config = read_model_config(tmp_path)
    model = load_model(LoadPlan(tmp_path, config, torch.float32, max_model_len=64, backend=cpu, progress=False))
    work = model_work(model, torch.float32, torch.bfloat16)
    assert len(work.attention) == model.num_layers
    assert work.kv_itemsize == 2
    assert sum(each.num_bytes for each in work.products) == sum(packed.nbytes for packed in model.products)
    assert [each.only_sampled for each in work.products].count(True) == 1
    assert len(product_names(model)) == len(model.products)


# Of three layers, the final norm, the head; compiled, of the layers, the head.
@pytest.mark.parametrize(("quantization", "num_calls"), [("auto", 3 * 9 + 1 + 1), ("int4", 2)])
def test_a_tiny_model_is_timed_and_taken_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quantization: Any, num_calls: int
) -> None:
    model = str(make_checkpoint(tmp_path / "tiny"))
    config = Config(model=model, quantization=quantization, kv_cache_memory_bytes=1 << 20, log_level="warning")
    request = Request(batch=(1, 200), context=(24,), prefill=(8,), profile=(2,), repeats=3, temperature=1.0)
    results.show(measure(config, "tiny", request, lambda: SLOW), tmp_path / "step.json")
    result = msgspec.json.decode((tmp_path / "step.json").read_bytes(), type=Result)
    [decode], [prefill], [profile] = result.decode, result.prefill, result.profiles
    assert (decode.batch, decode.new_tokens, decode.context, decode.repeats) == (1, 1, 24, 3)
    assert (prefill.batch, prefill.new_tokens, prefill.repeats) == (1, 8, 3)
    assert result.left_out == ["batch 200, context 24: max_num_seqs is 128"]
    products = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    kernels_called = {"attention", "norms", "activation", "rotary, KV store"}
    kernels_called |= {"embedding"} if quantization == "int4" else set()  # as a program's own; torch's lies between
    around = {"packing", "between kernels", "sampling"}
    assert {part.name for part in profile.parts} == products | kernels_called | around
    weightless = {"activation", "embedding"}
    assert {part.name for part in profile.parts if part.bytes > 0} == products | kernels_called - weightless
    assert profile.num_calls == num_calls
    assert all(part.median_s > 0 for part in profile.parts)
    assert "batch 200, context 24: max_num_seqs is 128" in capsys.readouterr().out


@pytest.mark.parametrize("is_compiled", [False, True], ids=["kernel by kernel", "compiled"])
def test_the_same_tokens_come_out_while_a_step_is_taken_apart(tmp_path: Path, is_compiled: bool) -> None:
    make_checkpoint(tmp_path)
    config = read_model_config(tmp_path)
    given = {"backend": cpu, "quantization": "int4" if is_compiled else "auto", "progress": False}
    model = load_model(LoadPlan(tmp_path, config, torch.float32, max_model_len=64, **given))
    assert isinstance(model, Decoder)
    layers = model.compiled = compile_decoder(model)
    assert (layers is not None) == is_compiled
    kv_caches = allocate_kv_caches(model.kv_shapes, 4, 16, torch.float32, torch.device("cpu"))
    runner = ModelRunner(model, kv_caches, cpu, block_size=16, num_blocks=4)
    prompt = driver.share(0, 0, range(5, 17), [2], init=driver.init(range(5, 17)))
    expected = runner.run(driver.step(1, prompt))
    stopwatch, results_found = Stopwatch(runner, product_names(model)), []
    runner.reset()
    with stopwatch.attached():
        start_ns = time.perf_counter_ns()
        times_ns = stopwatch.times_ns(driver.step(1, prompt))
        assert sum(times_ns.values()) <= time.perf_counter_ns() - start_ns
        runner.reset()
        results_found.append(runner.run(driver.step(1, prompt)))
    assert min(times_ns.values()) > 0
    num_calls = stopwatch.num_calls
    runner.reset()
    results_found.append(runner.run(driver.step(1, prompt)))
    assert results_found == [expected, expected]
    assert stopwatch.num_calls == num_calls  # which counts no more once it is taken off
    assert runner.model is model
    assert model.compiled is layers


def test_parts_add_up_to_the_step() -> None:
    times_ns = [{"o_proj": 2_000_000, "sampling": 1_000_000}] * 3
    parts = {"o_proj": Work(2, 0)}
    profile = results.profile(Case(1, 1, 24), times_ns, parts, SLOW, num_calls=10, overhead_ns=500.0)
    assert profile.median_s == pytest.approx(sum(part.median_s for part in profile.parts)) == 0.003
    assert profile.clocks_s == pytest.approx(5e-6)
    assert [part.floor_s for part in profile.parts] == [0.002, 0.0]


def test_a_table_shows_the_floor_beside_what_was_measured() -> None:
    timing = results.timing(Case(2, 1, 24), [0.2] * 5, {"o_proj": Work(100, 0)}, SLOW)
    assert (timing.floor_s, timing.share, timing.tokens_per_s) == (0.1, 0.5, 10.0)
    shown = results.report(Result(PLACE, "m", {}, 2, "float32", SLOW, 1.0, None, {}, [timing], [], [], []))
    assert "|     2 |      24 |    200.00 | 200.00 | 200.00 |       10 |   100.00 |              50% |" in shown


@pytest.mark.parametrize(
    "arguments", [("--batch", "0"), ("--context", "1"), ("--repeats", "0"), ("--temperature", "3"), ("--batch", "x")]
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, str]) -> None:
    with pytest.raises(argparse.ArgumentError, match=arguments[0]):
        parse(*arguments)


def test_settings_of_another_machine_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ATTENTION_BACKEND", "triton"), ("TENSOR_PARALLEL_SIZE", "2")):
        monkeypatch.setenv(f"OCTAVO_{name}", value)
        with pytest.raises(ConfigError, match=name.lower()):
            step.run(parse())
        monkeypatch.delenv(f"OCTAVO_{name}")


PLACE = Place("2026-01-01T00:00:00Z", "0", "3", {"CPU": "a CPU"}, {}, {})


def parse(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    step.describe(parser)
    return vars(parser.parse_args(arguments))
