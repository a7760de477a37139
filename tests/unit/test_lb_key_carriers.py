"""Keys among the subprotocols of a WebSocket and in a query: found, and taken out."""

from __future__ import annotations

import pytest

from lb.http.key_carriers import (
    keys_in_query,
    keys_in_subprotocols,
    without_keys_in_query,
    without_keys_in_subprotocols,
)

REALTIME = b"realtime, openai-insecure-api-key.sk-1, openai-beta.realtime-v1"


@pytest.mark.parametrize(
    ("value", "keys", "left"),
    [
        (REALTIME, [b"sk-1"], b"realtime, openai-beta.realtime-v1"),
        (b"openai-insecure-api-key.sk-1", [b"sk-1"], None),
        (b" ,\topenai-insecure-api-key.sk-1 ,", [b"sk-1"], None),
        (b"OpenAI-Insecure-Api-Key.sk-1,b", [b"sk-1"], b"b"),
        (b"a,openai-insecure-api-key.x,b,openai-insecure-api-key.y", [b"x", b"y"], b"a, b"),
        (b"openai-insecure-api-key.", [b""], None),
        (b"a ,b,  openai-insecure-api-keyx", [], b"a ,b,  openai-insecure-api-keyx"),
        (b"", [], b""),
    ],
)
def test_keys_among_subprotocols(value: bytes, keys: list[bytes], left: bytes | None) -> None:
    assert keys_in_subprotocols(value) == keys
    lines = [b"Accept: */*", b"Sec-WebSocket-Protocol: " + value, b"X: openai-insecure-api-key.z, b"]
    kept = lines if left == value else [lines[0], b"Sec-WebSocket-Protocol: %b" % (left or b""), lines[2]]
    expected = b"\r\n".join(line for line in kept if left is not None or line != kept[1])
    assert without_keys_in_subprotocols(b"\r\n".join(lines)) == expected


def test_each_line_of_subprotocols_loses_its_keys() -> None:
    lines = b"sec-websocket-protocol:a,openai-insecure-api-key.k\r\nSEC-WEBSOCKET-PROTOCOL: openai-insecure-api-key.l"
    assert without_keys_in_subprotocols(lines) == b"sec-websocket-protocol: a"


@pytest.mark.parametrize(
    ("target", "keys", "left"),
    [
        (b"/v1/models?api_key=sk-1", [b"sk-1"], b"/v1/models"),
        (b"/v1/models?a=1&api_key=sk-1&b=2", [b"sk-1"], b"/v1/models?a=1&b=2"),
        (b"/x?api_key=sk%2D1%2B+&x", [b"sk-1++"], b"/x?x"),
        (b"/x?api%5Fkey=k", [b"k"], b"/x"),
        (b"/x?api_key=k&api_key=l", [b"k", b"l"], b"/x"),
        (b"/x?api_key", [b""], b"/x"),
        (b"/x?my_api_key=k&API_KEY=k", [], b"/x?my_api_key=k&API_KEY=k"),
        (b"/x?a=api_key=k", [], b"/x?a=api_key=k"),
        (b"/x?a=%zz&%=1", [], b"/x?a=%zz&%=1"),
        (b"/x", [], b"/x"),
    ],
)
def test_keys_in_a_query(target: bytes, keys: list[bytes], left: bytes) -> None:
    assert keys_in_query(target) == keys
    assert without_keys_in_query(target) == left
