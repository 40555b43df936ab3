"""Pages of other sites: a browser lets them send to any server, so that the server has to refuse them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from octavo.protocol.messages import Submit
from octavo.protocol.settings.loading import load_config
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import Served, chat, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
APP = "https://app.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
JSON = {"content-type": "application/json"}


@pytest_asyncio.fixture(loop_scope="module")
async def open_to_app(tiny_model: Path, scheduler: FakeScheduler) -> AsyncIterator[Served]:
    async with serving(tiny_model, scheduler, allowed_origins=(APP, "app://obsidian.md"), api_key=("k",)) as served:
        yield served


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_body_of_another_type_is_refused_and_the_message_says_which(
    served: Served, path: str, kind: str
) -> None:
    response = await served.post(path, chat(), **{"content-type": kind})
    assert response.status_code == 415
    error = response.json()["error"]
    assert error["code"] == "unsupported_content_type"
    assert "Content-Type: application/json" in error["message"]
    assert not served.scheduler.messages(Submit)


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", "application/json;x"]
)
async def test_json_types_pass(served: Served, kind: str) -> None:
    assert (await served.post(CHAT, chat(), **{"content-type": kind})).status_code == 200


async def test_a_type_may_lack_where_no_page_sends(served: Served) -> None:
    assert (await served.post(CHAT, chat())).status_code == 200
    response = await served.post(CHAT, chat(), origin=served.url)  # a Blob without a type
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_content_type")


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "",
        "http://127.0.0.1",
        "http://127.0.0.1:1",
        "http://localhost:3000",
        "http://[",
        "http://127.0.0.1:99999999",
        "file://",
        "é",
    ],
)
async def test_pages_of_other_sites_are_refused(served: Served, origin: str) -> None:
    headers = {**JSON, "origin": origin.encode()}
    response = await served.http.post(CHAT, json=chat(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    message = response.json()["error"]["message"]
    named = message.partition("start it with --allowed-origins ")[2].removesuffix(" to let them").strip("'")
    assert load_config({}, {"allowed_origins": [named]}).allowed_origins
    for path in ("/v1/models", "/health", "/metrics", "/nothing"):
        assert (await served.http.get(path, headers=headers)).status_code == 403
    preflight = await served.http.options(CHAT, headers={**headers, **PREFLIGHT})
    assert preflight.status_code == 403
    assert not any(name.startswith("access-control-") for name in preflight.headers)
    assert not served.scheduler.messages(Submit)


async def test_a_page_of_the_server_s_own_address_passes(served: Served) -> None:
    assert (await served.post(CHAT, chat(), **JSON, origin=served.url)).status_code == 200
    headers = {**JSON, "host": "localhost", "origin": "http://localhost:80"}
    assert (await served.post(CHAT, chat(), **headers)).status_code == 200
    behind_tls = {**JSON, "host": "10.0.0.1", "origin": "https://10.0.0.1"}
    assert (await served.post(CHAT, chat(), **behind_tls)).status_code == 200


async def test_a_foreign_name_that_leads_here_is_no_proof(served: Served) -> None:
    rebound = {**JSON, "host": "evil.example:8000", "origin": "http://evil.example:8000"}
    assert (await served.post(CHAT, chat(), **rebound)).status_code == 403


async def test_with_a_key_a_page_of_the_same_name_passes(open_to_app: Served) -> None:
    headers = {**JSON, "host": "llm.example", "origin": "https://llm.example", "authorization": "Bearer k"}
    assert (await open_to_app.post(CHAT, chat(), **headers)).status_code == 200


@pytest.mark.parametrize("origin", [APP, "app://obsidian.md"])
async def test_a_preflight_of_an_allowed_page_is_answered_without_a_key(open_to_app: Served, origin: str) -> None:
    response = await open_to_app.http.options(CHAT, headers={"origin": origin, **PREFLIGHT})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_allowed_page_may_read_answers_and_their_id(open_to_app: Served, stream: bool) -> None:
    for key, status in (("k", 200), ("wrong", 401)):
        headers = {**JSON, "origin": APP, "authorization": f"Bearer {key}"}
        response = await open_to_app.post(CHAT, chat(stream=stream), **headers)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, APP)
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]


async def test_a_star_lets_every_page_in(tiny_model: Path, scheduler: FakeScheduler) -> None:
    async with serving(tiny_model, scheduler, allowed_origins=("*",)) as served:
        response = await served.post(CHAT, chat(), **JSON, origin="null")
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "*")
