"""Web pages and the engine: what a browser receives, also where the engine rejects the request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from skyserve_cli.engine.cors import WrongOrigin, cors_for
from tests.integration.engine_harness import USER, Engine, serving

PAGE = "http://127.0.0.1:3000"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with serving(cors=cors_for([PAGE]), max_body_bytes=4096) as one:
        yield one


async def head(engine: Engine, method: str, path: str, **options: Any) -> tuple[int, dict[str, list[str]]]:
    """Status and CORS headers of a response that is read to its end."""
    async with engine.http.request(method, engine.url + path, **options) as response:
        await response.read()
        found: dict[str, list[str]] = {}
        for name, value in response.headers.items():
            if name == "Vary" or name.startswith("Access-Control-"):
                found.setdefault(name, []).append(value)
        return response.status, found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nothing/here"])
async def test_a_preflight_is_allowed_on_every_path(engine: Engine, path: str) -> None:
    assert await head(engine, "OPTIONS", path, headers=PREFLIGHT) == (
        204,
        {
            "Vary": ["Origin, Access-Control-Request-Headers"],
            "Access-Control-Allow-Origin": [PAGE],
            "Access-Control-Allow-Methods": ["GET, POST, DELETE"],
            "Access-Control-Allow-Headers": [PREFLIGHT["Access-Control-Request-Headers"]],
            "Access-Control-Max-Age": ["600"],
        },
    )


async def test_a_preflight_of_another_page_is_rejected(engine: Engine) -> None:
    headers = PREFLIGHT | {"Origin": "http://127.0.0.1:3001"}
    async with engine.http.options(engine.url + "/v1/models", headers=headers) as response:
        assert response.status == 403
        assert (await response.json())["error"]["code"] == "cors_rejected"
    assert await head(engine, "OPTIONS", "/v1/models", headers=headers) == (403, {"Vary": ["Origin"]})


CHAT = {"messages": [USER], "max_tokens": 2}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        pytest.param("GET", "/v1/models", None, 200, id="models"),
        pytest.param("POST", "/v1/chat/completions", CHAT, 200, id="a chat"),
        pytest.param("POST", "/v1/chat/completions", CHAT | {"stream": True}, 200, id="a stream"),
        pytest.param("POST", "/v1/chat/completions", CHAT | {"model": "b"}, 404, id="another model"),
        pytest.param("POST", "/v1/chat/completions", {}, 400, id="a wrong body"),
        pytest.param("POST", "/v1/completions", {"prompt": "a" * 5000}, 413, id="too large a body"),
        pytest.param("GET", "/v1/nothing", None, 404, id="no such path"),
        pytest.param("GET", "/v1/completions", None, 405, id="another method"),
    ],
)
async def test_a_page_may_read_every_response(
    engine: Engine, method: str, path: str, body: Any, status: int
) -> None:
    allowed = {
        "Vary": ["Origin"],
        "Access-Control-Allow-Origin": [PAGE],
        "Access-Control-Expose-Headers": ["X-Request-Id, Retry-After"],
    }
    assert await head(engine, method, path, json=body, headers={"Origin": PAGE}) == (status, allowed)
    for headers in ({"Origin": "http://localhost:3000"}, {}):
        assert await head(engine, method, path, json=body, headers=headers) == (status, {"Vary": ["Origin"]})


async def test_an_error_of_the_engine_itself_may_be_read() -> None:
    clock = iter([0.0])  # read once at the start; the first request finds it broken
    async with serving(cors=cors_for([PAGE]), unix_time_s=clock.__next__) as engine:
        status, found = await head(
            engine, "POST", "/v1/completions", json={"prompt": "a"}, headers={"Origin": PAGE}
        )
    assert status == 500
    assert found["Access-Control-Allow-Origin"] == [PAGE]


async def test_a_star_allows_all_and_without_the_option_nothing_is_said() -> None:
    async with serving(cors=cors_for(["*"])) as engine:
        _, found = await head(engine, "GET", "/v1/models")
        assert found["Access-Control-Allow-Origin"] == ["*"]
    async with serving(cors=cors_for([])) as engine:
        assert await head(engine, "OPTIONS", "/v1/models", headers=PREFLIGHT) == (405, {})
        assert await head(engine, "GET", "/v1/models", headers={"Origin": PAGE}) == (200, {})


def test_a_wrong_origin_says_what_is_expected() -> None:
    with pytest.raises(WrongOrigin, match=r"origins\[1\]: expected .*https://example.com"):
        cors_for([PAGE, "example.com"])
