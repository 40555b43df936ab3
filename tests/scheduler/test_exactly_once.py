"""Every stream has each token once and ends once, whatever happens to the messages and to the processes.

The toy model makes the right tokens known, the fake gateway asserts that what is repeated is the same, and the fake
executor that each step is consistent with its KV. Seeds fix which messages suffer; threads still interleave freely, and
no interleaving may change what is asserted.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo.protocol.config import Config
from octavo.protocol.sampling import Sampling
from tests.fakes.chaos_proxy import ChaosProxy
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.fake_gateway import FakeGateway, Stream
from tests.fakes.scheduler_thread import SchedulerThread, socket_directory, toy_config
from tests.fakes.toy_model import EOS_TOKEN_ID, expected_output, logprobs_of
from tests.fakes.waiting import wait_until


@pytest.fixture
def directory() -> Iterator[Path]:
    with socket_directory() as path:
        yield path


class House:
    """A scheduler, executors and gateways, with bad links between them."""

    def __init__(self, directory: Path, seed: int, *, gateway_link: bool = True, executor_link: bool = True) -> None:
        self.config: Config = toy_config(directory, peer_timeout_s=1.0, max_num_queued_reqs=100)
        self.drawn = random.Random(seed)
        self.stack = ExitStack()
        self.frontend, self.backend = self.config.frontend_address, self.config.backend_address
        self.proxies: list[ChaosProxy] = []
        if gateway_link:
            self.frontend = self._bad_link(f"ipc://{directory}/bad-frontend", self.frontend, seed)
        if executor_link:
            self.backend = self._bad_link(f"ipc://{directory}/bad-backend", self.backend, seed + 1000)
        self.servers: list[SchedulerThread] = []
        self.executors: list[FakeExecutor] = []
        self.gateways: list[FakeGateway] = []

    def __enter__(self) -> "House":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.close()

    def _bad_link(self, address: str, target: str, seed: int) -> str:
        self.proxies.append(self.stack.enter_context(ChaosProxy(address, target, seed, longest_delay_s=0.03)))
        return address

    def start_scheduler(self) -> SchedulerThread:
        self.servers.append(self.stack.enter_context(SchedulerThread(self.config)))
        return self.servers[-1]

    def start_executor(self, **settings: object) -> FakeExecutor:
        chosen = {"num_blocks": 64, "step_s": 0.001, "ready_interval_s": 0.015, **settings}
        self.executors.append(self.stack.enter_context(FakeExecutor(self.backend, **chosen)))
        return self.executors[-1]

    def start_gateway(self) -> FakeGateway:
        self.gateways.append(self.stack.enter_context(FakeGateway(self.frontend, hello_interval_s=0.03)))
        self.gateways[-1].wait_ready()
        return self.gateways[-1]

    def start_streams(self, gateway: FakeGateway, num_streams: int, longest: int = 60) -> list[Stream]:
        return [self.start_stream(gateway, number, longest) for number in range(num_streams)]

    def start_stream(self, gateway: FakeGateway, number: int, longest: int) -> Stream:
        prompt = [self.drawn.randrange(1, 5) for _ in range(self.drawn.randrange(1, 40))]
        sampling = Sampling(
            max_tokens=self.drawn.randrange(0, longest),
            seed=self.drawn.getrandbits(64),
            eos_token_ids=(EOS_TOKEN_ID,),
            num_logprobs=self.drawn.choice((None, 0, 2)),
            num_prompt_logprobs=self.drawn.choice((None, None, 1)),
        )
        return gateway.start(f"r{len(gateway.streams)}", prompt, sampling)

    def finish(self) -> None:
        """Wait until all streams have ended; assert that each is the same as without trouble."""
        for gateway in self.gateways:
            gateway.wait_all(60)
        for gateway in self.gateways:
            for stream in gateway.streams.values():
                if stream.finish_reason != "abort":
                    assert_as_expected(stream)
        self.servers[-1].check_idle()
        for executor in self.executors:
            executor.check()


def is_over(streams: list[Stream]) -> bool:
    return all(stream.ended.is_set() for stream in streams)


def assert_as_expected(stream: Stream) -> None:
    tokens, reason = expected_output(stream.prompt_token_ids, stream.sampling)
    assert (stream.token_ids, stream.finish_reason) == (tokens, reason), stream.request_id
    num_logprobs, num_prompt_logprobs = stream.sampling.num_logprobs, stream.sampling.num_prompt_logprobs
    if num_logprobs is not None and tokens:
        assert stream.logprobs == logprobs_of(tokens, num_logprobs)
    if num_prompt_logprobs is not None:
        assert stream.prompt_logprobs == logprobs_of(stream.prompt_token_ids[1:], num_prompt_logprobs)


@pytest.mark.parametrize("seed", range(3))
def test_bad_links(directory, seed):
    with House(directory, seed) as house:
        house.start_scheduler()
        executor = house.start_executor()
        gateways = [house.start_gateway() for _ in range(2)]
        for gateway in gateways:
            house.start_streams(gateway, 8)
        house.finish()
        for proxy in house.proxies:
            assert proxy.num_dropped > 5
            assert proxy.num_repeated > 5
            assert proxy.num_delayed > 5
        assert sum(gateway.num_gaps + gateway.num_duplicates for gateway in gateways) > 0
        assert executor.num_repeated + executor.num_ignored > 0


@pytest.mark.parametrize("seed", range(2))
def test_bad_links_and_clients_that_leave(directory, seed):
    with House(directory, seed) as house:
        server = house.start_scheduler()
        house.start_executor()
        gateway = house.start_gateway()
        streams = house.start_streams(gateway, 16)
        for stream in streams[::2]:
            wait_until(lambda stream=stream: stream.token_ids or stream.ended.is_set())
            gateway.abort(stream)
        gateway.wait_all()
        wait_until(lambda: server.server.frontend.ledger.num_records == 0)
        house.finish()


@pytest.mark.parametrize("seed", range(2))
def test_bad_links_and_an_executor_that_loses_its_state(directory, seed):
    with House(directory, seed) as house:
        house.start_scheduler()
        executor = house.start_executor()
        gateway = house.start_gateway()
        streams = house.start_streams(gateway, 12)
        for _ in range(5):
            executor.forget_all()
            before = executor.num_need_inits
            wait_until(lambda before=before: executor.num_need_inits > before or is_over(streams))
        house.finish()
        assert executor.num_need_inits >= 3


@pytest.mark.parametrize("seed", range(2))
def test_bad_links_and_restarted_executors(directory, seed):
    with House(directory, seed) as house:
        server = house.start_scheduler()
        executor = house.start_executor()
        gateway = house.start_gateway()
        for number in range(3):
            streams = house.start_streams(gateway, 5)
            wait_until(lambda streams=streams: any(stream.token_ids for stream in streams))
            if number == 1:
                executor.freeze()  # a hung executor is ended before the next starts
            executor.kill()
            executor = house.start_executor(num_blocks=64 + number)
        house.start_streams(gateway, 3)
        house.finish()
        assert server.server.backend.link.num_lives == 4


@pytest.mark.parametrize("seed", range(2))
def test_bad_links_and_restarted_schedulers(directory, seed):
    with House(directory, seed) as house:
        server = house.start_scheduler()
        house.start_executor()
        gateways = [house.start_gateway() for _ in range(2)]
        for _ in range(3):
            streams = [stream for gateway in gateways for stream in house.start_streams(gateway, 4)]
            wait_until(lambda streams=streams: any(stream.token_ids for stream in streams))
            server.kill()
            server = house.start_scheduler()
            for gateway in gateways:
                wait_until(
                    lambda peer=gateway, life=server: peer.ready.scheduler_incarnation == life.server.incarnation
                )
        house.finish()
        assert all(len(gateway.incarnations) == 4 for gateway in gateways)


@pytest.mark.parametrize("seed", range(2))
def test_everything_restarts(directory, seed):
    with House(directory, seed) as house:
        server = house.start_scheduler()
        executor = house.start_executor()
        gateway = house.start_gateway()
        for _ in range(3):
            streams = house.start_streams(gateway, 4)
            wait_until(lambda streams=streams: any(stream.token_ids for stream in streams))
            server.kill()
            executor.kill()
            executor = house.start_executor()
            server = house.start_scheduler()
        house.finish()


@pytest.mark.parametrize("seed", range(2))
def test_bad_links_and_frozen_peers(directory, seed):
    """For shorter than the timeout, and for longer."""
    with House(directory, seed) as house:
        server = house.start_scheduler()
        executor = house.start_executor(step_s=0.003)
        gateway, other = house.start_gateway(), house.start_gateway()
        streams = house.start_streams(gateway, 4, longest=200) + house.start_streams(other, 4)
        wait_until(lambda: all(stream.is_admitted or stream.ended.is_set() for stream in streams))
        executor.freeze()
        gateway.freeze()
        link, ledger = server.server.backend.link, server.server.frontend.ledger
        wait_until(lambda: len(ledger.gateways) == 1)
        wait_until(lambda: not link.can_progress(server.server.clock()))
        executor.thaw()
        wait_until(lambda: all(stream.ended.is_set() for stream in other.streams.values()), 30)
        gateway.thaw()
        house.finish()


@pytest.mark.parametrize("seed", range(2))
def test_a_gateway_that_dies_behind_a_bad_link(directory, seed):
    with House(directory, seed) as house:
        server = house.start_scheduler()
        house.start_executor()
        doomed, other = house.start_gateway(), house.start_gateway()
        house.start_streams(other, 6)
        doomed_streams = house.start_streams(doomed, 6, longest=200)
        wait_until(lambda: any(stream.token_ids for stream in doomed_streams))
        doomed.kill()
        house.gateways.remove(doomed)
        wait_until(lambda: list(server.server.frontend.ledger.gateways) == [other.identity.encode()])
        house.finish()


def test_messages_of_an_old_life_are_ignored(directory):
    """There are two executors at once; the scheduler has ended the life of one of them."""
    with House(directory, 0, gateway_link=False, executor_link=False) as house:
        server = house.start_scheduler()
        old = house.start_executor()
        gateway = house.start_gateway()
        streams = house.start_streams(gateway, 4)
        wait_until(lambda: any(stream.token_ids for stream in streams))
        old.freeze()
        new = house.start_executor()
        wait_until(lambda: server.server.backend.link.incarnation == new.incarnation)
        old.thaw()
        house.start_streams(gateway, 4)
        house.finish()
        assert server.server.backend.link.incarnation == new.incarnation
        assert server.server.backend.link.num_lives == 2
