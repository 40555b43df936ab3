"""One scheduler, seen from a gateway: a DEALER, a Hello every half second, and what is in flight."""


class SchedulerClient:
    """Made by `SchedulerClient(address, peer_timeout_s)`; the Engine opens and closes it."""

    def __init__(self, address: str, *, peer_timeout_s: float = 10.0) -> None:
        self.address = address
        self.peer_timeout_s = peer_timeout_s
