"""transformers' own `generate` behind OpenAI's API, one request at a time: where many begin, as a server to compare.

python -m octavo.bench.versus.one_at_a_time MODEL_DIRECTORY --port 8000
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

UNSPEAKABLE = "\ufffd"  # sent for a token without text, so that each is a chunk


class Asked(msgspec.Struct):
    """What is read of a body: greedy, streamed completions of a text are all that is done here."""

    prompt: str
    max_tokens: int
    temperature: float = 1.0
    ignore_eos: bool = False
    stream: bool = False


class _Tokens:
    """What `generate` calls a streamer: it hands the tokens, made in a thread, to the loop, and None at the end."""

    def __init__(self) -> None:
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[int | None]()
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, int(value))
        self._has_prompt = True

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, None)

    async def __aiter__(self) -> AsyncIterator[int]:
        while (token := await self._queue.get()) is not None:
            yield token


class OneAtATime:
    """Answers in the order of arrival; a request waits until those before it have ended."""

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self._model, self._tokenizer, self._name = model, tokenizer, name
        self._turn = asyncio.Lock()

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self._name}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = msgspec.json.decode(await request.read(), type=Asked)
        except msgspec.DecodeError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if asked.temperature != 0 or not asked.stream:
            return web.json_response({"error": {"message": "temperature 0 and stream are all there is"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with self._turn:
            await self._answer(asked, response)
        return response

    async def _answer(self, asked: Asked, response: web.StreamResponse) -> None:
        encoded, tokens = self._tokenizer(asked.prompt, return_tensors="pt"), _Tokens()
        options = {"min_new_tokens": asked.max_tokens} if asked.ignore_eos else {}
        generating = asyncio.create_task(
            asyncio.to_thread(
                self._model.generate,
                **encoded,
                max_new_tokens=asked.max_tokens,
                do_sample=False,
                streamer=tokens,
                **options,
            )
        )
        generating.add_done_callback(lambda task: tokens.end())  # also after an error, which the last line raises
        num_tokens = 0
        async for token in tokens:
            num_tokens += 1
            await response.write(_event({"choices": [{"text": self._tokenizer.decode([token]) or UNSPEAKABLE}]}))
        await generating
        usage = {"prompt_tokens": encoded["input_ids"].shape[1], "completion_tokens": num_tokens}
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def load(directory: Path, dtype: str) -> OneAtATime:
    """Return a server of the model in `directory`, its weights as `dtype` of torch."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    return OneAtATime(model, AutoTokenizer.from_pretrained(directory), directory.name)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.versus.one_at_a_time", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIRECTORY")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args(argv)
    server = load(options.model, options.dtype)
    web.run_app(server.application(), host="127.0.0.1", port=options.port, print=lambda _: None)


if __name__ == "__main__":
    main()
