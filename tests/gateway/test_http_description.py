"""GET /openapi.json and /docs: all that is answered is described, nothing that is refused, and no network is needed."""

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi.openapi.models import OpenAPI
from jsonschema import Draft202012Validator

from octavo.gateway.http.app import ROUTES
from octavo.gateway.http.auth import PUBLIC_PATHS
from octavo.gateway.http.docs_page import docs_page
from octavo.gateway.http.endpoints import ENDPOINTS
from octavo.gateway.http.openapi import openapi
from octavo.gateway.openai.neutral import neutral_values
from octavo.gateway.openai.types import ChatMessage, StreamOptions, TextPart
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import MODEL, Served, chat, completion, serving

BODIES = [endpoint.body for endpoint in ENDPOINTS if endpoint.body] + [ChatMessage, TextPart, StreamOptions]

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def document_of(served: Served) -> Any:
    response = await served.http.get("/openapi.json")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    return response.json()


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a document."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from parts(each)


def found(document: Any, reference: str) -> Any:
    assert reference.startswith("#/")
    for name in reference.removeprefix("#/").split("/"):
        document = document[name]
    return document


def check(document: Any, kind: str, value: Any) -> None:
    """Fail unless `value` is as the document says, and has no field that the document lacks."""
    schema = {"$ref": f"#/components/schemas/{kind}", "components": document["components"]}
    Draft202012Validator(schema).validate(value)
    assert value.keys() <= document["components"]["schemas"][kind]["properties"].keys()


async def test_the_document_is_valid(served: Served) -> None:
    document = await document_of(served)
    OpenAPI.model_validate(document)
    references = [part["$ref"] for part in parts(document) if "$ref" in part]
    assert len(references) > 50
    assert all(found(document, reference) for reference in references)
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations) == len(ROUTES)


async def test_every_route_is_described(served: Served) -> None:
    document = await document_of(served)
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    routes = {(route.path.replace(":path", ""), method) for route in ROUTES for method in route.methods - {"HEAD"}}
    assert described == routes
    assert document["paths"]["/v1/models/{id}"]["get"]["parameters"][0]["name"] == "id"


@pytest.mark.parametrize("kind", BODIES)
async def test_every_field_is_described_or_refused(served: Served, kind: type[msgspec.Struct]) -> None:
    described = (await document_of(served))["components"]["schemas"][kind.__name__]["properties"]
    tags = {"type"} if kind is TextPart else set()
    assert described.keys() == set(kind.__struct_fields__) - neutral_values(kind).keys() | tags
    assert all(schema["description"] for schema in described.values())


async def test_what_is_refused_by_name_is_not_shown(served: Served) -> None:
    content = (await served.http.get("/openapi.json")).text + (await served.http.get("/docs")).text
    for name in ("bad_words", "functions", "prediction", "web_search_options"):
        assert (await served.post("/v1/chat/completions", chat() | {name: ["x"]})).status_code == 400
        assert name not in content


async def test_what_is_asked_and_answered_is_as_described(served: Served) -> None:
    document = await document_of(served)
    sent = [
        ("/v1/chat/completions", chat(logprobs=True, top_logprobs=2, n=2), "ChatRequest", "ChatCompletion"),
        ("/v1/chat/completions", chat([{"type": "text", "text": "hi"}], stop=["q"]), "ChatRequest", "ChatCompletion"),
        ("/v1/completions", completion(["a", "b"], logprobs=2, echo=True), "CompletionRequest", "Completion"),
        ("/v1/completions", completion([[1], [2, 3]]), "CompletionRequest", "Completion"),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}, "TokenizeRequest", "TokenizeAnswer"),
        ("/tokenize", {"messages": chat()["messages"]}, "TokenizeRequest", "TokenizeAnswer"),
        ("/detokenize", {"tokens": [1, 2]}, "DetokenizeRequest", "DetokenizeAnswer"),
    ]
    for path, body, asked, answered in sent:
        response = await served.post(path, body)
        assert response.status_code == 200, response.text
        check(document, asked, body)
        check(document, answered, response.json())
    pages = {"/v1/models": "ModelList", f"/v1/models/{MODEL}": "ModelCard", "/health": "Status", "/version": "Version"}
    for path, kind in pages.items():
        check(document, kind, (await served.http.get(path)).json())
    check(document, "ErrorAnswer", (await served.http.get("/nothing")).json())


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", chat(logprobs=True), "ChatCompletionChunk"),
        ("/v1/completions", completion(logprobs=1), "CompletionChunk"),
    ],
)
async def test_chunks_are_as_described(served: Served, path: str, body: dict[str, Any], kind: str) -> None:
    document = await document_of(served)
    for options in ({}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}):
        chunks = await served.stream(path, body | options)
        assert len(chunks) > 1
        for chunk in chunks:
            check(document, kind, chunk)
        assert ("usage" in chunks[-1]) == bool(options)


async def test_the_document_says_which_routes_need_a_key(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler, api_key=("sk-one",)) as served:
        document = await document_of(served)
        assert "X-Api-Key" in (await served.http.get("/docs")).text
    assert document["security"] == [{"bearer": []}, {"key": []}]
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation.get("security", "a key") == ([] if path in PUBLIC_PATHS else "a key")
            assert ("401" in operation["responses"]) == (path not in PUBLIC_PATHS)


async def test_without_keys_none_is_needed(served: Served) -> None:
    assert {} in (await document_of(served))["security"]
    assert "No key is needed" in (await served.http.get("/docs")).text


async def test_the_page_shows_all_and_fetches_nothing(served: Served) -> None:
    response = await served.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    page, document = response.text, await document_of(served)
    for name in [*document["paths"], *document["components"]["schemas"], "temperature"]:
        assert name in page
    assert not re.search(r"<script|<link|<img|<iframe|src=|style=|url\(|@import|https?:| on\w+=", page)
    targets = set(re.findall(r'id="([^"]+)"', page))
    links = re.findall(r'href="([^"]+)"', page)
    assert {link for link in links if not link.startswith("#")} == {"openapi.json"}
    assert {link.removeprefix("#") for link in links if link.startswith("#")} <= targets


async def test_a_browser_may_take_nothing_but_the_page_s_own_style(served: Served) -> None:
    response = await served.http.get("/docs")
    [style] = re.findall("<style>(.*?)</style>", response.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_both_are_there_behind_a_proxy_s_path(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler, root_path="/llm") as served:
        page = await served.http.get("/llm/docs")
        assert page.status_code == 200
        document = await served.http.get(page.url.join("openapi.json"))
        assert str(document.url).endswith("/llm/openapi.json")
        assert document.json()["servers"] == [{"url": "/llm"}]
        assert (await served.http.get("/docs")).text == page.text


async def test_words_of_the_document_are_no_html_of_the_page() -> None:
    document = openapi(ENDPOINTS, "", has_keys=False)
    document["info"]["description"] = "<script>1 & 2</script>"
    document["components"]["schemas"]["Version"]["properties"]["<i>"] = {"enum": ["<b>"], "description": '"<u>'}
    page = docs_page(document)
    assert "&lt;script&gt;1 &amp; 2&lt;/script&gt;" in page
    assert not re.search("<script|<i>|<b>|<u>", page)
