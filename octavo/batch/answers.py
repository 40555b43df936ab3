"""The answers to a batch, from a model that runs for it alone."""

import sys

from octavo.async_llm import AsyncLLM
from octavo.batch.prompts import Prompt
from octavo.batch.run import Batch
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.settings import KEYWORDS
from protocol.config import Config

# Results are added in order: while a long answer is awaited, the shorter ones after it keep the model busy.
WINDOW_PER_PLACE = 4


async def generate_batch(config: Config, params: SamplingParams, batch: Batch) -> None:
    """Generate what is left of `batch`. Raises ModelError, LaunchError or GenerationError."""
    print(f"Starting {config.model or 'the demo model'}", file=sys.stderr)
    async with AsyncLLM(**{name: getattr(config, name) for name in KEYWORDS}) as llm:

        async def answer(prompt: Prompt) -> RequestOutput:
            text, messages = prompt.asked.prompt, prompt.asked.messages
            stream = llm.generate(text or "", params) if messages is None else llm.chat(messages, params)
            async for output in stream:
                last = output
            return last

        await batch.run(answer, config.max_num_seqs * WINDOW_PER_PLACE)
