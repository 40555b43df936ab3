"""The key files of tcp:// links: which process gets which keys, and which files are refused."""

import os
import stat

import pytest

from octavo.protocol.config import Config
from octavo.protocol.link_keys import check_ranks_link, client_keys, is_loopback, make_keys, server_keys

OPEN = ("tcp://0.0.0.0:5570", "tcp://*:5570", "tcp://[::]:5570", "tcp://scheduler:5570", "tcp://10.1.2.3:5570")


def modes(directory):
    return {
        str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode) for path in sorted(directory.rglob("*"))
    }


def test_each_kind_of_process_gets_its_secret_and_what_it_needs_of_others(tmp_path):
    usual = os.umask(0)  # it must not widen the modes of the files
    try:
        made = make_keys(tmp_path / "keys")
    finally:
        os.umask(usual)
    assert [path.name for path in made] == ["scheduler", "gateway", "executor"]
    assert modes(tmp_path / "keys") == {
        "scheduler": 0o700,
        "scheduler/scheduler.key_secret": 0o600,
        "scheduler/gateway.key": 0o644,
        "scheduler/executor.key": 0o644,
        "gateway": 0o700,
        "gateway/gateway.key_secret": 0o600,
        "gateway/scheduler.key": 0o644,
        "executor": 0o700,
        "executor/executor.key_secret": 0o600,
        "executor/scheduler.key": 0o644,
    }


def test_existing_keys_are_never_replaced(tmp_path):
    make_keys(tmp_path)
    (tmp_path / "executor" / "scheduler.key").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="exists already: remove the keys in "):
        make_keys(tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_dangling_link_is_not_written_through(tmp_path):
    (tmp_path / "keys" / "gateway").mkdir(parents=True)
    (tmp_path / "keys" / "gateway" / "gateway.key_secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        make_keys(tmp_path / "keys")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("address", OPEN)
def test_an_address_that_other_machines_reach_is_refused_without_keys(address):
    with pytest.raises(ValueError, match="octavo keys") as bound:
        server_keys(Config(frontend_address=address))
    assert address in str(bound.value)
    assert "--insecure-links" in str(bound.value)
    with pytest.raises(ValueError, match="octavo keys"):
        server_keys(Config(backend_address=address))
    for kind in ("gateway", "executor", "scheduler"):
        with pytest.raises(ValueError, match="octavo keys"):
            client_keys(Config(), kind, ["ipc:///run/x", address])


@pytest.mark.parametrize("address", OPEN)
def test_insecure_links_allows_it_and_says_so(address, caplog):
    assert server_keys(Config(frontend_address=address, insecure_links=True)) == (None, None)
    assert client_keys(Config(insecure_links=True), "gateway", [address]) is None
    assert caplog.text.count(f"{address} is without keys") == 2


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5570", "tcp://127.8.0.1:*", "tcp://[::1]:5570", "tcp://localhost:5570"]
)
def test_loopback_addresses_need_no_keys(address):
    assert server_keys(Config(frontend_address=address, backend_address=address)) == (None, None)
    assert client_keys(Config(), "gateway", [address, "ipc:///run/octavo/frontend", "inproc://x"]) is None


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1.example.com:1",
        "tcp://localhost.example.com:1",
        "tcp://127.0.0.1;10.0.0.1:1",  # from, to
        "tcp://lo:1",
        "tcp://[::ffff:10.0.0.1]:1",
        "tcp://2130706433:1",
    ],
)
def test_an_address_that_only_looks_like_loopback_needs_keys(address):
    assert not is_loopback(address)


def test_insecure_links_does_not_keep_keys_from_being_used(tmp_path):
    _, gateway, _ = make_keys(tmp_path)
    config = Config(link_keys_dir=str(gateway), insecure_links=True)
    assert client_keys(config, "gateway", ["tcp://10.0.0.1:1"]) is not None


def test_keys_of_links_that_are_not_tcp_are_not_read():
    config = Config(link_keys_dir="/nowhere", frontend_address="ipc:///x/y", backend_address="ipc:///x/z")
    assert server_keys(config) == (None, None)
    assert client_keys(config, "executor", ["ipc:///x/z"]) is None


def test_the_scheduler_needs_only_keys_of_peers_on_tcp(tmp_path):
    scheduler, _, _ = make_keys(tmp_path)
    (scheduler / "executor.key").unlink()
    frontend, backend = server_keys(
        Config(link_keys_dir=str(scheduler), frontend_address="tcp://*:1", backend_address="ipc:///x/y")
    )
    assert frontend is not None
    assert backend is None


def test_a_directory_of_another_kind_names_the_right_one(tmp_path):
    make_keys(tmp_path)
    for directory in (tmp_path, tmp_path / "executor", tmp_path / "none"):
        with pytest.raises(ValueError, match="does not exist: link_keys_dir is the directory DIR/gateway"):
            client_keys(Config(link_keys_dir=str(directory)), "gateway", ["tcp://127.0.0.1:1"])


@pytest.mark.parametrize(
    "text",
    ["", "x", 'public-key = "abc"', 'public-key = "' + "\\" * 40 + '"', "\0" * 100],
    ids=["empty", "word", "short", "no Z85", "zeros"],
)
def test_a_file_without_a_key_is_one_sentence(tmp_path, text):
    _, gateway, _ = make_keys(tmp_path)
    (gateway / "scheduler.key").write_text(text)
    with pytest.raises(ValueError, match=r"scheduler\.key.*key"):
        client_keys(Config(link_keys_dir=str(gateway)), "gateway", ["tcp://127.0.0.1:1"])


def test_a_public_key_in_the_place_of_a_secret_is_refused(tmp_path):
    _, gateway, _ = make_keys(tmp_path)
    (gateway / "gateway.key_secret").write_text((tmp_path / "scheduler" / "gateway.key").read_text())
    with pytest.raises(ValueError, match="has no secret key"):
        client_keys(Config(link_keys_dir=str(gateway)), "gateway", ["tcp://127.0.0.1:1"])


def test_a_secret_that_everybody_can_read_is_warned_about(tmp_path, caplog):
    _, gateway, _ = make_keys(tmp_path)
    config = Config(link_keys_dir=str(gateway))
    client_keys(config, "gateway", ["tcp://127.0.0.1:1"])
    assert caplog.text == ""
    (gateway / "gateway.key_secret").chmod(0o644)
    client_keys(config, "gateway", ["tcp://127.0.0.1:1"])
    assert "chmod 600" in caplog.text


def test_ranks_on_several_machines_need_insecure_links():
    ranks = {"tensor_parallel_size": 2, "rank": 1}
    for local in ("file:///run/x/ranks", "tcp://127.0.0.1:29500", "tcp://localhost:29500", ""):
        check_ranks_link(Config(distributed_address=local, **ranks))
    with pytest.raises(ValueError, match="torch"):
        check_ranks_link(Config(distributed_address="tcp://10.0.0.1:29500", **ranks))
    check_ranks_link(Config(distributed_address="tcp://10.0.0.1:29500", insecure_links=True, **ranks))
