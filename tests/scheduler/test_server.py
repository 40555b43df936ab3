"""The server over real sockets, with a fake gateway and a fake executor."""

import random

import pytest

from protocol.sampling import SamplingParams
from tests.fakes.executor import FakeExecutor
from tests.fakes.gateway import FakeGateway, Stream
from tests.fakes.scheduler import ServerThread, toy_config
from tests.fakes.toy_model import EOS_TOKEN_ID, VOCAB_SIZE, expected_output


def sampling(max_tokens: int = 20, seed: int = 1, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **{"eos_token_ids": (EOS_TOKEN_ID,), **fields})


def assert_as_expected(stream: Stream, max_model_len: int = 1024) -> None:
    tokens, reason = expected_output(stream.prompt_token_ids, stream.sampling, max_model_len)
    assert (stream.token_ids, stream.finish_reason) == (tokens, reason), stream.request_id


@pytest.fixture(params=[True, False], ids=["one step ahead", "no step ahead"])
def async_scheduling(request):
    return request.param


def test_one_request(tmp_path, async_scheduling):
    config = toy_config(tmp_path, async_scheduling=async_scheduling)
    with (
        ServerThread(config) as server,
        FakeExecutor(config.backend_address) as executor,
        FakeGateway(config.frontend_address) as gateway,
    ):
        ready = gateway.wait_ready()
        assert (ready.model, ready.model_fingerprint, ready.vocab_size) == ("toy", "toy", VOCAB_SIZE)
        assert (ready.max_model_len, ready.block_size, ready.num_blocks) == (1024, 4, 64)
        assert (ready.max_num_seqs, ready.can_progress) == (16, True)
        stream = gateway.start("one", [1, 2, 3, 4, 5], sampling())
        gateway.wait_all()
        assert_as_expected(stream)
        server.check_idle()
        executor.check()
        assert gateway.num_gaps == 0
        assert stream.num_submits == 1


def test_many_requests(tmp_path, async_scheduling):
    config = toy_config(tmp_path, async_scheduling=async_scheduling)
    drawn = random.Random(1)
    with (
        ServerThread(config) as server,
        FakeExecutor(config.backend_address, num_blocks=40) as executor,
        FakeGateway(config.frontend_address) as gateway,
    ):
        gateway.wait_ready()
        for number in range(40):
            prompt = [drawn.randrange(1, 50) for _ in range(drawn.randrange(1, 60))]
            gateway.start(f"r{number}", prompt, sampling(drawn.randrange(0, 60), number))
        gateway.wait_all()
        for stream in gateway.streams.values():
            assert_as_expected(stream)
        server.check_idle()
        executor.check()
