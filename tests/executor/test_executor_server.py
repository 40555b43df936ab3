import pytest
import zmq

from octavo.executor.link.connection import connect
from octavo.executor.link.relay import Relay
from octavo.executor.link.reporter import ProgressReporter
from octavo.executor.link.server import NUM_KEPT_RESULTS, PlaceFreeError, Server
from octavo.executor.parallel import ALONE
from octavo.executor.step.progress import StepProgress
from octavo.protocol.messages import (
    Displaced,
    ExecutorReady,
    NeedInit,
    Progress,
    StepFailed,
    StepResult,
    Welcome,
    encode,
)
from tests.fakes.cache_model import CacheModel, make_runner
from tests.fakes.fake_backend import FakeBackend
from tests.fakes.lazy_device import LazyDevice
from tests.fakes.runner_driver import EXECUTOR, SCHEDULER, RunnerDriver, init, share, step

DESCRIPTION = ExecutorReady(EXECUTOR, 32, 4, 100, 64, "fingerprint")
BLOCKS = [0, 1, 2, 3]


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class RecordingRelay(Relay):
    """Rank 0's voice, to nobody: keeps what it says."""

    def __init__(self):
        super().__init__(ALONE)
        self.sent = []

    def send(self, message):
        self.sent.append(message)


class Link:
    """A server that a test turns by hand, and the scheduler's side of its real socket."""

    def __init__(self, context, model=None, device=None):
        self.clock = Clock()
        self.scheduler = FakeBackend()
        self.socket, self.handshakes = connect(context, self.scheduler.address, EXECUTOR)
        self.progress = StepProgress()
        self.relay = RecordingRelay()
        self.runner = make_runner(model, device=device)
        self.server = Server(self.socket, self.runner, DESCRIPTION, self.progress, self.relay, self.clock)

    def ready(self):
        """Let half seconds pass until the scheduler hears ExecutorReady; one without a connection is lost."""
        self.say_ready()
        while self.scheduler.is_silent(for_ms=100):
            self.say_ready()
        return self.scheduler.wait_for(ExecutorReady)

    def say_ready(self):
        self.clock.now_s += 0.5
        self.server._say_ready_if_due()

    def exchange(self, *messages):
        """Send messages, let the server take each, and return what it answers until it has taken them all."""
        self.scheduler.send(*messages)
        for _ in messages:
            self.server.turn()
        return self.answers()

    def answers(self):
        """Return what has been answered up to now: the ExecutorReady that follows shows that nothing else is coming."""
        self.say_ready()
        received = []
        while not isinstance(message := self.scheduler.receive(), ExecutorReady):
            received.append(message)
        return received

    def welcome(self, scheduler=SCHEDULER, next_step_id=1, executor=EXECUTOR):
        return self.exchange(Welcome(scheduler, executor, next_step_id))

    def restart_scheduler(self):
        """Replace the scheduler's process by another at the same address."""
        address = self.scheduler.address
        self.scheduler.close()
        self.scheduler = FakeBackend(address)

    def close(self):
        self.handshakes.close()
        self.socket.close(0)
        self.scheduler.close()


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def link(context):
    link = Link(context)
    link.ready()
    yield link
    link.close()


def decode_steps(first, last, *, scheduler=SCHEDULER):
    """Return steps of one sequence of the prompt [1, 2], from its first to a later one."""
    begin = share(1, 0, [1, 2], BLOCKS, init=init([1, 2]))
    steps = [step(1, begin, scheduler=scheduler)]
    steps += [step(n, share(1, n, [], BLOCKS), scheduler=scheduler) for n in range(2, last + 1)]
    return steps[first - 1 :]


def tokens(results):
    assert all(isinstance(result, StepResult) for result in results), results
    return [token for result in results for token in result.sequences[0].token_ids]


def ids(results):
    return [result.step_id for result in results]


def test_it_says_that_it_is_there_until_it_is_welcomed_and_while_it_is_idle(link):
    assert link.ready() == DESCRIPTION
    assert link.ready() == DESCRIPTION
    link.welcome()
    assert link.ready().scheduler_incarnation == SCHEDULER
    link.exchange(*decode_steps(1, 3))
    assert link.ready().scheduler_incarnation == SCHEDULER


def test_one_whose_place_another_took_says_so_once(link, caplog):
    link.welcome()
    for _ in range(3):
        link.exchange(Displaced(SCHEDULER, EXECUTOR, "process 7 on elsewhere"))
    assert caplog.text.count("another executor (process 7 on elsewhere) took the place of this one") == 1
    link.exchange(Displaced(SCHEDULER, EXECUTOR, "process 8 on elsewhere"))
    assert caplog.text.count("process 8 on elsewhere") == 1


def test_one_whose_place_is_free_again_ends_to_be_started_anew(link):
    link.welcome()
    link.exchange(Displaced(SCHEDULER, EXECUTOR, "process 7 on elsewhere"))
    with pytest.raises(PlaceFreeError, match="this one ends"):
        link.exchange(Displaced(SCHEDULER, EXECUTOR, ""))


def test_steps_are_done_in_the_order_of_their_numbers(link):
    link.welcome()
    results = link.exchange(*decode_steps(1, 4))
    assert ids(results) == [1, 2, 3, 4]
    assert len(tokens(results)) == 4


def test_other_ranks_hear_once_of_what_is_acted_on(link):
    """Whatever is lost, repeated or early on the link, they do the same steps in the same order."""
    link.welcome()
    steps = decode_steps(1, 4)
    link.exchange(steps[1], steps[0], steps[0], *steps[2:])
    assert link.relay.sent == [Welcome(SCHEDULER, EXECUTOR, 1), steps[0]]
    link.welcome()
    link.exchange(*steps)
    link.welcome(scheduler="another", next_step_id=7)
    assert link.relay.sent == [Welcome(SCHEDULER, EXECUTOR, 1), *steps, Welcome("another", EXECUTOR, 7)]


def test_two_steps_may_be_queued(link):
    """The second begins when the result of the first is sent, without another message."""
    link.welcome()
    link.scheduler.send(*decode_steps(1, 2))
    link.server.turn()
    assert ids([link.scheduler.receive()]) == [1]
    link.server.turn()
    assert ids([link.scheduler.receive()]) == [2]


def test_a_step_before_the_welcome_is_not_done(link):
    assert link.exchange(*decode_steps(1, 1)) == []
    link.welcome()
    assert ids(link.exchange(*decode_steps(1, 1))) == [1]


def test_a_step_that_comes_again_is_answered_again_and_not_done_again(link):
    link.welcome()
    one, two, three = decode_steps(1, 3)
    first = link.exchange(one, two)
    assert link.exchange(one, two, one) == [*first, first[0]]
    assert ids(link.exchange(three)) == [3]
    assert link.runner.model.num_forwards == 3


def test_results_are_kept_for_a_while(link):
    link.welcome()
    steps = decode_steps(1, NUM_KEPT_RESULTS + 1)
    results = link.exchange(*steps)
    assert link.exchange(*steps) == results[1:]


def test_a_step_beyond_the_next_is_ignored_until_the_missing_one_came(link):
    link.welcome()
    one, two, three = decode_steps(1, 3)
    assert ids(link.exchange(one, three)) == [1]
    assert ids(link.exchange(two, three)) == [2, 3]


def test_a_delayed_welcome_does_not_turn_it_back(link):
    link.welcome()
    results = link.exchange(*decode_steps(1, 3))
    assert link.welcome(next_step_id=1) == []
    assert link.exchange(decode_steps(1, 1)[0]) == results[:1]
    assert ids(link.exchange(step(4, share(1, 4, [], BLOCKS)))) == [4]


def test_messages_for_another_life_are_dropped(link):
    assert link.welcome(executor="executor-0") == []
    assert link.exchange(*decode_steps(1, 1)) == []
    link.welcome()
    stale = step(1, share(1, 0, [1], BLOCKS, init=init([1])), executor="executor-0")
    other = step(1, share(1, 0, [1], BLOCKS, init=init([1])), scheduler="scheduler-0")
    assert link.exchange(stale, other) == []
    assert link.runner.model.num_forwards == 0


def test_frames_that_are_no_message_are_dropped(link):
    link.welcome()
    for frame in (b"", b"\x80\x04\x95pickle", encode(DESCRIPTION), b"\x93" * 100):
        link.scheduler.send_frame(frame)
        link.server.turn()
    assert ids(link.exchange(*decode_steps(1, 1))) == [1]


def test_another_scheduler_begins_anew(link):
    link.welcome()
    first = link.exchange(*decode_steps(1, 3))
    link.restart_scheduler()
    assert link.ready().scheduler_incarnation == SCHEDULER
    link.welcome("scheduler-2", next_step_id=1)
    assert link.ready().scheduler_incarnation == "scheduler-2"
    assert link.runner.num_sequences == 0
    # neither the results nor the state of the one before
    [need] = link.exchange(step(1, share(1, 4, [], BLOCKS), scheduler="scheduler-2"))
    assert need == NeedInit("scheduler-2", EXECUTOR, 1, [1])
    again = link.exchange(*decode_steps(1, 3, scheduler="scheduler-2"))
    assert tokens(again) == tokens(first)


def test_a_scheduler_that_was_followed_by_another_is_over(link):
    link.welcome()
    link.welcome("scheduler-2", next_step_id=5)
    assert link.welcome(SCHEDULER, next_step_id=9) == []
    assert link.exchange(*decode_steps(1, 1)) == []
    ready = link.ready()
    assert ready.scheduler_incarnation == "scheduler-2"
    [result] = link.exchange(step(5, share(1, 0, [1], BLOCKS, init=init([1])), scheduler="scheduler-2"))
    assert result.step_id == 5


def test_need_init_stops_everything_until_a_welcome_names_the_next_step(link):
    link.welcome()
    link.exchange(*decode_steps(1, 2))
    unknown = step(3, share(1, 3, [], BLOCKS), share(9, 4, [], [5, 6]))
    [need] = link.exchange(unknown)
    assert need == NeedInit(SCHEDULER, EXECUTOR, 3, [9])
    # the step that was in flight behind it, and the same again
    assert link.exchange(step(4, share(1, 4, [], BLOCKS))) == []
    assert link.exchange(unknown) == [need]
    link.welcome(next_step_id=5)
    assert link.exchange(unknown, step(4, share(1, 4, [], BLOCKS))) == []
    known = share(9, 0, [7, 7, 7, 7, 1], [5, 6], init=init([7, 7, 7, 7], [1]))
    [result] = link.exchange(step(5, share(1, 3, [], BLOCKS), known))
    assert [len(sequence.token_ids) for sequence in result.sequences] == [1, 1]


def test_a_step_that_raises_is_reported_and_raises(context):
    model = CacheModel()
    model.fails_at = 2
    link = Link(context, model)
    link.ready()
    link.welcome()
    link.exchange(*decode_steps(1, 1))
    link.scheduler.send(*decode_steps(2, 2))
    with pytest.raises(ArithmeticError, match="told to fail"):
        link.server.turn()
    failed = StepFailed(SCHEDULER, EXECUTOR, 2, "ArithmeticError: told to fail")
    assert link.scheduler.receive() == failed
    link.close()


def test_what_a_step_and_the_wait_before_it_took_is_measured(link):
    class Slow(CacheModel):
        def forward(self, inputs, kv_caches):
            link.clock.now_s += 0.25
            return super().forward(inputs, kv_caches)

    link.runner.model = Slow()
    link.welcome()
    one, two = decode_steps(1, 2)
    link.scheduler.send(one)
    link.server.turn()
    link.clock.now_s += 0.125
    link.scheduler.send(two)
    link.server.turn()
    first, second = link.answers()
    assert (first.busy_s, second.busy_s, second.waited_s) == (0.25, 0.25, 0.125)


def test_progress_is_told_while_the_main_thread_is_busy(context):
    """The test's own thread stands for the main thread: it takes no turn at all."""
    progress = StepProgress(step_id=7)
    progress.count_layers(1)
    progress.count_layers(1)
    with (
        FakeBackend() as scheduler,
        ProgressReporter(context, scheduler.address, None, EXECUTOR, progress, lambda: 4096),
    ):
        assert scheduler.receive_any() == Progress(EXECUTOR, 7, 2, used_bytes=4096)


def test_the_step_that_runs_is_the_one_that_progress_names(link):
    seen = []

    class Watching(CacheModel):
        def forward(self, inputs, kv_caches):
            link.progress.count_layers(1)
            seen.append((link.progress.step_id, link.progress.layers_done))
            return super().forward(inputs, kv_caches)

    link.runner.model = Watching()
    link.welcome()
    link.exchange(*decode_steps(1, 3))
    assert seen == [(1, 1), (2, 1), (3, 1)]


@pytest.fixture
def lazy(context):
    """A link to a server whose device ends a step when it is told to, or when the server waits for it."""
    link = Link(context, device=LazyDevice())
    link.ready()
    link.welcome()
    yield link
    link.close()


def turn(link, *messages):
    """Send messages, each of which the server takes, and return what has been answered by then."""
    for message in messages:
        link.scheduler.send(message)
        assert link.socket.poll(5000)
        link.server.turn()
    return link.answers()


def test_the_next_step_is_launched_before_the_last_ones_tokens_reach_the_host(lazy):
    device = lazy.runner.device
    one, two, three = decode_steps(1, 3)
    assert turn(lazy, one) == []
    first = turn(lazy, two)
    assert device.events == ["launched 0", "launched 1", "waited for 0"]
    second = turn(lazy, three)
    lazy.server.turn()
    assert lazy.answers() == []  # neither a message nor a step that is done
    device.num_done = 3
    lazy.server.turn()
    results = [*first, *second, *lazy.answers()]
    assert ids(results) == [1, 2, 3]
    on_cpu = RunnerDriver(make_runner())
    assert [result.sequences for result in results] == [on_cpu.do(*each.sequences) for each in decode_steps(1, 3)]


def test_a_step_in_flight_that_comes_again_is_done_once(lazy):
    one, two = decode_steps(1, 2)
    assert turn(lazy, one, one, one) == []
    first = turn(lazy, two, one, two)
    assert ids(first) == [1, 1]  # answered, and answered again
    lazy.runner.device.num_done = 2
    lazy.server.turn()
    [second] = lazy.answers()
    assert turn(lazy, two, one) == [second, first[0]]
    assert lazy.runner.model.num_forwards == 2


def test_a_step_that_cannot_be_launched_fails_after_the_one_in_flight_was_answered(lazy):
    one, _ = decode_steps(1, 2)
    turn(lazy, one)
    lazy.scheduler.send(step(2, share(1, 2, [], [99])))
    assert lazy.socket.poll(5000)
    with pytest.raises(ValueError, match="not among the 32"):
        lazy.server.turn()
    assert ids([lazy.scheduler.receive(), lazy.scheduler.receive()]) == [1, 2]


def test_a_step_that_fails_on_the_device_is_named_though_the_next_is_launched(lazy):
    one, two = decode_steps(1, 2)
    lazy.runner.device.fails_at = 0
    turn(lazy, one)
    lazy.scheduler.send(two)
    assert lazy.socket.poll(5000)
    with pytest.raises(ArithmeticError, match="the device failed"):
        lazy.server.turn()
    failed = StepFailed(SCHEDULER, EXECUTOR, 1, "ArithmeticError: the device failed")
    assert lazy.scheduler.receive() == failed


def test_need_init_comes_after_the_result_in_flight(lazy):
    one, _ = decode_steps(1, 2)
    turn(lazy, one)
    first, need = turn(lazy, step(2, share(1, 2, [], BLOCKS), share(9, 4, [], [5, 6])))
    assert (first.step_id, need) == (1, NeedInit(SCHEDULER, EXECUTOR, 2, [9]))


def test_another_scheduler_gets_no_result_of_the_one_before(lazy):
    turn(lazy, *decode_steps(1, 1))
    lazy.restart_scheduler()
    lazy.ready()
    assert turn(lazy, Welcome("scheduler-2", EXECUTOR, 1)) == []
    lazy.runner.device.num_done = 9
    assert ids(turn(lazy, *decode_steps(1, 1, scheduler="scheduler-2"))) == [1]


def test_the_time_of_a_step_launched_ahead_begins_with_the_end_of_the_last(lazy):
    one, two = decode_steps(1, 2)
    lazy.scheduler.send(one)
    assert lazy.socket.poll(5000)
    lazy.server.turn()
    lazy.clock.now_s += 0.25
    lazy.scheduler.send(two)
    assert lazy.socket.poll(5000)
    lazy.server.turn()
    lazy.clock.now_s += 0.125
    lazy.runner.device.num_done = 2
    lazy.server.turn()
    first, second = lazy.answers()
    assert (first.busy_s, second.busy_s, second.waited_s) == (0.25, 0.125, 0.0)


@pytest.mark.parametrize(("device", "launch_s"), [(LazyDevice(), 0.25), (None, 0.0)])
def test_the_time_of_a_launch_is_told_where_the_device_computes_later(context, device, launch_s):
    """The scheduler must plan that much earlier; a CPU has done the step by then."""

    class Slow(CacheModel):
        def forward(self, inputs, kv_caches):
            link.clock.now_s += 0.25
            return super().forward(inputs, kv_caches)

    link = Link(context, Slow(), device)
    link.ready()
    link.welcome()
    [one] = decode_steps(1, 1)
    link.scheduler.send(one)
    assert link.socket.poll(5000)
    link.server.turn()
    if device is not None:
        device.num_done = 1
        link.server.turn()
    [result] = link.answers()
    assert (result.launch_s, result.busy_s) == (launch_s, 0.25)
    link.close()
