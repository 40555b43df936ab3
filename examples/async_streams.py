"""Several answers as streams in one event loop: `python examples/async_streams.py [MODEL]`."""

import asyncio
import sys

from octavo import AsyncLLM, SamplingParams


async def tell(llm: AsyncLLM, topic: str) -> str:
    """Return a sentence, and show its pieces as they come."""
    num_shown = 0
    async for output in llm.generate(f"A sentence about {topic}:", SamplingParams(max_tokens=24)):
        text = output.outputs[0].text
        print(f"{topic}: {text[num_shown:]!r}")
        num_shown = len(text)
    return text


async def main(model: str | None) -> None:
    async with AsyncLLM(model) as llm:
        sentences = await asyncio.gather(*(tell(llm, topic) for topic in ("rain", "bread", "music")))
    print(*sentences, sep="\n")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
