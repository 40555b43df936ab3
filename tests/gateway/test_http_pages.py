"""The small pages: models, health, version."""

from pathlib import Path

import pytest

from octavo.protocol.version import __version__
from tests.fakes.gateway_server import MODEL, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_models_are_listed_under_every_name(served: Served, tiny_model: Path) -> None:
    page = (await served.http.get("/v1/models")).json()
    assert page["object"] == "list"
    assert [model["id"] for model in page["data"]] == [MODEL, "alias"]
    assert page["data"][0] == {
        "object": "model",
        "id": MODEL,
        "created": int((tiny_model / "config.json").stat().st_mtime),
        "owned_by": "octavo",
        "root": str(tiny_model),
        "parent": None,
        "max_model_len": 512,
    }


async def test_a_model_is_found_by_a_name_with_slashes(served: Served) -> None:
    for path in (f"/v1/models/{MODEL}", "/v1/models/tiny%2Fmodel"):
        assert (await served.http.get(path)).json()["id"] == MODEL
    missing = await served.http.get("/v1/models/tiny/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_health_and_version(served: Served) -> None:
    assert (await served.http.get("/health")).json() == {"status": "ok"}
    assert (await served.http.head("/health")).status_code == 200
    assert (await served.http.get("/version")).json() == {"version": __version__}
