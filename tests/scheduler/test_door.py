"""The scheduler's tcp:// addresses: peers with the right key are answered; all others get nothing and do no harm."""

import selectors
import socket as sockets
import threading
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from octavo.protocol.handshakes import HandshakeWatch
from octavo.protocol.link_keys import ClientKeys, KeyPair, client_keys, make_keys, server_keys
from octavo.protocol.messages import PROTOCOL_VERSION, ExecutorReady, Hello, encode
from octavo.protocol.sampling import Sampling
from octavo.protocol.sockets import bind_router, connect_dealer, new_identity, try_send
from octavo.scheduler.probe import ask
from tests.fakes.fake_executor import FakeExecutor
from tests.fakes.fake_gateway import FakeGateway
from tests.fakes.scheduler_thread import SchedulerThread, toy_config
from tests.fakes.toy_model import expected_output
from tests.fakes.waiting import wait_until

SAMPLING = Sampling(max_tokens=20, seed=1)
PROMPT = list(range(1, 9))


def free_port():
    with sockets.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def keys_directory(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def keys(keys_directory, tmp_path):
    """The keys of each kind of process, as it reads them."""

    def of(kind):
        config = toy_config(tmp_path, link_keys_dir=str(keys_directory / kind))
        return client_keys(config, kind, ["tcp://127.0.0.1:1"])

    return {kind: of(kind) for kind in ("scheduler", "gateway", "executor")}


@pytest.fixture
def config(keys_directory, tmp_path):
    frontend, backend = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    return toy_config(
        tmp_path,
        frontend_address=frontend,
        backend_address=backend,
        link_keys_dir=str(keys_directory / "scheduler"),
    )


@pytest.fixture
def scheduler(config):
    with SchedulerThread(config) as scheduler:
        yield scheduler


@pytest.fixture
def peers(scheduler, keys):
    """A gateway and an executor with keys of their own."""
    with (
        FakeExecutor(scheduler.config.backend_address, keys=keys["executor"]) as executor,
        FakeGateway(scheduler.config.frontend_address, keys=keys["gateway"]) as gateway,
    ):
        gateway.wait_ready()
        yield gateway, executor


def generates(gateway, request_id):
    stream = gateway.start(request_id, PROMPT, SAMPLING)
    gateway.wait_all()
    assert (stream.token_ids, stream.finish_reason) == expected_output(PROMPT, SAMPLING)
    return True


@contextmanager
def watched(address, keys=None):
    """Yield a DEALER to the scheduler, and the HandshakeWatch of its socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        handshakes = HandshakeWatch(socket, address, has_keys=keys is not None)
        connect_dealer(socket, address, new_identity(), keys)
        try:
            yield socket, handshakes
        finally:
            handshakes.close()


def gets_nothing(address, keys, for_ms=300):
    """Return whether a DEALER that sends messages of gateways and executors several times gets no answer."""
    identity = new_identity()
    with zmq.Context() as context, connect_dealer(context.socket(zmq.DEALER), address, identity, keys) as socket:
        for _ in range(3):
            try_send(socket, [encode(hello(identity))])
            try_send(socket, [encode(ExecutorReady(identity, 64, 4, 1024, 512, "toy", ""))])
            if socket.poll(for_ms // 3):
                return False
    return True


def hello(identity):
    return Hello(PROTOCOL_VERSION, identity, hello_seq=1)


def test_with_the_right_keys_tokens_flow(peers):
    assert generates(peers[0], "r")


def test_a_bare_dealer_gets_nothing_at_either_address(peers, scheduler):
    for address in (scheduler.config.frontend_address, scheduler.config.backend_address):
        assert gets_nothing(address, None)
    assert generates(peers[0], "r")


def test_a_key_of_another_kind_is_not_let_in(peers, scheduler, keys):
    gateway, _ = peers
    assert gets_nothing(scheduler.config.backend_address, keys["gateway"])
    assert gets_nothing(scheduler.config.backend_address, keys["scheduler"])
    assert gets_nothing(scheduler.config.frontend_address, keys["executor"])
    assert generates(gateway, "r")
    assert scheduler.server.backend.link.num_lives == 1
    assert not gets_nothing(scheduler.config.frontend_address, keys["gateway"], for_ms=30_000)
    assert not gets_nothing(scheduler.config.backend_address, keys["executor"], for_ms=30_000)


def test_a_key_that_nobody_made_is_not_let_in(peers, scheduler, keys):
    stranger = ClientKeys(KeyPair(*zmq.curve_keypair()), keys["gateway"].scheduler)
    for address in (scheduler.config.frontend_address, scheduler.config.backend_address):
        assert gets_nothing(address, stranger)
    assert generates(peers[0], "r")


def test_a_peer_with_a_good_key_and_another_schedulers_gets_nothing(peers, scheduler, keys):
    mistaken = keys["gateway"]._replace(scheduler=zmq.curve_keypair()[0])
    assert gets_nothing(scheduler.config.frontend_address, mistaken)
    assert generates(peers[0], "r")


def test_nobody_poses_as_the_scheduler(keys):
    """A gateway with keys sends nothing to a socket that has the address, but not the scheduler's secret key."""
    with zmq.Context() as context, bind_router(context, "tcp://127.0.0.1:*") as impostor:
        assert gets_nothing(impostor.get(zmq.LAST_ENDPOINT).decode(), keys["gateway"])
        assert not impostor.poll(0)
        with connect_dealer(context.socket(zmq.DEALER), impostor.get(zmq.LAST_ENDPOINT).decode(), "keyless") as keyless:
            keyless.send(b"which is heard")
            assert impostor.poll(30_000)


def test_nobody_is_let_in_without_the_thread_that_checks_keys(config, keys):
    """The thread that checks keys is missing."""
    frontend, _ = server_keys(config)
    with zmq.Context() as context, bind_router(context, "tcp://127.0.0.1:*", frontend) as router:
        address = router.get(zmq.LAST_ENDPOINT).decode()
        assert gets_nothing(address, keys["gateway"])
        assert not router.poll(0)


def test_the_probe_of_the_schedulers_machine_is_let_in(peers, scheduler, keys):
    assert ask(scheduler.config.frontend_address, 10.0, keys["scheduler"]) == ""
    assert "answers" in ask(scheduler.config.frontend_address, 0.3)


def test_messages_with_keys_are_not_plain_text(config, scheduler, keys):
    """A relay between gateway and scheduler sees neither the prompt nor the model's name."""
    prompt = [int.from_bytes(b"eyes", "little")] * 200  # not in the vocabulary, so it is rejected
    captured = bytearray()
    with (
        FakeExecutor(config.backend_address, keys=keys["executor"]),
        relay(config.frontend_address, captured) as address,
        FakeGateway(address, keys=keys["gateway"]) as gateway,
    ):
        gateway.wait_ready()
        stream = gateway.start("a-telling-request-id", prompt, SAMPLING)
        wait_until(lambda: stream.rejected)
    assert len(captured) > 1000
    for plain in (b"eyeseyes", b"a-telling-request-id", b"Hello", b"Submit", b"toy"):
        assert plain not in captured


def test_messages_without_keys_are_plain_text(tmp_path):
    """So the relay would see plain text if there were any."""
    config = toy_config(
        tmp_path, frontend_address=f"tcp://127.0.0.1:{free_port()}", backend_address=f"tcp://127.0.0.1:{free_port()}"
    )
    captured = bytearray()
    with (
        SchedulerThread(config),
        FakeExecutor(config.backend_address),
        relay(config.frontend_address, captured) as address,
        FakeGateway(address) as gateway,
    ):
        gateway.wait_ready()
        stream = gateway.start("a-telling-request-id", PROMPT, SAMPLING)
        gateway.wait_all()
    assert stream.token_ids
    assert b"a-telling-request-id" in captured
    assert b"Hello" in captured


@contextmanager
def relay(target, captured):
    """Yield an address that leads to `target`; all bytes that pass are added to `captured`."""
    host, _, port = target.removeprefix("tcp://").rpartition(":")
    stop = threading.Event()
    listener = sockets.create_server(("127.0.0.1", 0))

    def run():
        with selectors.DefaultSelector() as selector, ExitStack() as stack:
            selector.register(listener, selectors.EVENT_READ)
            while not stop.is_set():
                for key, _ in selector.select(0.05):
                    if key.fileobj is listener:
                        here = stack.enter_context(listener.accept()[0])
                        there = stack.enter_context(sockets.create_connection((host, int(port))))
                        selector.register(here, selectors.EVENT_READ, there)
                        selector.register(there, selectors.EVENT_READ, here)
                    elif part := key.fileobj.recv(1 << 16):
                        captured.extend(part)
                        key.data.sendall(part)
                    else:
                        selector.unregister(key.fileobj)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        thread.join()
        listener.close()


@pytest.mark.parametrize(
    ("whose", "said", "heard"),
    [
        (None, "asks for a key: set --link-keys-dir", "it has no key"),
        ("executor", "it refuses this process's key", "its key is not the one of gateways"),
        ("another", "its key is not scheduler.key", "it does not have this scheduler's public key"),
    ],
)
def test_both_ends_say_what_is_wrong(peers, scheduler, keys, caplog, whose, said, heard):
    another = keys["gateway"]._replace(scheduler=zmq.curve_keypair()[0])
    with watched(scheduler.config.frontend_address, {**keys, "another": another}.get(whose)) as (_, handshakes):

        def is_said():
            handshakes.look()
            return said in caplog.text and heard in caplog.text

        wait_until(is_said)
    assert scheduler.config.frontend_address in caplog.text


def test_a_flood_of_strangers_is_logged_once_and_holds_up_nothing(peers, scheduler, caplog):
    gateway, _ = peers
    address = scheduler.config.frontend_address
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    stream = gateway.start("during", PROMPT, Sampling(max_tokens=200, seed=1))
    for _ in range(200):
        with sockets.create_connection((host, int(port))) as knocking:
            knocking.sendall(b"GET / HTTP/1.1\r\nHost: octavo\r\n\r\n" + bytes(64))
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def knock():
            stack.enter_context(connect_dealer(context.socket(zmq.DEALER), address, new_identity()))

        def is_logged():
            knock()  # if the client is first to find that keys are missing, it tells the scheduler nothing
            return "turned somebody away" in caplog.text

        for _ in range(50):
            knock()
        gateway.wait_all()
        wait_until(is_logged)
    assert len(stream.token_ids) == 200
    assert generates(gateway, "afterwards")
    assert caplog.text.count("turned somebody away") == 1


def test_a_stranger_who_says_nothing_is_let_go(scheduler):
    host, _, port = scheduler.config.frontend_address.removeprefix("tcp://").rpartition(":")
    with sockets.create_connection((host, int(port)), timeout=60) as silent:
        while silent.recv(1024):  # the greeting, then the end
            pass


def test_new_keys_take_a_restart_and_peers_come_back_by_themselves(scheduler, config, keys, tmp_path):
    """The scheduler was started with other keys than its gateway; once it has the right ones, they speak."""
    others, *_ = make_keys(tmp_path / "others")
    scheduler.kill()
    wrong = toy_config(
        tmp_path,
        frontend_address=config.frontend_address,
        backend_address=f"ipc://{tmp_path}/backend",
        link_keys_dir=str(others),
    )
    bare = toy_config(tmp_path, frontend_address=config.frontend_address, backend_address=f"ipc://{tmp_path}/backend")
    tmp_path.chmod(0o700)
    with watched(config.frontend_address, keys["gateway"]) as (socket, handshakes):

        def is_answered():
            handshakes.look()
            try_send(socket, [encode(hello(socket.get(zmq.IDENTITY).decode()))])
            return socket.poll(10)

        for broken in (wrong, bare):
            with SchedulerThread(broken):
                for _ in range(100):
                    assert not is_answered()
        with SchedulerThread(config), FakeExecutor(config.backend_address, keys=keys["executor"]):
            wait_until(is_answered)


def test_a_process_without_a_key_is_answered_by_a_scheduler_that_asks_for_none(config, scheduler, tmp_path):
    """libzmq ends the link after a failed handshake; the process connects again all the same."""
    bare = toy_config(tmp_path, frontend_address=config.frontend_address, backend_address=f"ipc://{tmp_path}/backend")
    tmp_path.chmod(0o700)
    with watched(config.frontend_address) as (socket, handshakes):

        def is_answered():
            handshakes.look()
            try_send(socket, [encode(hello(socket.get(zmq.IDENTITY).decode()))])
            return socket.poll(10)

        for _ in range(100):
            assert not is_answered()
        scheduler.kill()
        with SchedulerThread(bare), FakeExecutor(bare.backend_address):
            wait_until(is_answered)
