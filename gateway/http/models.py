"""GET /v1/models and /v1/models/{id}."""

from starlette.requests import Request
from starlette.responses import Response

from octavo.gateway.http.service import Service
from octavo.gateway.openai.answer_types import ModelCard, ModelList, encode


async def list_models(request: Request) -> Response:
    service: Service = request.state.service
    return _json(ModelList([_model(service, name) for name in service.model_names]))


async def show_model(request: Request) -> Response:
    """Return one model; its id may contain slashes."""
    service: Service = request.state.service
    return _json(_model(service, service.model_name(request.path_params["id"])))


def _model(service: Service, name: str) -> ModelCard:
    ready = service.engine.ready
    return ModelCard(
        id=name,
        created=service.files.created_s,
        owned_by="octavo",
        root=str(service.files.directory),
        parent=None,
        max_model_len=ready.max_model_len if ready else None,
    )


def _json(answer: ModelCard | ModelList) -> Response:
    return Response(encode(answer), media_type="application/json")
