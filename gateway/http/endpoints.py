"""All that the server answers."""

from typing import Any

from octavo.gateway.anthropic.types import CountRequest, Message, MessageEvent, MessagesRequest, TokenCount
from octavo.gateway.http.description import show_docs, show_openapi
from octavo.gateway.http.embeddings import embed
from octavo.gateway.http.endpoint import BODY_ERRORS, Endpoint
from octavo.gateway.http.generate import CHAT, COMPLETIONS, generating_route
from octavo.gateway.http.messages import COUNT_TOKENS, MESSAGES
from octavo.gateway.http.models import list_models, show_model
from octavo.gateway.http.responses import RESPONSES
from octavo.gateway.http.status import (
    Load,
    ServerInfo,
    Status,
    Version,
    health,
    live,
    load,
    server_info,
    show_metrics,
    version,
)
from octavo.gateway.http.tokenization import DETOKENIZE, TOKENIZE, token_route
from octavo.gateway.openai.answer_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ModelCard,
    ModelList,
)
from octavo.gateway.openai.embeddings import EmbeddingList, EmbeddingRequest
from octavo.gateway.openai.tokenization import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from octavo.gateway.openai.types import ChatRequest, CompletionRequest
from octavo.gateway.responses.types import Response, ResponseEvent, ResponsesRequest

ENDPOINTS = (
    Endpoint(
        path="/v1/chat/completions",
        respond=generating_route(CHAT),
        summary="Answer a conversation, streamed or not",
        body=ChatRequest,
        answer=ChatCompletion,
        chunk=ChatCompletionChunk,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        path="/v1/completions",
        respond=generating_route(COMPLETIONS),
        summary="Complete texts, streamed or not",
        body=CompletionRequest,
        answer=Completion,
        chunk=CompletionChunk,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        path="/v1/responses",
        respond=generating_route(RESPONSES),
        summary="Answer a conversation, in the Responses API",
        body=ResponsesRequest,
        answer=Response,
        chunk=ResponseEvent,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        path="/v1/messages",
        respond=generating_route(MESSAGES),
        summary="Answer a conversation, in Anthropic's API",
        body=MessagesRequest,
        answer=Message,
        chunk=MessageEvent,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        path="/v1/messages/count_tokens",
        respond=token_route(COUNT_TOKENS),
        summary="Count the tokens of a conversation, in Anthropic's API",
        body=CountRequest,
        answer=TokenCount,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        path="/v1/embeddings",
        respond=embed,
        summary="Make vectors of texts",
        body=EmbeddingRequest,
        answer=EmbeddingList,
        errors=BODY_ERRORS,
    ),
    Endpoint(path="/v1/models", respond=list_models, summary="List the served names of the model", answer=ModelList),
    Endpoint(
        path="/v1/models/{id:path}",
        respond=show_model,
        summary="Show the model under one of its names, which may contain slashes",
        answer=ModelCard,
        errors=(404,),
    ),
    Endpoint(
        path="/tokenize",
        respond=token_route(TOKENIZE),
        summary="Turn a text or a conversation into tokens, as completions and chats count them",
        body=TokenizeRequest,
        answer=TokenizeAnswer,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        path="/detokenize",
        respond=token_route(DETOKENIZE),
        summary="Turn tokens into text",
        body=DetokenizeRequest,
        answer=DetokenizeAnswer,
        errors=BODY_ERRORS,
    ),
    Endpoint(
        path="/health",
        respond=health,
        summary="Say whether a request could make progress",
        answer=Status,
        errors=(503,),
    ),
    Endpoint(path="/live", respond=live, summary="Say that the gateway answers", answer=Status),
    Endpoint(path="/version", respond=version, summary="Say which Octavo this is", answer=Version),
    Endpoint(
        path="/ping", respond=health, summary="Say the same as /health, for SageMaker", answer=Status, errors=(503,)
    ),
    Endpoint(path="/load", respond=load, summary="Say how many requests this gateway has in flight", answer=Load),
    Endpoint(
        path="/server_info",
        respond=server_info,
        summary="Show the gateway's settings, without secrets",
        answer=ServerInfo,
    ),
    Endpoint(
        path="/metrics",
        respond=show_metrics,
        summary="Show metrics, for Prometheus",
        answer=str,
        media_type="text/plain",
    ),
    Endpoint(path="/openapi.json", respond=show_openapi, summary="Describe the API, in OpenAPI", answer=dict[str, Any]),
    Endpoint(
        path="/docs", respond=show_docs, summary="Show the description as a page", answer=str, media_type="text/html"
    ),
)
