"""The sockets' promises: no send blocks, no message is dropped silently, no address is taken twice."""

import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from octavo.protocol.sockets import bind_router, connect_dealer, hold_address, new_identity, try_send


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def connect(context, router, identity, **options):
    return connect_dealer(context.socket(zmq.DEALER), router.get(zmq.LAST_ENDPOINT).decode(), identity, **options)


def exchange_hello(router, dealer):
    """Make the router know the dealer."""
    dealer.send(b"hello")
    assert router.poll(5000)
    return router.recv_multipart()[0]


def test_a_dealer_may_start_before_the_router(context, tmp_path):
    address = f"ipc://{tmp_path}/s"
    with connect_dealer(context.socket(zmq.DEALER), address, "early") as dealer:
        dealer.send(b"first")
        with bind_router(context, address) as router:
            assert router.poll(5000)
            assert router.recv_multipart() == [b"early", b"first"]


def test_sending_to_nobody_is_an_answer(context):
    with bind_router(context, "tcp://127.0.0.1:*") as router:
        assert try_send(router, [b"nobody", b"x"]) is False


def test_a_full_queue_is_an_answer_and_nothing_is_lost(context):
    with (
        bind_router(context, "tcp://127.0.0.1:*", high_water_mark=2) as router,
        connect(context, router, "slow", high_water_mark=2) as dealer,
    ):
        identity = exchange_hello(router, dealer)
        payload = bytes(1 << 20)  # more than the kernel buffers
        num_sent = 0
        while num_sent < 1000 and try_send(router, [identity, b"%d" % num_sent, payload]):
            num_sent += 1
        assert 0 < num_sent < 1000
        received = []
        while len(received) < num_sent and dealer.poll(5000):
            received.append(int(dealer.recv_multipart()[0]))
        assert received == list(range(num_sent))
        assert not dealer.poll(50)


def test_a_peer_with_a_known_identity_takes_over(context):
    with bind_router(context, "tcp://127.0.0.1:*") as router, connect(context, router, "peer") as first:
        exchange_hello(router, first)
        with connect(context, router, "peer") as second:
            identity = exchange_hello(router, second)
            assert try_send(router, [identity, b"for the second"])
            assert second.poll(5000)
            assert second.recv() == b"for the second"


def test_an_address_in_use_names_itself(context):
    with bind_router(context, "tcp://127.0.0.1:*") as router:
        endpoint = router.get(zmq.LAST_ENDPOINT).decode()
        with pytest.raises(ValueError, match=f"cannot listen on {endpoint}"):
            bind_router(context, endpoint)


def test_an_ipc_address_is_held_once(tmp_path):
    address = f"ipc://{tmp_path}/private/s"
    with hold_address(address):
        assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
        with pytest.raises(ValueError, match="in use by another process"), hold_address(address):
            pass
    with hold_address(address):
        pass


def test_an_address_is_freed_when_its_holder_dies(tmp_path):
    address = f"ipc://{tmp_path}/private/s"
    with hold_address(address):
        pass
    code = f"import os; from octavo.protocol import sockets; sockets.hold_address({address!r}).__enter__(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    with hold_address(address):
        pass


def test_a_directory_open_to_others_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="chmod 700"), hold_address(f"ipc://{tmp_path}/s"):
        pass


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(ValueError, match="longer than 107 bytes"), hold_address(f"ipc://{tmp_path}/{'x' * 107}"):
        pass


def test_tcp_needs_no_lock():
    with hold_address("tcp://127.0.0.1:1"):
        assert not Path("tcp:").exists()


def test_identities_differ():
    assert len({new_identity() for _ in range(100)}) == 100
