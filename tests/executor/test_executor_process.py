"""`python -m octavo.executor` from outside: what it says, what it answers, how it ends."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from octavo.executor.dtypes import choose_dtype
from octavo.executor.start.startup import start_executor
from octavo.protocol.config import Config
from octavo.protocol.messages import ExecutorReady, StepFailed
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.fake_backend import FakeBackend
from tests.fakes.runner_driver import init, share, step

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
END_TIMEOUT_S = 30
PROMPT = [5, 9, 300, 7]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def scheduler():
    with FakeBackend() as scheduler:
        yield scheduler


def command(*flags):
    return [sys.executable, "-P", "-m", "octavo.executor", *map(str, flags)]


def environ():
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def executor(address, model, *flags):
    """Run an executor; yield its process, which is ended if it has not ended."""
    flags = ("--model", model, "--backend-address", address, "--block-size", 4, "--num-threads", 1, *flags)
    process = subprocess.Popen(command(*flags), env=environ(), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_to_the_end(*flags):
    return subprocess.run(command(*flags), env=environ(), capture_output=True, text=True, timeout=120)


def test_its_life(checkpoint, scheduler):
    """Ready, steps, a step that raises: told to the scheduler, then the end."""
    with executor(scheduler.address, checkpoint, "--kv-cache-memory-bytes", "1MiB") as process:
        ready = scheduler.receive()
        assert isinstance(ready, ExecutorReady)
        block_bytes = 3 * 2 * 2 * 16 * 4 * 4  # layers, keys and values, heads, head size, tokens, float32
        assert (ready.num_blocks, ready.block_size) == ((1 << 20) // block_bytes, 4)
        assert (ready.max_model_len, ready.vocab_size) == (256, 320)
        life = ready.executor_incarnation
        scheduler.welcome("s", life)
        first = scheduler.run(step(1, share(1, 0, PROMPT, [3], init=init(PROMPT)), scheduler="s", executor=life))
        second = scheduler.run(step(2, share(1, 4, [], [3, 5]), scheduler="s", executor=life))
        assert first.busy_s > 0
        both = init(PROMPT, first.sequences[0].token_ids)
        tokens = [*PROMPT, *first.sequences[0].token_ids]
        again = scheduler.run(step(3, share(2, 0, tokens, [7, 8], init=both), scheduler="s", executor=life))
        assert again.sequences == second.sequences
        scheduler.send(step(4, share(1, 5, [], [3, 1 << 20]), scheduler="s", executor=life))
        failed = scheduler.wait_for(StepFailed)
        assert (failed.step_id, failed.executor_incarnation) == (4, life)
        assert "a block that is not among" in failed.error
        _, log = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 1
    assert "Traceback" in log
    assert all(progress.layers_done == 3 for progress in scheduler.progress if progress.step_id in (1, 2, 3))
    for phase in ("import", "configuration", "weights", "KV pool", "warm-up", "ready after"):
        assert phase in log
    assert "1 threads: as set by num_threads" in log


def test_it_outlives_its_scheduler(checkpoint, scheduler):
    begin = share(1, 0, PROMPT, [0], init=init(PROMPT))
    with executor(scheduler.address, checkpoint) as process:
        life = scheduler.receive().executor_incarnation
        scheduler.welcome("s", life)
        before = scheduler.run(step(1, begin, scheduler="s", executor=life))
        scheduler.close()
        with FakeBackend(scheduler.address) as successor:
            ready = successor.receive()
            assert (ready.scheduler_incarnation, ready.executor_incarnation) == ("s", life)
            successor.welcome("t", life, next_step_id=8)
            after = successor.run(step(8, begin, scheduler="t", executor=life))
            assert after.sequences == before.sequences
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 0
    assert "Traceback" not in log


def test_ctrl_c_ends_it_also_without_a_scheduler(checkpoint):
    with executor("tcp://127.0.0.1:9", checkpoint) as process:
        assert process.stderr is not None
        while "ready after" not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 0
    assert "Traceback" not in log


def test_a_signal_before_it_is_ready_ends_it_by_itself(tmp_path):
    """No Python function could, where a library calls back while it compiles."""
    config = tmp_path / "config.json"
    os.mkfifo(config)
    with executor("tcp://127.0.0.1:9", tmp_path) as process, config.open("wb"):  # once it reads that, and waits
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == -signal.SIGTERM
    assert "Traceback" not in log


def test_a_wrong_setting_is_one_line_and_status_2():
    ended = run_to_the_end("--block-sise", 4)
    assert ended.returncode == 2
    assert ended.stderr == "python -m octavo.executor: unknown argument --block-sise; did you mean --block-size?\n"


def test_a_model_that_cannot_be_loaded_is_a_paragraph_and_status_2(tmp_path):
    ended = run_to_the_end("--model", tmp_path)
    assert ended.returncode == 2
    assert "has no config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "set --dtype to float32, bfloat16 or auto"),
        ({"max_model_len": 1000}, "beyond what the model is made for: 256"),
        (
            {"kv_cache_memory_bytes": 10_000},
            "needs 196608 bytes of KV cache, and there is room for 10000: set --kv-cache-memory-bytes to 196608",
        ),
        (
            {"kv_cache_memory_bytes": 100_000},
            "set --max-model-len to 128 or less, or --kv-cache-memory-bytes to 196608",
        ),
        ({"kv_cache_dtype": "fp8"}, "set --kv-cache-dtype to auto"),
        ({"quantization": "awq"}, "this checkpoint is not quantized: leave --quantization out"),
        ({"attention_backend": "tritn"}, "is not available on this machine; it has: auto, cpu, reference"),
        ({"num_threads": 4096}, "num_threads is 4096"),
        ({"tensor_parallel_size": 3, "distributed_address": "file:///ranks"}, "can be split among 1, 2 or 4"),
        ({"tensor_parallel_size": 2}, "tcp://HOST:PORT"),
    ],
)
def test_what_cannot_be_started_names_the_setting(checkpoint, settings, message):
    with pytest.raises(ValueError, match=message):
        start_executor(Config(model=str(checkpoint), **settings))


def test_the_smallest_model_length_starts(checkpoint):
    executor = start_executor(Config(model=str(checkpoint), max_model_len=1, block_size=1, num_threads=1))
    assert executor.description.max_model_len == 1
    assert executor.runner.num_sequences == 0


@pytest.mark.parametrize(
    ("requested", "checkpoint_dtype", "device", "expected"),
    [
        ("auto", torch.float32, CPU, torch.float32),
        ("auto", torch.bfloat16, CPU, torch.bfloat16),
        ("auto", torch.float16, CPU, torch.float32),
        ("auto", torch.float16, CUDA, torch.float16),
        ("bfloat16", torch.float32, CPU, torch.bfloat16),
        ("float32", torch.bfloat16, CPU, torch.float32),
        ("float16", torch.bfloat16, CUDA, torch.float16),
    ],
)
def test_dtype(requested, checkpoint_dtype, device, expected):
    assert choose_dtype(requested, checkpoint_dtype, device)[0] == expected
