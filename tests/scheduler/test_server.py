"""The server over real sockets, with a fake gateway and a fake executor."""

import logging
import random
import time
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from octavo.protocol.messages import PROTOCOL_VERSION, ExecutorReady, Hello, Submit, encode, pack_ids
from octavo.protocol.sampling import Sampling
from octavo.protocol.sockets import connect_dealer
from tests.fakes.fake_executor import DEVICE_BYTES, USED_BYTES, FakeExecutor
from tests.fakes.fake_gateway import FakeGateway, Stream
from tests.fakes.scheduler_thread import SchedulerThread, socket_directory, toy_config
from tests.fakes.toy_model import EOS_TOKEN_ID, VOCAB_SIZE, expected_output, logprobs_of
from tests.fakes.waiting import wait_until

SLOW_STEP_S = 0.05  # an endless request then lasts longer than any timeout of a peer


def sampling(max_tokens: int = 20, seed: int = 1, **fields) -> Sampling:
    return Sampling(max_tokens=max_tokens, seed=seed, **{"eos_token_ids": (EOS_TOKEN_ID,), **fields})


def endless(seed: int = 1, max_tokens: int = 200) -> Sampling:
    """Return sampling that only `max_tokens` ends."""
    return sampling(max_tokens, seed, eos_token_ids=())


def assert_as_expected(stream: Stream, max_model_len: int = 1024) -> None:
    tokens, reason = expected_output(stream.prompt_token_ids, stream.sampling, max_model_len)
    assert (stream.token_ids, stream.finish_reason) == (tokens, reason), stream.request_id


@pytest.fixture
def directory():
    with socket_directory() as path:
        yield path


@pytest.fixture
def house(directory):
    """Build a scheduler with one executor and one gateway; errors that they found are raised at the end."""

    @contextmanager
    def build(*, settings=None, high_water_mark=1000, gateway=None, **executor_settings):
        config = toy_config(directory, **(settings or {}))
        with (
            SchedulerThread(config, high_water_mark) as server,
            FakeExecutor(config.backend_address, **executor_settings) as executor,
            FakeGateway(config.frontend_address, **(gateway or {})) as fake_gateway,
        ):
            yield server, executor, fake_gateway
            fake_gateway.check()
            server.check_idle()
            executor.check()

    return build


@pytest.fixture(params=[True, False], ids=["one step ahead", "no step ahead"])
def async_scheduling(request):
    return request.param


def test_one_request(house, async_scheduling):
    with house(settings={"async_scheduling": async_scheduling}) as (_, _, gateway):
        ready = gateway.wait_ready()
        assert (ready.model_fingerprint, ready.vocab_size) == ("toy", VOCAB_SIZE)
        assert (ready.max_model_len, ready.block_size, ready.num_blocks) == (1024, 4, 64)
        assert (ready.max_num_seqs, ready.can_progress) == (16, True)
        stream = gateway.start("one", [1, 2, 3, 4, 5], sampling())
        gateway.wait_all()
        assert_as_expected(stream)
        assert (gateway.num_gaps, stream.num_submits) == (0, 1)


def test_many_requests(house, async_scheduling):
    drawn = random.Random(1)
    with house(settings={"async_scheduling": async_scheduling}, num_blocks=40) as (server, _, gateway):
        gateway.wait_ready()
        for number in range(40):
            prompt = [drawn.randrange(1, 50) for _ in range(drawn.randrange(1, 60))]
            gateway.start(f"r{number}", prompt, sampling(drawn.randrange(0, 60), number))
        gateway.wait_all()
        for stream in gateway.streams.values():
            assert_as_expected(stream)
        assert server.scheduler.counters.num_preemptions > 0
        wait_until(lambda: server.server.backend.link.num_in_flight == 0)


def test_steps_in_flight(house, async_scheduling):
    """With planning ahead, a second step is in flight while one runs; without, there is only one."""
    with house(settings={"async_scheduling": async_scheduling}, step_s=0.005) as (server, _, gateway):
        gateway.wait_ready()
        stream = gateway.start("r", [1, 2, 3], endless(max_tokens=40))
        most = 0
        while not stream.ended.is_set():
            most = max(most, server.server.backend.link.num_in_flight)
        assert most == (2 if async_scheduling else 1)
        assert_as_expected(stream)


def test_a_long_prompt_is_cut_small_while_another_generates(house, async_scheduling):
    """The executor says that a token takes 5 ms: beside one generating sequence, 9 tokens fill a step of 50 ms."""
    settings = {"async_scheduling": async_scheduling}
    with house(settings=settings, num_blocks=200, reported_token_s=0.005) as (_, executor, gateway):
        gateway.wait_ready()
        alone = gateway.start("alone", range(40), endless(1, 1))
        gateway.wait_all()
        assert [list(step.num_tokens.values()) for step in executor.steps] == [[40]]
        generating = gateway.start("generating", [1, 2], endless(2, 400))
        wait_until(lambda: len(generating.token_ids) > 5)
        beside = gateway.start("beside", range(50, 90), endless(3, 1))
        gateway.wait_all()
        steps = [list(step.num_tokens.values()) for step in executor.steps]
        assert [step for step in steps[2:] if step != [1]] == [[1, 9]] * 4 + [[1, 4]]
        for stream in (alone, generating, beside):
            assert_as_expected(stream)


def test_logprobs(house):
    with house(settings={"max_num_batched_tokens": 16}) as (_, _, gateway):
        gateway.wait_ready()
        prompt = list(range(1, 60))
        fields = {"num_logprobs": 3, "num_prompt_logprobs": 2}
        streams = [gateway.start(f"r{n}", prompt, sampling(30, n, **fields)) for n in range(3)]
        nothing = gateway.start("nothing", prompt, sampling(0, 9, **fields))
        plain = gateway.start("plain", prompt, sampling(30, 4))
        gateway.wait_all()
        for stream in streams:
            assert_as_expected(stream)
            assert stream.logprobs == logprobs_of(stream.token_ids, 3)
            assert stream.prompt_logprobs == logprobs_of(prompt[1:], 2)
        assert (nothing.token_ids, nothing.finish_reason) == ([], "length")
        assert nothing.prompt_logprobs == logprobs_of(prompt[1:], 2)
        assert (plain.logprobs, plain.prompt_logprobs) == (None, None)


def test_one_prefix_is_computed_once(house):
    with house() as (_, executor, gateway):
        gateway.wait_ready()
        prompt = list(range(1, 130))
        for number in range(8):
            gateway.start(f"r{number}", [*prompt, 500 + number], endless(number, max_tokens=1))
        gateway.wait_all()
        assert executor.num_scheduled_tokens == 130 + 7 * 2  # the last full block ends at 128
        cached = sorted(stream.num_cached_tokens for stream in gateway.streams.values())
        assert cached == [0] + [128] * 7


def test_finished_requests_are_forgotten_once_acknowledged(house):
    with house() as (server, _, gateway):
        gateway.wait_ready()
        for number in range(5):
            gateway.start(f"r{number}", [1, 2], sampling(5, number))
        gateway.wait_all()
        wait_until(lambda: server.server.frontend.ledger.num_records == 0)


def test_64_streams_some_of_whose_clients_leave(house):
    drawn = random.Random(64)
    with house(num_blocks=96, settings={"max_num_seqs": 32}, step_s=0.001) as (server, _, gateway):
        gateway.wait_ready()
        left = []
        for number in range(64):
            prompt = [drawn.randrange(1, 9) for _ in range(drawn.randrange(1, 40))]
            stream = gateway.start(f"r{number}", prompt, endless(number, drawn.randrange(1, 120)))
            if drawn.random() < 0.3:
                left.append((stream, drawn.randrange(0, 30)))
        while left:
            gateway.wait_turn()
            for stream, num_tokens in left.copy():
                if stream.ended.is_set() or len(stream.token_ids) >= num_tokens:
                    gateway.abort(stream)
                    left.remove((stream, num_tokens))
        gateway.wait_all()
        num_left = 0
        for stream in gateway.streams.values():
            if stream.finish_reason == "abort":
                num_left += 1
            else:
                assert_as_expected(stream)
        assert num_left > 5
        server.check_idle()
        scheduler = server.scheduler
        assert scheduler.num_free_blocks + scheduler.num_cached_blocks == 96
        finished = scheduler.counters.finished
        assert sum(finished.values()) == 64
        assert finished["abort"] <= num_left  # a request may end before its Abort arrives


# What is refused


def rejection(gateway: FakeGateway, prompt: list[int], sampled: Sampling | None = None, **options):
    stream = gateway.start(f"x{len(gateway.streams)}", prompt, sampled or sampling(), **options)
    gateway.wait_all()
    assert stream.rejected is not None
    return stream.rejected


def test_a_request_that_can_never_be_served_is_refused(house):
    with house(max_model_len=100) as (_, _, gateway):
        gateway.wait_ready()
        assert "not in the vocabulary" in rejection(gateway, [VOCAB_SIZE]).reason
        assert "not in the vocabulary" in rejection(gateway, [-1]).reason
        assert "no tokens" in rejection(gateway, []).reason
        too_long = rejection(gateway, [1] * 101)
        assert "the model takes 100" in too_long.reason
        assert too_long.retry_after_s is None
        assert_served(gateway)


def test_a_request_that_never_fits_the_pool_is_refused(house):
    with house(num_blocks=4) as (_, _, gateway):
        gateway.wait_ready()
        assert "the pool has 4" in rejection(gateway, [1] * 20).reason
        assert_served(gateway)


def assert_served(gateway: FakeGateway) -> None:
    stream = gateway.start(f"ok{len(gateway.streams)}", [1, 2, 3], sampling(5))
    gateway.wait_all()
    assert_as_expected(stream)


def test_a_full_queue_says_when_to_come_back(house):
    with house(settings={"max_num_seqs": 1, "max_num_queued_reqs": 2}, step_s=0.002) as (_, _, gateway):
        gateway.wait_ready()
        streams = [gateway.start("r0", [1, 2], endless(0))]
        wait_until(lambda: streams[0].token_ids)
        streams += [gateway.start(f"r{number}", [1, 2], endless(number, 5)) for number in (1, 2)]
        wait_until(lambda: all(stream.is_admitted for stream in streams))
        refused = gateway.start("r3", [1, 2], sampling())
        assert refused.ended.wait(5)
        assert "waiting" in refused.rejected.reason
        assert refused.rejected.retry_after_s >= 1
        gateway.wait_all()
        for stream in streams:
            assert_as_expected(stream)


def test_a_resumed_request_is_not_refused_for_a_full_queue(house):
    with house(settings={"max_num_seqs": 1, "max_num_queued_reqs": 1}, step_s=0.002) as (_, _, gateway):
        gateway.wait_ready()
        running = gateway.start("r0", [1, 2], endless(0))
        wait_until(lambda: running.token_ids)
        gateway.start("r1", [1, 2], endless(1, 5))
        wait_until(lambda: gateway.streams["r1"].is_admitted)
        resumed = Stream("r2", [1, 2], endless(2, 10))
        resumed.token_ids = expected_output([1, 2], endless(2, 10))[0][:4]
        gateway.resume(resumed)
        gateway.wait_all()
        assert resumed.rejected is None
        for stream in gateway.streams.values():
            assert_as_expected(stream)


def test_another_protocol_version_is_never_served(house, caplog):
    with house() as (server, _, gateway):
        gateway.wait_ready()
        with FakeGateway(server.config.frontend_address, protocol_version=PROTOCOL_VERSION + 1) as stranger:
            wait_until(lambda: any("speaks protocol" in record.message for record in caplog.records))
            stream = stranger.start("r", [1, 2], sampling())
            stranger.wait_all()
            assert "another protocol" in stream.rejected.reason
            assert stranger.ready is None
        assert_served(gateway)


@pytest.mark.parametrize("side", ["frontend_address", "backend_address"])
def test_a_malformed_message_is_dropped(house, caplog, side):
    caplog.set_level(logging.WARNING)
    started_s = time.monotonic()
    with house() as (server, _, gateway):
        gateway.wait_ready()
        with (
            zmq.Context() as context,
            connect_dealer(context.socket(zmq.DEALER), getattr(server.config, side), "stranger") as socket,
        ):
            for frames in ([b""], [b"\xc1"], [b"x", b"y"], [b"", b"", b""], [bytes(1 << 20)]):
                socket.send_multipart(frames)
            socket.send_multipart([encode(ExecutorReady("", 0, 0, 0, 0, ""))[:-1]])
            assert_served(gateway)
            wait_until(lambda: any("dropped a message" in record.message for record in caplog.records))
        num_complaints = sum("dropped a message" in record.message for record in caplog.records)
        assert num_complaints <= 1 + (time.monotonic() - started_s)  # six messages were sent; the machine may be slow


# What fails


def test_a_dead_gateway_is_noticed_by_nobody_else(house):
    settings = {"peer_timeout_s": 1.0}
    with house(settings=settings, step_s=SLOW_STEP_S, num_blocks=1000) as (server, executor, gateway):
        gateway.wait_ready()
        kept = gateway.start("kept", [1, 2], endless(1, 300))
        with FakeGateway(server.config.frontend_address) as doomed:
            doomed.wait_ready()
            streams = [doomed.start(f"r{number}", [3, number], endless(number, 900)) for number in range(3)]
            wait_until(lambda: all(stream.token_ids for stream in streams))
            assert server.scheduler.num_running == 4
        wait_until(lambda: server.scheduler.counters.finished.get("abort") == 3)
        executor.step_s = 0.0
        gateway.wait_all()
        assert_as_expected(kept)
        assert not any(stream.ended.is_set() for stream in streams)


def test_a_frozen_gateway_goes_on_where_it_was(house):
    with house(settings={"peer_timeout_s": 0.4}, num_blocks=200) as (server, executor, gateway):
        gateway.wait_ready()
        stream = gateway.start("r", [1, 2], endless(1, 400))
        wait_until(lambda: len(stream.token_ids) > 10)
        executor.step_s = SLOW_STEP_S
        gateway.freeze()
        wait_until(lambda: server.scheduler.counters.finished.get("abort") == 1)
        executor.step_s = 0.0
        gateway.thaw()
        gateway.wait_all()
        assert_as_expected(stream)
        assert stream.num_submits > 1


def test_a_gateway_that_does_not_read_fills_its_queue_and_loses_nothing(house):
    small = {"high_water_mark": 2}
    fields = {"num_logprobs": 100}
    with house(high_water_mark=2, gateway=small, num_blocks=600) as (server, _, gateway):
        gateway.wait_ready()
        gateway.stop_reading()
        streams = [gateway.start(f"r{n}", [1, 2], sampling(300, n, eos_token_ids=(), **fields)) for n in range(4)]
        ledger = server.server.frontend.ledger
        wait_until(lambda: any(peer.blocked_since_s is not None for peer in list(ledger.gateways.values())))
        wait_until(lambda: not server.scheduler.has_work)
        gateway.read_again()
        gateway.wait_all()
        for stream in streams:
            assert_as_expected(stream)
            assert stream.logprobs == logprobs_of(stream.token_ids, 100)


def test_nobody_is_ready_without_an_executor(directory):
    config = toy_config(directory)
    with SchedulerThread(config), FakeGateway(config.frontend_address) as gateway:
        stream = gateway.start("early", [1, 2, 3], sampling())
        wait_until(lambda: stream.num_submits > 1)  # a Hello finds out that the Submit was dropped
        assert gateway.ready is None
        with FakeExecutor(config.backend_address):
            gateway.wait_all()
            assert_as_expected(stream)


def test_a_frozen_executor_goes_on_where_it_was(house):
    with house(settings={"peer_timeout_s": 1.0}, step_s=0.01, num_blocks=200) as (server, executor, gateway):
        gateway.wait_ready()
        stream = gateway.start("r", [1, 2], endless(1, 300))
        wait_until(lambda: len(stream.token_ids) > 10)
        executor.freeze()
        wait_until(lambda: not gateway.ready.can_progress)
        num_tokens = len(stream.token_ids)
        wait_until(lambda: server.server.backend.link.num_in_flight > 0)
        assert len(stream.token_ids) == num_tokens
        executor.step_s = 0.0
        executor.thaw()
        wait_until(lambda: gateway.ready.can_progress)
        gateway.wait_all()
        assert_as_expected(stream)
        assert executor.num_need_inits == 0
        assert executor.num_scheduled_tokens == 2 + 299  # nothing was computed twice


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_executor_that_lost_its_state_is_told_again(house, async_scheduling):
    settings = {"async_scheduling": async_scheduling}
    with house(settings=settings, step_s=0.005, num_blocks=300) as (_, executor, gateway):
        gateway.wait_ready()
        streams = [gateway.start(f"r{n}", [1, 2, n], endless(n, 200)) for n in range(4)]
        for num_tokens in (10, 30, 60):
            wait_until(lambda least=num_tokens: min(len(stream.token_ids) for stream in streams) > least)
            executor.forget_all()
        gateway.wait_all()
        for stream in streams:
            assert_as_expected(stream)
        assert executor.num_need_inits == 3


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_streams_outlive_an_executor(directory, how):
    config = toy_config(directory)
    with SchedulerThread(config) as server, FakeGateway(config.frontend_address) as gateway, ExitStack() as stack:
        fail_at_step = 20 if how == "failed" else None
        first = stack.enter_context(FakeExecutor(config.backend_address, step_s=0.002, fail_at_step=fail_at_step))
        gateway.wait_ready()
        streams = [gateway.start(f"r{n}", [1, 2, n], endless(n, 100)) for n in range(4)]
        if how == "killed":
            wait_until(lambda: min(len(stream.token_ids) for stream in streams) > 10)
            first.kill()
        else:
            wait_until(lambda: not gateway.ready.can_progress)
        second = stack.enter_context(FakeExecutor(config.backend_address))
        gateway.wait_all()
        for stream in streams:
            assert_as_expected(stream)
        server.check_idle()
        first.check()
        second.check()
        assert server.server.backend.link.num_lives == 2


def test_a_replaced_executor_is_told_and_the_log_and_gateways_know(directory, caplog):
    config = toy_config(directory, peer_timeout_s=1.0)
    with (
        SchedulerThread(config),
        FakeGateway(config.frontend_address) as gateway,
        FakeExecutor(config.backend_address) as first,
    ):
        assert gateway.wait_ready().num_idle_executors == 0
        with FakeExecutor(config.backend_address) as second:
            wait_until(lambda: first.displaced_by)
            assert first.displaced_by == f"process {second.incarnation}"
            wait_until(lambda: gateway.ready.num_idle_executors == 1)
            assert_served(gateway)
            assert second.displaced_by == ""
            first.kill()
            wait_until(lambda: gateway.ready.num_idle_executors == 0)
        [said] = [record.getMessage() for record in caplog.records if "gets nothing to do" in record.getMessage()]
        for executor in (first, second):
            assert f"executor {executor.incarnation} (process {executor.incarnation})" in said


def test_a_replaced_executor_is_told_when_its_successor_is_gone(directory):
    config = toy_config(directory, peer_timeout_s=1.0)
    with (
        SchedulerThread(config),
        FakeGateway(config.frontend_address) as gateway,
        FakeExecutor(config.backend_address) as first,
    ):
        gateway.wait_ready()
        with FakeExecutor(config.backend_address) as second:
            wait_until(lambda: first.displaced_by == f"process {second.incarnation}")
        wait_until(lambda: first.displaced_by == "")
        first.kill()
        with FakeExecutor(config.backend_address):
            assert_served(gateway)


def test_an_executor_that_starts_again_causes_no_warning(directory, caplog):
    config = toy_config(directory)
    with SchedulerThread(config), FakeGateway(config.frontend_address) as gateway:
        for _ in range(3):
            with FakeExecutor(config.backend_address) as executor:
                wait_until(lambda executor=executor: executor.scheduler_incarnation)
                gateway.wait_ready()
                wait_until(lambda executor=executor: executor.steps or gateway.ready)
        assert gateway.ready.num_idle_executors == 0
    assert "gets nothing to do" not in caplog.text


def test_an_executor_with_fewer_blocks_ends_requests_that_no_longer_fit(directory):
    config = toy_config(directory)
    with SchedulerThread(config) as server, FakeGateway(config.frontend_address) as gateway:
        with FakeExecutor(config.backend_address, step_s=SLOW_STEP_S):
            gateway.wait_ready()
            long = gateway.start("long", [1, 2], endless(1, 200))
            short = gateway.start("short", [1, 2], endless(2, 30))
            wait_until(lambda: long.token_ids and short.token_ids)
        with FakeExecutor(config.backend_address, num_blocks=10) as second:
            gateway.wait_all()
            assert long.finish_reason == "error"
            assert "the pool has 10" in long.error
            assert_as_expected(short)
            server.check_idle()
            second.check()


def test_another_model_ends_the_requests_in_flight(directory):
    config = toy_config(directory)
    with SchedulerThread(config) as server, FakeGateway(config.frontend_address) as gateway:
        with FakeExecutor(config.backend_address, step_s=SLOW_STEP_S):
            gateway.wait_ready()
            stream = gateway.start("r", [1, 2], endless(1, 200))
            wait_until(lambda: stream.token_ids)
        with FakeExecutor(config.backend_address, fingerprint="another") as second:
            gateway.wait_all()
            assert (stream.finish_reason, stream.error) == ("error", "another model")
            assert gateway.ready.model_fingerprint == "another"
            assert len(gateway.incarnations) == 2
            assert_served(gateway)
            server.check_idle()
            second.check()


def test_stats(house):
    with house() as (_, executor, gateway):
        gateway.wait_ready()
        for number in range(3):
            gateway.start(f"r{number}", [1, 2, 3, 4, 5, 6], endless(number, 10))
        gateway.wait_all()
        stats = gateway.wait_stats()
        assert (stats.num_running_seqs, stats.num_waiting_seqs, stats.num_used_blocks) == (0, 0, 0)
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (18, 30)
        assert (stats.num_prefix_queried_tokens, stats.num_executor_restarts) == (18, 0)
        assert stats.num_steps == len(executor.steps)
        assert stats.finished == {"length": 3}
        assert stats.scheduler_incarnation == gateway.ready.scheduler_incarnation
        assert stats.device_bytes == DEVICE_BYTES | {"used": USED_BYTES}
        histograms = stats.histograms
        for of_requests in (histograms.queue_s, histograms.prefill_s, histograms.decode_s, histograms.inference_s):
            assert sum(of_requests.counts) == 3
        for of_steps in (histograms.step_s, histograms.step_seqs, histograms.step_tokens):
            assert sum(of_steps.counts) == stats.num_steps
        assert histograms.step_tokens.sum == executor.num_scheduled_tokens


def test_a_request_that_the_gateway_stopped_counts_as_stopped(house):
    with house(step_s=0.005) as (_, _, gateway):
        gateway.wait_ready()
        streams = [gateway.start(f"r{number}", [1, 2, 3], endless(number)) for number in range(3)]
        wait_until(lambda: all(stream.token_ids for stream in streams))
        gateway.abort(streams[0])
        gateway.abort(streams[1], stopped=True)
        gateway.wait_all()
        stats = gateway.wait_stats()
        assert stats.finished == {"abort": 1, "stop": 1, "length": 1}
        assert sum(stats.histograms.decode_s.counts) == 2


def test_time_that_the_loop_loses_is_its_lag(directory):
    config = toy_config(directory, peer_timeout_s=1e6)
    lost_s = 0.0
    with (
        SchedulerThread(config, clock=lambda: time.monotonic() + lost_s) as server,
        FakeExecutor(config.backend_address),
        FakeGateway(config.frontend_address) as gateway,
    ):
        assert gateway.wait_stats().loop_lag_s < 30
        lost_s = 31.0  # at any point of the loop
        assert gateway.wait_stats().loop_lag_s >= 30
        server.check_idle()


def test_the_operators_line_comes_while_busy_and_only_then(directory, caplog):
    caplog.set_level(logging.INFO)
    config = toy_config(directory, peer_timeout_s=1e6)

    def lines() -> list[str]:
        return [record.message for record in caplog.records if "tokens/s" in record.message]

    with (
        SchedulerThread(config, clock=lambda: 30 * time.monotonic()) as server,
        FakeExecutor(config.backend_address, num_blocks=1000, step_s=0.002) as executor,
        FakeGateway(config.frontend_address) as gateway,
    ):
        gateway.wait_ready()
        stream = gateway.start("r", [1, 2, 3], endless(1, 1000))
        wait_until(lambda: len(lines()) >= 2)
        gateway.abort(stream)
        wait_until(lambda: not server.scheduler.has_work)
        busy_s = server.server.reports.logged_s
        wait_until(lambda: server.server.reports.logged_s > busy_s)  # the interval in which the last step was
        num_lines = len(lines())
        idle_s = server.server.reports.logged_s
        wait_until(lambda: server.server.reports.logged_s > idle_s)
        assert len(lines()) == num_lines
        assert "running 1, waiting 0" in lines()[1]
        assert "KV use" in lines()[1]
        server.check_idle()
        executor.check()


def test_steps_that_never_arrive_end_in_an_answer(directory):
    """libzmq drops messages that are too long for the executor's side; other requests are served all the same."""
    config = toy_config(directory, hang_timeout_s=2, peer_timeout_s=100.0, max_num_batched_tokens=2000)
    with (
        SchedulerThread(config, clock=lambda: 10 * time.monotonic()) as server,
        FakeExecutor(config.backend_address, num_blocks=2000, max_frame_bytes=3000) as executor,
        FakeGateway(config.frontend_address) as gateway,
    ):
        gateway.wait_ready()
        large = gateway.start("large", range(900), sampling(3))
        wait_until(lambda: not gateway.ready.can_progress)
        beside = [gateway.start(f"r{number}", [5, number], sampling(5, number)) for number in range(3)]
        gateway.wait_all()
        assert (large.finish_reason, large.token_ids) == ("error", [])
        for stream in beside:
            assert_as_expected(stream)
        wait_until(lambda: gateway.ready.can_progress)
        assert_served(gateway)
        server.check_idle()
        executor.check()


def test_a_step_that_is_too_large_for_a_message_is_not_sent_and_its_sequences_end(directory):
    config = toy_config(directory, max_num_batched_tokens=2000)
    with (
        SchedulerThread(config, max_step_bytes=3000) as server,
        FakeExecutor(config.backend_address, num_blocks=2000) as executor,
        FakeGateway(config.frontend_address) as gateway,
    ):
        gateway.wait_ready()
        beside = gateway.start("beside", [5, 6], endless(1, 50))
        large = gateway.start("large", range(900), sampling(3))
        gateway.wait_all()
        assert (large.finish_reason, "too large" in large.error) == ("error", True)
        assert beside.finish_reason in ("error", "length")  # it may be in the same step
        assert_served(gateway)
        assert executor.longest_frame_bytes <= 3000
        server.check_idle()
        executor.check()


def test_a_burst_over_a_long_document_sends_steps_that_arrive(directory):
    """128 sequences of 131,057 tokens: with the prompts in their inits, the step that admits them would take 70 MB."""
    config = toy_config(directory, max_num_seqs=128, max_num_batched_tokens=16384)
    document = [number % 997 + 1 for number in range(131_040)]
    with (
        SchedulerThread(config) as server,
        FakeExecutor(
            config.backend_address, num_blocks=12_000, block_size=16, max_model_len=131_072, checks_kv=False
        ) as executor,
        FakeGateway(config.frontend_address, resubmit_after_s=60.0) as gateway,
    ):
        gateway.wait_ready()
        for number in range(128):
            gateway.start(f"r{number}", [*document, *[1 + number] * 17], sampling(2, number, eos_token_ids=()))
        gateway.wait_all(120)
        assert all((len(s.token_ids), s.finish_reason) == (2, "length") for s in gateway.streams.values())
        assert executor.longest_frame_bytes < 8 << 20
        assert server.scheduler.counters.num_preemptions == 0
        server.check_idle()
        executor.check()


def test_messages_under_an_identity_that_zeromq_made_up_are_dropped(house):
    """An old connection leaves such messages behind when its gateway comes back; they belong to no gateway."""
    with house() as (server, _, gateway):
        gateway.wait_ready()
        with zmq.Context() as context, context.socket(zmq.DEALER) as ghost:
            ghost.set(zmq.LINGER, 1000)
            ghost.connect(server.config.frontend_address)
            ghost.send(encode(Hello(PROTOCOL_VERSION, "ghost", 1, [("r", 0)])))
            ghost.send(encode(Submit("r", 1, pack_ids([1, 2]), endless())))
            assert_served(gateway)
            assert ghost.poll(0) == 0
        assert list(server.server.frontend.ledger.gateways) == [gateway.identity.encode()]


def test_a_hello_with_another_name_than_its_sockets_is_dropped(house):
    with house() as (server, _, gateway):
        gateway.wait_ready()
        with (
            zmq.Context() as context,
            connect_dealer(context.socket(zmq.DEALER), server.config.frontend_address, "one") as socket,
        ):
            socket.send(encode(Hello(PROTOCOL_VERSION, "another", 1, [])))
            assert_served(gateway)
            assert socket.poll(0) == 0


def test_requests_of_one_prompt_bring_its_tokens_once(house):
    with house(gateway={"resubmit_after_s": 60.0}, step_s=SLOW_STEP_S) as (_server, _, gateway):
        gateway.wait_ready()
        prompt = list(range(1, 30))
        first = gateway.start("first", prompt, endless(1, 40), prompt_id="p")
        others = [gateway.start_without_prompt(f"r{n}", prompt, sampling(9, n), prompt_id="p") for n in range(4)]
        gateway.wait_all()
        for stream in (first, *others):
            assert_as_expected(stream)
            assert stream.num_submits == 1  # the scheduler lacked nothing


def test_a_request_whose_prompt_never_came_is_asked_for_again(house):
    """The Submit names a prompt whose tokens were lost; the fake sends them when it submits again."""
    with house(gateway={"resubmit_after_s": 60.0}) as (_server, _, gateway):
        gateway.wait_ready()
        stream = gateway.start_without_prompt("r", list(range(1, 30)), sampling(9), prompt_id="p")
        gateway.wait_all()
        assert_as_expected(stream)
        assert stream.num_submits == 2


def test_an_admission_that_was_lost_is_said_again(house):
    with house(settings={"max_num_seqs": 1}, step_s=SLOW_STEP_S) as (_server, _, gateway):
        gateway.wait_ready()
        first = gateway.start("first", [1, 2], endless(1, 60))
        wait_until(lambda: first.token_ids)
        waiting = gateway.start("waiting", [3, 4], sampling(1))
        wait_until(lambda: waiting.is_admitted)
        waiting.is_admitted = False  # as if the Admitted had not arrived
        wait_until(lambda: waiting.is_admitted)
        assert waiting.num_submits == 1
        gateway.abort(first)
        gateway.wait_all()
