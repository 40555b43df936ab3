"""`AsyncLLM`: generates in asyncio programs, each answer as a stream."""

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from octavo.protocol.config import Config
from octavo.python.local_engine import LocalEngine
from octavo.python.outputs import RequestOutput
from octavo.python.preparation import Conversation, Prompt, one_each
from octavo.python.sampling_params import SamplingParams
from octavo.python.settings import config_of, wants_http, with_settings


@with_settings
class AsyncLLM:
    """A model for an asyncio program; MODEL and settings are the same as for `LLM`.

    Use it as `async with AsyncLLM(...) as llm`, or call `start` and `close`. Any number of tasks, event loops and
    threads may use it at once. Raises the errors of `LLM`: for wrong settings at once, all others in `start`.
    """

    def __init__(self, model: "str | os.PathLike[str] | None" = None, **settings: Any) -> None:
        self._engine = LocalEngine(config_of("AsyncLLM", model, settings), serves_http=wants_http(settings))
        weakref.finalize(self, self._engine.close)

    @property
    def config(self) -> Config:
        """The settings of all processes; after the start, with the model's directory and the sockets' addresses."""
        return self._engine.config

    async def start(self) -> None:
        """Return once the model is ready. Cancelling ends the started processes. It can be called once."""
        try:
            await asyncio.to_thread(self._engine.start)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        """End the model and its processes. Running generations end with a GenerationError."""
        await asyncio.to_thread(self._engine.close)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the model's whole answer to `prompt` so far, whenever there is more; the last output is `finished`.

        `prompt` is one prompt in a form that `LLM.generate` takes. Leaving the iteration ends the generation.
        """
        [sampling] = one_each(sampling_params, 1)
        request = await asyncio.to_thread(self._engine.preparation.of_prompt, prompt, sampling, request_id)
        async with aclosing(self._engine.stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer to one conversation, in the same way as `generate`."""
        [sampling] = one_each(sampling_params, 1)
        request = await asyncio.to_thread(
            self._engine.preparation.of_chat,
            messages,
            sampling,
            request_id,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
        )
        async with aclosing(self._engine.stream(request)) as outputs:
            async for output in outputs:
                yield output

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
