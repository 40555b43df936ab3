"""A link that loses, repeats, delays and so reorders whole messages, by a seed; it can also hold everything back."""

import heapq
import itertools
import random
import time

import zmq

from octavo.protocol.sockets import bind_router, connect_dealer, try_send
from tests.fakes.peer_thread import PeerThread


class ChaosProxy(PeerThread):
    """Between DEALERs that connect to `address` and the ROUTER at `target`; identities pass through."""

    def __init__(
        self,
        address: str,
        target: str,
        seed: int,
        *,
        drop: float = 0.1,
        repeat: float = 0.1,
        delay: float = 0.2,
        longest_delay_s: float = 0.05,
    ) -> None:
        super().__init__()
        self.address = address
        self.target = target
        self.drop, self.repeat, self.delay = drop, repeat, delay
        self.longest_delay_s = longest_delay_s
        self.num_dropped = self.num_repeated = self.num_delayed = 0
        self._random = random.Random(seed)
        self._held: list[tuple[float, int, bytes, bool, bytes]] = []  # due, order, identity, upward, payload
        self._order = itertools.count()

    def _run(self) -> None:
        dealers: dict[bytes, zmq.Socket[bytes]] = {}
        with zmq.Context() as context, bind_router(context, self.address) as router:
            try:
                self._forward(context, router, dealers)
            finally:
                for dealer in dealers.values():
                    dealer.close()

    def _forward(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: "zmq.Socket[bytes]",
        dealers: "dict[bytes, zmq.Socket[bytes]]",
    ) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(2):
                if socket is router:
                    identity, payload = router.recv_multipart()
                    if identity not in dealers:
                        dealers[identity] = connect_dealer(context.socket(zmq.DEALER), self.target, identity.decode())
                        poller.register(dealers[identity], zmq.POLLIN)
                    self._take(identity, True, payload)
                else:
                    identity = socket.get(zmq.IDENTITY)
                    self._take(identity, False, socket.recv())
            now_s = time.monotonic()
            while self._held and self._held[0][0] <= now_s:
                _, _, identity, is_upward, payload = heapq.heappop(self._held)
                if is_upward:
                    try_send(dealers[identity], [payload])
                else:
                    try_send(router, [identity, payload])

    def _take(self, identity: bytes, is_upward: bool, payload: bytes) -> None:
        drawn = [self._random.random() for _ in range(5)]
        num_copies = 0 if drawn[0] < self.drop else 2 if drawn[1] < self.repeat else 1
        delays_s = [
            draw * self.longest_delay_s if chance < self.delay else 0.0
            for chance, draw in ((drawn[2], drawn[3]), (self.delay / 2, drawn[4]))
        ]
        self.num_dropped += num_copies == 0
        self.num_repeated += num_copies == 2
        self.num_delayed += any(delays_s[:num_copies])
        for delay_s in delays_s[:num_copies]:
            heapq.heappush(self._held, (time.monotonic() + delay_s, next(self._order), identity, is_upward, payload))
