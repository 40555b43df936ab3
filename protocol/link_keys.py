"""The keys of tcp:// links: ZeroMQ CURVE encrypts a link, and each end knows the other by its key.

Each kind of process has one key pair, in files of zmq.auth. The scheduler answers only gateways at its frontend and
only executors at its backend. Gateways and executors answer only the scheduler whose public key they have. A private
directory guards ipc:// links.
"""

import logging
import os
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from octavo.protocol.config import Config

logger = logging.getLogger(__name__)

TCP = "tcp://"
KEY_CHARACTERS = 40  # of a key in Z85
# By kind of process: whose public keys lie beside its secret key.
PEERS = {"scheduler": ("gateway", "executor"), "gateway": ("scheduler",), "executor": ("scheduler",)}


class KeyPair(NamedTuple):
    public: bytes
    secret: bytes


class ClientKeys(NamedTuple):
    """For a socket that connects to the scheduler with the public key `scheduler`."""

    own: KeyPair
    scheduler: bytes


class ServerKeys(NamedTuple):
    """For a socket that the scheduler binds: it answers peers with one of the `admitted` public keys."""

    own: KeyPair
    kind: str  # of the processes that connect
    admitted: frozenset[bytes]


def make_keys(directory: Path) -> list[Path]:
    """Write new keys for each kind of process into a directory of its own; return the directories.

    Raises FileExistsError, and writes nothing, if there are keys already.
    """
    pairs = {kind: KeyPair(*zmq.curve_keypair()) for kind in PEERS}
    texts: dict[Path, tuple[str, int]] = {}
    for kind, peers in PEERS.items():
        texts[directory / kind / f"{kind}.key_secret"] = _certificate(*pairs[kind]), 0o600
        for peer in peers:
            texts[directory / kind / f"{peer}.key"] = _certificate(pairs[peer].public), 0o644
    for path in texts:
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists already: remove the keys in {directory}, or choose another directory")
    for path, (text, mode) in texts.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
    return [directory / kind for kind in PEERS]


def client_keys(config: Config, kind: str, addresses: Iterable[str]) -> ClientKeys | None:
    """Return the keys with which a process of `kind` connects to `addresses`; None for links without keys.

    Raises ValueError if the keys cannot be used, or are absent although an address is another machine's.
    """
    if not _need_keys(config, addresses):
        return None
    directory = Path(config.link_keys_dir)
    own = _own(directory, kind)
    return ClientKeys(own, own.public if kind == "scheduler" else _public(directory, "scheduler", kind))


def server_keys(config: Config) -> tuple[ServerKeys | None, ServerKeys | None]:
    """Return the keys of the scheduler's frontend and of its backend; None for a link without keys.

    The scheduler's own key opens its frontend too: the scheduler's probe uses it. Raises ValueError as `client_keys`.
    """
    frontend = _server_keys(config, config.frontend_address, "gateway")
    if frontend is not None:
        frontend = frontend._replace(admitted=frontend.admitted | {frontend.own.public})
    return frontend, _server_keys(config, config.backend_address, "executor")


def _server_keys(config: Config, address: str, kind: str) -> ServerKeys | None:
    if not _need_keys(config, [address]):
        return None
    directory = Path(config.link_keys_dir)
    return ServerKeys(_own(directory, "scheduler"), kind, frozenset({_public(directory, kind, "scheduler")}))


def check_ranks_link(config: Config) -> None:
    """Raise ValueError if ranks meet at an address that other machines reach, unless insecure_links allows it."""
    if not config.insecure_links and _is_exposed(config.distributed_address):
        raise ValueError(
            f"ranks that meet at {config.distributed_address} trust everybody who reaches them, since torch.distributed"
            " has no keys and no encryption: give the ranks a network of their own, and set --insecure-links"
        )


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches the tcp:// address. A name, except localhost, may be any machine's."""
    host = address.removeprefix(TCP).rpartition(";")[2].rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _need_keys(config: Config, addresses: Iterable[str]) -> bool:
    """Return whether any of the addresses needs keys. Raises ValueError if it needs keys that are not set."""
    links = [address for address in addresses if address.startswith(TCP)]
    if config.link_keys_dir:
        return bool(links)
    if exposed := [address for address in links if _is_exposed(address)]:
        if not config.insecure_links:
            raise ValueError(
                f"{exposed[0]} can be reached from other machines, and there are no keys: anyone could generate, and"
                " read and answer the requests of others. Make keys with `octavo keys DIR` and set --link-keys-dir; or"
                " set --insecure-links, if only machines that you trust reach it"
            )
        logger.warning("%s is without keys: everybody who reaches it can use the model and read along", exposed[0])
    return False


def _is_exposed(address: str) -> bool:
    return address.startswith(TCP) and not is_loopback(address)


def _own(directory: Path, kind: str) -> KeyPair:
    path = directory / f"{kind}.key_secret"
    public, secret = _load(path, kind)
    if secret is None or not _is_key(secret):
        raise ValueError(f"{path} has no secret key: make keys anew with `octavo keys DIR`")
    if path.stat().st_mode & 0o007:
        logger.warning("%s is a secret, and every user of this machine can read it: chmod 600", path)
    return KeyPair(public, secret)


def _public(directory: Path, peer: str, kind: str) -> bytes:
    return _load(directory / f"{peer}.key", kind)[0]


def _load(path: Path, kind: str) -> tuple[bytes, bytes | None]:
    """Return the keys in a file of zmq.auth. Raises ValueError, for the operator, if it cannot be used."""
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: link_keys_dir is the directory DIR/{kind} that `octavo keys DIR` makes"
        )
    try:
        public, secret = load_certificate(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:  # zmq.auth found no key
        public, secret = b"", None
    if not _is_key(public):
        raise ValueError(f"{path} has no public key: make keys anew with `octavo keys DIR`")
    return public, secret


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == KEY_CHARACTERS and len(z85.decode(text)) == 32
    except (KeyError, ValueError):
        return False


def _certificate(public: bytes, secret: bytes | None = None) -> str:
    """Return the text of a key file of zmq.auth."""
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"
