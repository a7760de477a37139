"""The client that stays with the nearest endpoint and leaves one that fails, with real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from skyserve import nearest
from skyserve.nearest import FAILED_FOR_S, PATH, REFRESH_S, Nearest, NoEndpointError


class Balancer:
    """Lists `endpoints`, and says its name to anything else."""

    def __init__(self, name: str) -> None:
        self.endpoints: list[str] | None = []
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = name.encode()
                if self.path == PATH:
                    outer.asked += 1
                    rows = [{"url": url, "region": "r", "zones": []} for url in outer.endpoints or ()]
                    body = json.dumps({"service": "chat", "endpoints": rows}).encode()
                self.send_response(200 if self.path != PATH or outer.endpoints is not None else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def die(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Balancer, Balancer]]:
    """Two that know each other; the second is twice as far away."""
    near, far = Balancer("near"), Balancer("far")
    near.endpoints = far.endpoints = [far.url, near.url]
    measured = nearest.distance_s

    def distance_s(url: str) -> float | None:
        return None if measured(url) is None else {near.url: 0.05, far.url: 0.1}[url]

    monkeypatch.setattr(nearest, "distance_s", distance_s)
    yield near, far
    for one in (near, far):
        one.die()


def said(url: str) -> str:
    with urlopen(url + "/hello", timeout=5) as response:
        return str(response.read().decode())


def test_a_client_that_knows_one_endpoint_finds_the_nearest_and_stays(two: tuple[Balancer, Balancer]) -> None:
    near, far = two
    chat = Nearest(far.url + "/", clock=lambda: 0.0)
    assert [chat.call(said) for _ in range(3)] == ["near"] * 3
    assert far.asked + near.asked == 1


def test_the_list_is_read_again_after_a_while(two: tuple[Balancer, Balancer]) -> None:
    near, far = two
    now = [0.0]
    chat = Nearest(far.url, clock=lambda: now[0])
    assert chat.url == near.url
    near.endpoints = far.endpoints = [far.url]
    now[0] = REFRESH_S - 1
    assert chat.url == near.url
    now[0] = REFRESH_S
    assert chat.url == far.url


def test_a_call_moves_on_when_the_endpoint_dies_and_comes_back_later(two: tuple[Balancer, Balancer]) -> None:
    near, far = two
    now = [0.0]
    chat = Nearest(near.url, clock=lambda: now[0])
    assert chat.call(said) == "near"
    near.die()
    assert chat.call(said) == "far"
    assert chat.url == far.url
    now[0] = FAILED_FOR_S
    assert chat.url == near.url, "it is tried again"
    assert chat.call(said) == "far", "and left again"


def test_an_error_of_the_service_is_no_reason_to_move(two: tuple[Balancer, Balancer]) -> None:
    near, _ = two
    chat = Nearest(near.url, clock=lambda: 0.0)

    def refused(url: str) -> str:
        raise ValueError("429")

    with pytest.raises(ValueError, match="429"):
        chat.call(refused)
    assert chat.url == near.url


def test_without_a_list_the_given_endpoints_are_used(two: tuple[Balancer, Balancer]) -> None:
    near, far = two
    near.endpoints = far.endpoints = None
    assert Nearest(far.url, near.url, clock=lambda: 0.0).url == near.url
    assert Nearest(far.url, clock=lambda: 0.0).url == far.url


def test_when_nothing_can_be_reached_the_error_says_so(two: tuple[Balancer, Balancer]) -> None:
    near, far = two
    chat = Nearest(near.url, clock=lambda: 0.0)
    assert chat.url == near.url
    near.die()
    far.die()
    with pytest.raises(URLError):
        chat.call(said)
    with pytest.raises(NoEndpointError, match="no endpoint can be reached of http"):
        Nearest(near.url, clock=lambda: 0.0).call(said)
    with pytest.raises(ValueError, match="one endpoint"):
        Nearest()
