"""Keep a server busy while a command runs, and count what was sent, lost or sent back.

    python tests/compose/load.py http://127.0.0.1:8000 "gateway 2 -> 4" -- docker compose up -d --scale gateway=4

A request is lost unless it ends with the very answer that it had before the command: all are greedy, and half of them
streamed. An answer of 429 or 503 before any work is no loss: the client is told to come back, does so, and it is
counted. The exit status is 1 if a request was lost, else the command's.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import openai

NUM_CLIENTS = 6
NUM_ROUNDS_AFTER = 3  # requests of each client once the command has ended
PROMPTS = ("The first page of a book", "A list of colours:", "Once upon a time", "To fold a sheet of paper,")
LONGEST_ANSWER_S = 300.0


@dataclass
class Load:
    """Clients that ask for the same few answers over and over."""

    client: openai.AsyncOpenAI
    model: str
    max_tokens: int
    expected: dict[str, str]
    counts: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    async def ask_until(self, enough: asyncio.Event, number: int) -> None:
        """Ask one question after the other, and NUM_ROUNDS_AFTER more once there are `enough`."""
        rounds_left = NUM_ROUNDS_AFTER
        while rounds_left:
            rounds_left -= enough.is_set()
            number += 1
            await self._ask(PROMPTS[number % len(PROMPTS)], stream=bool(number // len(PROMPTS) % 2))

    async def _ask(self, prompt: str, *, stream: bool) -> None:
        self.counts["sent"] += 1
        started_s = time.monotonic()
        try:
            text = await self._answer(prompt, stream=stream)
        except (openai.OpenAIError, TimeoutError) as error:
            self._lose(f"{'streamed ' if stream else ''}{prompt!r}: {type(error).__name__}: {error}")
        else:
            if text != self.expected[prompt]:
                self._lose(f"{prompt!r}: {text!r} where {self.expected[prompt]!r} was expected")
        self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)

    def _lose(self, reason: str) -> None:
        self.counts["lost"] += 1
        print(f"lost: {reason}", flush=True)

    async def _answer(self, prompt: str, *, stream: bool) -> str:
        """Return the answer, asking again when told to come back. Raises OpenAIError, TimeoutError."""
        async with asyncio.timeout(LONGEST_ANSWER_S):
            while True:
                try:
                    return await answer(self.client, self.model, prompt, self.max_tokens, stream=stream)
                except (openai.InternalServerError, openai.RateLimitError) as error:
                    if error.status_code not in (429, 503):
                        raise
                    self.counts["sent back"] += 1
                    await asyncio.sleep(float(error.response.headers["Retry-After"]))


async def answer(client: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int, *, stream: bool) -> str:
    """Return the whole greedy answer. Raises OpenAIError, also for one that was cut."""
    options = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if not stream:
        whole = await client.completions.create(**options)
        return whole.choices[0].text
    text, finish_reason = "", None
    async for chunk in await client.completions.create(**options, stream=True):
        text += chunk.choices[0].text
        finish_reason = chunk.choices[0].finish_reason or finish_reason
    if finish_reason is None:
        raise openai.OpenAIError(f"the stream ended after {text!r}")
    return text


async def run(url: str, what: str, command: Sequence[str], max_tokens: int) -> int:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0, timeout=None) as client:
        model = (await client.models.list()).data[0].id
        expected = {prompt: await answer(client, model, prompt, max_tokens, stream=False) for prompt in PROMPTS}
        load = Load(client, model, max_tokens, expected)
        enough = asyncio.Event()
        clients = [asyncio.create_task(load.ask_until(enough, number)) for number in range(NUM_CLIENTS)]
        while load.counts["sent"] < 2 * NUM_CLIENTS:
            await asyncio.sleep(0.05)
        started_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(*command)
        status = await process.wait()
        took_s = time.monotonic() - started_s
        enough.set()
        await asyncio.gather(*clients)
    counts = load.counts
    print(
        f"{what}: {counts['sent']} requests sent, {counts['lost']} lost, {counts['sent back']} times told to come back;"
        f" the command took {took_s:.1f} s, the slowest answer {load.slowest_s:.1f} s",
        flush=True,
    )
    return 1 if counts["lost"] else status


def main() -> int:
    parser = argparse.ArgumentParser(description="Keep a server busy while a command runs, and count what was lost.")
    parser.add_argument("url")
    parser.add_argument("what")
    parser.add_argument("command", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=32, help="length of the answers")
    arguments = parser.parse_args()
    return asyncio.run(run(arguments.url, arguments.what, arguments.command, arguments.max_tokens))


if __name__ == "__main__":
    sys.exit(main())
