"""Generates the answers of a batch with a model that runs only for it."""

import asyncio
from contextlib import closing

from octavo.batch.prompts import BatchPrompt
from octavo.batch.run import Batch
from octavo.protocol.config import Config
from octavo.python.local_engine import LocalEngine
from octavo.python.outputs import RequestOutput
from octavo.python.preparation import PreparedRequest
from octavo.python.sampling_params import SamplingParams

# Results are added in order: while a long answer is generated, the shorter ones after it keep the model busy.
WINDOW_PER_PLACE = 4


def generate_batch(config: Config, params: SamplingParams, batch: Batch) -> None:
    """Generate the missing results of `batch`. Raises LaunchError or GenerationError; Ctrl-C ends it at any time."""
    with closing(LocalEngine(config)) as engine:
        engine.start()  # in this thread, the only one that Ctrl-C interrupts

        def prepare(prompt: BatchPrompt) -> PreparedRequest:
            text, messages = prompt.asked.prompt, prompt.asked.messages
            request_id = str(prompt.line)  # the same if the run is interrupted and continued
            if messages is not None:
                return engine.preparation.of_chat(messages, params, request_id)
            return engine.preparation.of_prompt(text or "", params, request_id)

        async def answer(prompt: BatchPrompt) -> RequestOutput:
            return await engine.complete(await asyncio.to_thread(prepare, prompt))

        asyncio.run(batch.run(answer, config.max_num_seqs * WINDOW_PER_PLACE))
