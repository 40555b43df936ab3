"""How the ranks of a tensor-parallel executor meet."""

import hashlib
import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch
from torch import distributed

from octavo.executor.parallel import ALONE, GroupLostError, TensorParallel
from octavo.protocol.config import Config

# The longest silence of a peer. A closed connection is noticed at once; this bound is for a peer that loads for long,
# and for a machine that vanished.
TIMEOUT = timedelta(minutes=30)
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1", "[::1]")


def join_group(config: Config, device: torch.device) -> TensorParallel:
    """Return this process's place in its group once all ranks are there.

    Raises GroupLostError if they cannot meet, ValueError if no address is set.
    """
    if config.tensor_parallel_size == 1:
        return ALONE
    if not config.distributed_address:
        raise ValueError("tensor_parallel_size needs distributed_address: where the ranks meet, tcp://HOST:PORT")
    if is_local(config):
        # gloo would look up the machine's own name, which may not resolve to an address of the machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    try:
        distributed.init_process_group(
            "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
            init_method=config.distributed_address,
            rank=config.rank,
            world_size=config.tensor_parallel_size,
            timeout=TIMEOUT,
        )
    except RuntimeError as error:
        raise GroupLostError(f"the ranks cannot meet at {config.distributed_address}: {error}") from None
    return TensorParallel(config.rank, config.tensor_parallel_size, distributed.group.WORLD)


def is_local(config: Config) -> bool:
    """Return whether all ranks run on this machine and share its cores and memory."""
    address = urlsplit(config.distributed_address)
    return address.scheme != "tcp" or address.hostname in LOOPBACK_HOSTS


def num_local_ranks(config: Config) -> int:
    """Return how many ranks share this machine: all, or one if the group spans several machines."""
    return config.tensor_parallel_size if is_local(config) else 1


def own_device(config: Config, device: torch.device) -> torch.device:
    """Return this rank's device: GPU number `rank`. Raises ValueError if there are too few GPUs."""
    if device.type == "cpu" or config.tensor_parallel_size == 1:
        return device
    num_devices = torch.cuda.device_count()
    if num_devices < num_local_ranks(config):
        raise ValueError(f"tensor_parallel_size {config.tensor_parallel_size} needs as many GPUs; found: {num_devices}")
    own = torch.device(device.type, config.rank % num_devices)
    torch.cuda.set_device(own)
    return own


def check_agreement(parallel: TensorParallel, *settings: object) -> None:
    """Raise ValueError if the ranks were started with different models or `settings`."""
    digest = hashlib.sha256(repr(settings).encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    least, most = (
        parallel.least(number),
        -parallel.least(-number),
    )  # both calls on every rank, or one would wait for ever
    if least != most:
        raise ValueError("the ranks of this executor were started with different models or settings")


def _loopback_interface() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
