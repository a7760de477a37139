"""Which headers cross the proxy, as a table."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from lb.headers import end_to_end, sane_request_id, to_target, wants_websocket

HOP = ["Connection: keep-alive", "Keep-Alive: 5", "TE: trailers", "Trailer: X", "Transfer-Encoding: chunked",
       "Upgrade: h2c", "Proxy-Authorization: x", "Proxy-Authenticate: x", "proxy-connection: x", "Expect: 100-continue"]  # fmt: skip


def of(*lines: str) -> CIMultiDict[str]:
    return CIMultiDict(tuple(line.split(": ", 1)) for line in lines)


@pytest.mark.parametrize("line", HOP)
def test_hop_by_hop_headers_stay(line: str) -> None:
    assert list(end_to_end(of("A: 1", line))) == ["A"]


@pytest.mark.parametrize("connection", ["x-private", "close, X-PRIVATE", "X-Private , other"])
def test_what_connection_lists_stays_too(connection: str) -> None:
    assert list(end_to_end(of(f"Connection: {connection}", "X-Private: 1", "B: 2"))) == ["B"]


def test_repeated_headers_stay_repeated_in_order() -> None:
    assert end_to_end(of("Set-Cookie: a", "X: y", "Set-Cookie: b")).getall("set-cookie") == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ([], "X-Forwarded-For", ["9.9.9.9"]),
        (
            ["X-Forwarded-For: 1.1.1.1", "X-Forwarded-For: 2.2.2.2"],
            "X-Forwarded-For",
            ["1.1.1.1, 2.2.2.2, 9.9.9.9"],
        ),
        ([], "X-Forwarded-Proto", ["http"]),
        (["X-Forwarded-Proto: https"], "X-Forwarded-Proto", ["https"]),
        (["X-Forwarded-Host: outer"], "X-Forwarded-Host", ["outer"]),
        (["X-Request-Id: theirs"], "X-Request-Id", ["ours"]),
        (["Content-Length: 3"], "Content-Length", []),
        (["Host: other"], "Host", ["h:1"]),
    ],
)
def test_what_a_target_is_told(given: list[str], name: str, expected: list[str]) -> None:
    passed = to_target(of(*given), peer="9.9.9.9", scheme="http", host="h:1", request_id="ours")
    assert passed.getall(name, []) == expected


@pytest.mark.parametrize(
    ("value", "sane"),
    [
        ("abc-1", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        (None, False),
        ("a b", False),
        ("ä", False),
    ],
)
def test_request_ids(value: str | None, sane: bool) -> None:
    assert sane_request_id(value) == (value if sane else None)


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["Connection: Upgrade", "Upgrade: WebSocket"], True),
        (["Connection: keep-alive, upgrade", "Upgrade: websocket"], True),
        (["Connection: keep-alive", "Upgrade: websocket"], False),
        (["Connection: Upgrade", "Upgrade: h2c"], False),
        ([], False),
    ],
)
def test_websocket_handshakes(lines: list[str], wanted: bool) -> None:
    assert wants_websocket(of(*lines)) == wanted
