"""`AsyncLLM`: a model to generate with in asyncio programs, each answer as a stream."""

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator
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
    """A model to generate with in an asyncio program; MODEL and settings are those of `LLM`.

    Use it as `async with AsyncLLM(...) as llm`, or call `start` and `close`. Any number of tasks, event loops and
    threads may use it at once. Raises what `LLM` raises: for wrong settings at once, for the rest in `start`.
    """

    def __init__(self, model: "str | os.PathLike[str] | None" = None, **settings: Any) -> None:
        self._engine = LocalEngine(config_of("AsyncLLM", model, settings), serves_http=wants_http(settings))
        weakref.finalize(self, self._engine.close)

    @property
    def config(self) -> Config:
        """The settings of all its processes; once started, with the model's directory and the sockets' addresses."""
        return self._engine.config

    async def start(self) -> None:
        """Return once the model is ready. Cancelled, it ends what it has started; it can be called once."""
        try:
            await asyncio.to_thread(self._engine.start)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        """End the model and its processes; what is being generated ends with a GenerationError."""
        await asyncio.to_thread(self._engine.close)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield all that the model has said after `prompt` so far, whenever there is more; the last one is `finished`.

        `prompt` is one prompt of a form that `LLM.generate` takes. Who stops to iterate ends the generation.
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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer to one conversation as `generate` does."""
        [sampling] = one_each(sampling_params, 1)
        request = await asyncio.to_thread(
            self._engine.preparation.of_chat,
            messages,
            sampling,
            request_id,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
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
