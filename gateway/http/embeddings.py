"""The route that makes vectors of texts."""

import asyncio
from functools import partial

from starlette.responses import Response

from octavo.gateway.asking.asked import AskedPrompts
from octavo.gateway.asking.choices import Choices
from octavo.gateway.asking.vectors import check_dimensions, encode_texts, prepare_vectors
from octavo.gateway.http.door import ArrivedRequest, Door, route_through
from octavo.gateway.http.service import new_response_id
from octavo.gateway.measuring.metrics import observers
from octavo.gateway.openai.embeddings import EmbeddingRequest, ask_embeddings, embedding_decoder, write_embeddings

EMBEDDINGS = Door(name="embeddings", decoder=embedding_decoder, ask=ask_embeddings, prepare=encode_texts)


async def _answer(body: EmbeddingRequest, asked: AskedPrompts, arrival: ArrivedRequest) -> Response:
    service = arrival.service
    model, ready = service.model_name(body.model), service.ready()
    check_dimensions(body.dimensions, ready)
    preparing = prepare_vectors(asked, service.model(ready), new_response_id("embd"), arrival.tenant)
    requests = await service.encodings.run(preparing)
    body.forget_prompt()
    arrival.place.give_back()
    observe = partial(observers, service.metrics, arrival.arrived_s)
    choices = await Choices.start(service.engine, requests, n=1, observe=observe)
    try:
        answers = await choices.collect()
    finally:
        choices.close()
    embeddings = [answer.whole.embedding for answer in answers]
    content = await asyncio.to_thread(write_embeddings, body, model, embeddings, choices.used_tokens())
    return Response(content, media_type="application/json")


embed = route_through(EMBEDDINGS, _answer)
