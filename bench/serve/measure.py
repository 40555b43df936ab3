"""Measures a server: warm-up, then the same work as often as asked."""

from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
import msgspec
from tqdm import tqdm

from octavo.bench.serve.arrivals import poisson_arrivals
from octavo.bench.serve.client import ROUTES, Load, Sender, Server, first_model, open_session
from octavo.bench.serve.requests import Request, bodies, random_requests
from octavo.bench.serve.results import Run, summarize
from octavo.bench.serve.work import Work
from octavo.errors import CommandError


class Measured(NamedTuple):
    model: str
    runs: list[Run]
    was_interrupted: bool = False


class Times(NamedTuple):
    """How often: requests before anything is counted, then runs."""

    num_warmups: int = 1
    num_runs: int = 1


async def measure(
    server: Server,
    work: Work,
    *,
    model: str | None = None,
    dataset: Sequence[Request] | None = None,
    times: Times = Times(),  # noqa: B008  (immutable)
    targets_ms: dict[str, float] | None = None,
) -> Measured:
    """Return what `server` does with `work`, asked of `model` or of the first that it has.

    `dataset` has the requests if `work` says so. Interrupted, it returns what there is. Raises CommandError if there is
    no server or a warm-up fails.
    """
    async with open_session(server) as session:
        model = model or await first_model(session, server)
        sender = _Sending(session, server, work, model)
        await sender.warm_up(times.num_warmups)
        runs: list[Run] = []
        for number in range(times.num_runs):
            requests = dataset if dataset is not None else random_requests(work, str(number))
            load = await sender.send(requests, f"run {number + 1} of {times.num_runs}")
            wanted_tokens = [request.max_tokens for request in requests] if work.ignore_eos else None
            runs.append(summarize(load.records, load.duration_s, targets_ms, wanted_tokens))
            if load.was_interrupted:
                return Measured(model, runs, was_interrupted=True)
    return Measured(model, runs)


class _Sending(NamedTuple):
    session: aiohttp.ClientSession
    server: Server
    work: Work
    model: str

    async def warm_up(self, num_requests: int) -> None:
        """Send `num_requests` of random words, one by one. Raises CommandError if one fails."""
        work = msgspec.structs.replace(self.work, num_prompts=num_requests)
        encoded = bodies(random_requests(work, "warm-up"), work, self.model)
        load = await Sender(self.session, self._url).send_closed(encoded, 1)
        if load.was_interrupted:
            raise KeyboardInterrupt
        if failed := [record.failure for record in load.records if record.failure]:
            raise CommandError(f"a warm-up request to {self._url} failed: {failed[0]}")

    async def send(self, requests: Sequence[Request], title: str) -> Load:
        encoded = bodies(requests, self.work, self.model)
        with tqdm(total=len(encoded), desc=title, unit=" requests", disable=None, leave=False) as bar:
            sender = Sender(self.session, self._url, lambda: bar.update())
            if self.work.request_rate:
                arrivals_s = poisson_arrivals(len(encoded), self.work.request_rate, self.work.seed)
                return await sender.send_open(encoded, arrivals_s)
            return await sender.send_closed(encoded, self.work.max_concurrency or len(encoded))

    @property
    def _url(self) -> str:
        return self.server.base_url + ROUTES[self.work.endpoint]
