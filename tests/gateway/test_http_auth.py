"""Keys: every route but the public one needs one, however it is spelled."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from octavo.gateway.http.app import ROUTES
from octavo.gateway.http.auth import PUBLIC_PATHS
from octavo.protocol.messages import Submit
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.gateway_server import Served, chat, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = ("sk-one", "schlüssel")


@pytest_asyncio.fixture(loop_scope="module")
async def guarded(tiny_model: Path, scheduler: FakeScheduler) -> AsyncIterator[Served]:
    async with serving(tiny_model, scheduler, api_key=KEYS) as served:
        yield served


def with_token(token: str) -> dict[str, bytes]:
    return {"authorization": b"Bearer " + token.encode()}


async def test_every_route_and_method_wants_a_key(guarded: Served) -> None:
    paths = [route.path.replace("{id:path}", "x/y") for route in ROUTES if route.path not in PUBLIC_PATHS]
    spelled = [*paths, "/", "/nothing", "//v1/models", "/V1/models", "/v1/models/", "/%761/models", "/v1%2fmodels"]
    spelled += ["/health/", "/health/../v1/models", "//health", "/HEALTH", "/health%2f..%2fv1/models"]
    for path in spelled:
        for method in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"):
            request = guarded.http.build_request(method, "/")
            request.url = request.url.copy_with(raw_path=path.encode())
            response = await guarded.http.send(request)
            assert (response.status_code, response.headers.get("www-authenticate")) == (401, "Bearer"), (method, path)
            if method != "HEAD":
                assert response.json()["error"]["type"] == "authentication_error"
    assert not guarded.scheduler.messages(Submit)


@pytest.mark.parametrize("path", ["/health", "/live", "/openapi.json", "/docs"])
async def test_probes_and_descriptions_are_public(guarded: Served, path: str) -> None:
    assert (await guarded.http.get(path)).status_code == 200
    assert (await guarded.http.get(path, headers=with_token("wrong"))).status_code == 200


@pytest.mark.parametrize("key", KEYS)
async def test_a_key_opens(guarded: Served, key: str) -> None:
    assert (await guarded.http.get("/v1/models", headers=with_token(key))).status_code == 200
    lower = {"authorization": b"bearer " + key.encode()}
    assert (await guarded.http.get("/v1/models", headers=lower)).status_code == 200


@pytest.mark.parametrize(
    "value",
    ["Bearer", "Bearer sk-on", "Bearer SK-ONE", "Bearer sk-one,schlüssel", "sk-one", "Basic sk-one"],
)
async def test_other_tokens_do_not(guarded: Served, value: str) -> None:
    headers = {"authorization": value.encode()}
    response = await guarded.http.get("/v1/models", headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


async def test_a_key_is_compared_as_utf_8(guarded: Served) -> None:
    headers = {"authorization": "Bearer schlüssel".encode("latin-1")}
    assert (await guarded.http.get("/v1/models", headers=headers)).status_code == 401


async def test_each_key_is_a_tenant_of_its_own(guarded: Served) -> None:
    for key in KEYS:
        response = await guarded.http.post("/v1/chat/completions", json=chat(), headers=with_token(key))
        assert response.status_code == 200
    first, second = (submit.tenant for submit in guarded.scheduler.messages(Submit))
    assert len({first, second, ""}) == 3
    assert not any(key in first + second for key in KEYS)


async def test_without_keys_any_token_or_none_will_do(served: Served) -> None:
    for headers in ({}, with_token("EMPTY"), {"authorization": b"nonsense"}):
        response: httpx.Response = await served.http.post("/v1/chat/completions", json=chat(), headers=headers)
        assert response.status_code == 200
    assert [submit.tenant for submit in served.scheduler.messages(Submit)] == ["", "", ""]
