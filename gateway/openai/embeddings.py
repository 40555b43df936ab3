"""Embeddings: the bodies and answers of `/v1/embeddings`."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octavo.gateway.asking.asked import AskedPrompts, FieldNames, PromptText, PromptTokens
from octavo.gateway.asking.choices import UsedTokens
from octavo.gateway.asking.vectors import numbers, shortened
from octavo.gateway.openai.answer_types import encode
from octavo.gateway.openai.completions import split_prompts
from octavo.gateway.openai.neutral import Unsupported, refuse_unsupported
from octavo.gateway.openai.types import ModelRequest, Prompt

MAX_INPUTS = 2048


class EmbeddingRequest(ModelRequest, kw_only=True):
    """A body of `/v1/embeddings`."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None

    user: str | None = None  # advisory

    messages: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    embed_dtype: Unsupported = None
    endianness: Unsupported = None

    def forget_prompt(self) -> None:
        self.input = ""

    def forget_advice(self) -> None:
        self.user = None


class Embedding(msgspec.Struct, tag_field="object", tag="embedding"):
    index: int
    embedding: list[float] | str  # base64 of float32, if the body asks for it


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, tag_field="object", tag="list"):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)


def ask_embeddings(body: EmbeddingRequest) -> AskedPrompts:
    """Return the texts of the body. Raises RequestError for faults that decoding by type cannot find."""
    refuse_unsupported(body)
    return AskedPrompts(prompts=_prompts(body), names=FieldNames(prompt="input"))


def _prompts(body: EmbeddingRequest) -> Iterator[PromptText | PromptTokens]:
    adds = body.add_special_tokens is not False
    for given in split_prompts(body.input, name="input", most=MAX_INPUTS):
        yield PromptText(given, adds) if isinstance(given, str) else PromptTokens(given)


def write_embeddings(body: EmbeddingRequest, model: str, embeddings: Sequence[bytes], used: UsedTokens) -> bytes:
    """Return the answer. It can be long: call this in a thread.

    Each vector is encoded by itself, so that the thread lets go of the interpreter in between.
    """
    data = b",".join(encode(_embedding(body, index, vector)) for index, vector in enumerate(embeddings))
    rest = encode(EmbeddingList([], model, EmbeddingUsage(used.prompt, used.prompt)))
    head, tail = rest.split(b"[]", 1)
    return b"".join([head, b"[", data, b"]", tail])


def _embedding(body: EmbeddingRequest, index: int, vector: bytes) -> Embedding:
    vector = shortened(vector, body.dimensions)
    return Embedding(index, b64encode(vector).decode() if body.encoding_format == "base64" else numbers(vector))
