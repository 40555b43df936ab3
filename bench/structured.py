"""`python -m octavo.bench.structured URL`: what structured output costs a server, and whether it is valid.

Requests with JSON schemas run first, a bounded number at once. Then the same prompts run without, each for as many
tokens as its answer had: the same work but for the grammar, as no prompt is found in the prefix cache. Beside both run
some streams without a grammar, whose gaps between tokens are measured. The parts alternate, since a machine is not
always equally fast.
"""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from jsonschema import Draft202012Validator

NUM_PARTS = 5
NUM_CANARIES = 2
CANARY_TOKENS = 400

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SHAPE = {
    "type": "object",
    "properties": {"shape": {"oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}],
                             "discriminator": {"propertyName": "kind"}}},
    "required": ["shape"],
    "additionalProperties": False,
    "$defs": {
        "circle": {"type": "object", "additionalProperties": False, "required": ["kind", "radius"],
                   "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "maximum": 9}}},
        "square": {"type": "object", "additionalProperties": False, "required": ["kind", "side"],
                   "properties": {"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 1}}},
    },
}  # fmt: skip
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string", "maxLength": 8},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
EVENT = {
    "type": "object",
    "properties": {
        "date": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
        "place": {"anyOf": [{"type": "string", "maxLength": 16}, {"type": "null"}]},
        "open": {"type": "boolean"},
    },
    "required": ["date", "code", "place", "open"],
    "additionalProperties": False,
}
ASKED = (("a person", PERSON), ("a shape", SHAPE), ("a small tree", TREE), ("an event", EVENT))


@dataclass
class Run:
    """What was measured of one kind of request."""

    num_tokens: int = 0
    num_seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


@dataclass
class Validity:
    num_complete: int = 0
    num_cut: int = 0
    wrong: list[str] = field(default_factory=list)


class Bench:
    def __init__(self, client: httpx.AsyncClient, concurrency: int, max_tokens: int) -> None:
        self._client, self._concurrency, self._max_tokens = client, concurrency, max_tokens
        self.constrained, self.free, self.validity = Run(), Run(), Validity()

    async def part(self, numbers: Sequence[int]) -> None:
        """Run some requests with their schemas, then the same without."""
        lengths: dict[int, int] = {}

        async def with_schema(number: int) -> int:
            what, schema = ASKED[number % len(ASKED)]
            given = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            answer = await self._ask(
                number, what, max_tokens=self._max_tokens, response_format=given, cache_salt=f"schema {number}"
            )
            self._judge(answer["choices"][0], schema)
            lengths[number] = answer["usage"]["completion_tokens"]
            return lengths[number]

        async def without(number: int) -> int:
            what, _ = ASKED[number % len(ASKED)]
            answer = await self._ask(
                number, what, max_tokens=lengths[number], ignore_eos=True, cache_salt=f"free {number}"
            )
            return int(answer["usage"]["completion_tokens"])

        await self._run(self.constrained, map(with_schema, numbers))
        await self._run(self.free, map(without, numbers))

    async def _run(self, run: Run, requests: Iterator[Any]) -> None:
        stopping = asyncio.Event()
        canaries = [asyncio.create_task(self._canary(run.gaps_s, stopping)) for _ in range(NUM_CANARIES)]
        begun_s = time.perf_counter()

        async def work() -> None:
            for request in requests:
                num_tokens = await request
                run.num_tokens += num_tokens

        await asyncio.gather(*(work() for _ in range(self._concurrency)))
        run.num_seconds += time.perf_counter() - begun_s
        stopping.set()
        await asyncio.gather(*canaries)

    async def _ask(self, number: int, what: str, **fields: Any) -> Any:
        messages = [{"role": "user", "content": f"Make up {what}, number {number}, and answer in JSON."}]
        response = await self._client.post(
            "/v1/chat/completions", json={"messages": messages, "seed": number, **fields}
        )
        response.raise_for_status()
        return response.json()

    def _judge(self, choice: Any, schema: Any) -> None:
        if choice["finish_reason"] != "stop":
            self.validity.num_cut += 1
            return
        self.validity.num_complete += 1
        content = choice["message"]["content"]
        try:
            Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
                json.loads(content)
            )
        except Exception as error:
            self.validity.wrong.append(f"{content!r}: {error}")

    async def _canary(self, gaps_s: list[float], stopping: asyncio.Event) -> None:
        """Note the gaps between the tokens of streams, until the end."""
        body = {"prompt": "Once upon a time", "max_tokens": CANARY_TOKENS, "ignore_eos": True, "stream": True}
        while not stopping.is_set():
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                last_s = None
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.perf_counter()
                        if last_s is not None:
                            gaps_s.append(now_s - last_s)
                        last_s = now_s
                    if stopping.is_set():
                        break


async def measure(url: str, num_requests: int, concurrency: int, max_tokens: int) -> Bench:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        bench = Bench(client, concurrency, max_tokens)
        await bench.part(range(-concurrency, 0))  # to warm up
        bench.constrained, bench.free, bench.validity = Run(), Run(), Validity()
        for numbers in _parts(num_requests):
            await bench.part(numbers)
        return bench


def _parts(num_requests: int) -> list[range]:
    ends = [num_requests * part // NUM_PARTS for part in range(NUM_PARTS + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def report(bench: Bench) -> str:
    rates = [run.num_tokens / run.num_seconds for run in (bench.constrained, bench.free)]
    gaps_ms = [1000 * float(np.percentile(run.gaps_s, 99)) for run in (bench.constrained, bench.free)]
    validity = bench.validity
    lines = [
        f"answers: {validity.num_complete} complete, of them {len(validity.wrong)} not valid; {validity.num_cut} cut",
        f"tokens/s: {rates[0]:.1f} with schemas, {rates[1]:.1f} without: {rates[0] / rates[1]:.3f}",
        f"other streams' p99 gap: {gaps_ms[0]:.1f} ms beside schemas, {gaps_ms[1]:.1f} ms else: "
        f"{gaps_ms[0] / gaps_ms[1]:.3f}",
    ]
    return "\n".join([*lines, *validity.wrong[:5]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.structured", description=__doc__)
    parser.add_argument("url", help="of a running server")
    parser.add_argument("--num-requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=200)
    given = parser.parse_args()
    print(report(asyncio.run(measure(given.url, given.num_requests, given.concurrency, given.max_tokens))))


if __name__ == "__main__":
    main()
