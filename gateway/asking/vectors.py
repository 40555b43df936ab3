"""Encodes and checks prompts, and makes the engine's requests for their vectors."""

from array import array

import numpy as np

from octavo.gateway.asking.asked import AskedPrompts
from octavo.gateway.asking.encode import PreparedPrompt
from octavo.gateway.asking.model import ServedModel
from octavo.gateway.asking.prepare import encode_within_context
from octavo.gateway.asking.sampling import context_length_exceeded
from octavo.gateway.link.engine import EncodedPrompt, GenerationRequest
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.steps import Steps
from octavo.protocol.messages import Ready
from octavo.protocol.sampling import Sampling

NOTHING = Sampling(max_tokens=0, seed=0)  # an embedding samples nothing


def prepare_vectors(
    asked: AskedPrompts, model: ServedModel, request_id: str, tenant: str = ""
) -> Steps[list[GenerationRequest]]:
    """Return, in steps, a request for each prompt. Raises RequestError at the first prompt that is wrong.

    `request_id` is unique over the life of the process.
    """
    prompts = yield from encode_texts(asked, model)
    return [
        GenerationRequest(
            request_id=f"{request_id}-{index}",
            prompt=EncodedPrompt.of(f"{request_id}-{index}", prompt.token_ids),
            sampling=NOTHING,
            tenant=tenant,
            body_id=request_id,
            task="embed",
        )
        for index, prompt in enumerate(prompts)
    ]


def encode_texts(asked: AskedPrompts, model: ServedModel) -> Steps[list[PreparedPrompt]]:
    """Return, in steps, the tokens of prompts that are to be embedded, after all checks of `prepare_vectors`."""
    if "embed" not in model.ready.tasks:
        raise RequestError("this model makes no vectors", param="model", code="unsupported_task")
    prompts, max_model_len = [], model.ready.max_model_len
    for given in asked.prompts:
        prompt = yield from encode_within_context(given, asked, model, max_model_len)
        if len(prompt.token_ids) > max_model_len:
            reason = f"an input has {len(prompt.token_ids)} tokens"
            raise context_length_exceeded(max_model_len, reason, asked.names.prompt)
        prompts.append(PreparedPrompt(None, prompt.token_ids))
        yield
    return prompts


def check_dimensions(dimensions: int | None, ready: Ready) -> None:
    """Raise RequestError if vectors of this model cannot be shortened to `dimensions`."""
    if dimensions is not None and dimensions > ready.embedding_size:
        message = f"dimensions is {dimensions}: vectors of this model have {ready.embedding_size}"
        raise RequestError(message, param="dimensions", code="invalid_value")


def shortened(embedding: bytes, dimensions: int | None) -> bytes:
    """Return the first `dimensions` numbers of a vector, float32, made of length 1 again; None: the vector as it is."""
    if dimensions is None:
        return embedding
    vector = np.frombuffer(embedding, np.float32)[:dimensions]
    length = np.linalg.norm(vector)
    return (vector / length if length else vector).astype(np.float32).tobytes()


def numbers(embedding: bytes) -> list[float]:
    """Return the numbers of a vector of float32."""
    unpacked = array("f")
    unpacked.frombytes(embedding)
    return unpacked.tolist()
