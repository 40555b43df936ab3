"""A model inside a FastAPI application: `MODEL=... uvicorn --app-dir examples fastapi_app:app`.

Octavo's whole OpenAI-compatible API is mounted under /llm (POST /llm/v1/chat/completions), and the application's own
routes use the same model from Python. It has no keys of its own: what guards the application guards the model.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request

from octavo import AsyncLLM, SamplingParams
from octavo.gateway.http.app import create_app


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
    async with AsyncLLM(os.environ.get("MODEL")) as llm:
        gateway = create_app(msgspec.structs.replace(llm.config, api_key=()))
        app.mount("/llm", gateway)
        async with gateway.router.lifespan_context(gateway) as state:
            while not state["service"].engine.healthy:  # a moment: the model is there already
                await asyncio.sleep(0.01)
            yield {**state, "llm": llm}


app = FastAPI(lifespan=lifespan)


@app.post("/continue")
async def go_on(request: Request, text: str) -> dict[str, str]:
    """Return `text` with what the model adds to it."""
    llm: AsyncLLM = request.state.llm
    async for output in llm.generate(text, SamplingParams(max_tokens=24)):
        added = output.outputs[0].text
    return {"text": text + added}
