"""Places of a key that are not headers of their own: subprotocols of a WebSocket, and the query. Pure.

Pages cannot set headers of a WebSocket, so OpenAI's clients for browsers offer the key as a subprotocol:
`Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.KEY, openai-beta.realtime-v1`. Targets get the other ones. They choose
among what they get, so a client never gets one that it did not offer.

A query (`?api_key=KEY`) ends up in logs and histories; keys in it are read only where that is turned on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote_to_bytes

SUBPROTOCOLS: Final = b"sec-websocket-protocol"
QUERY: Final = (
    b"?api_key"  # stands for the query where carriers of keys are named; no header can be called so
)
_ITEM: Final = b"openai-insecure-api-key."
_ITEM_SIZE: Final = len(_ITEM)
_PARAMETER: Final = b"api_key"


def keys_in_subprotocols(value: bytes) -> list[bytes]:
    """Return the keys in the value of a header line."""
    items = (item.strip(b" \t") for item in value.split(b","))
    return [item[_ITEM_SIZE:] for item in items if item[:_ITEM_SIZE].lower() == _ITEM]


def without_keys_in_subprotocols(lines: bytes) -> bytes:
    """Return the header lines without keys among the subprotocols. A line of which nothing is left is gone."""
    kept: list[bytes] = []
    for line in lines.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == SUBPROTOCOLS:
            items = [item.strip(b" \t") for item in value.split(b",")]
            others = [item for item in items if item[:_ITEM_SIZE].lower() != _ITEM]
            if len(others) < len(items):
                if any(others):
                    kept.append(name + b": " + b", ".join(others))
                continue
        kept.append(line)
    return b"\r\n".join(kept)


def keys_in_query(target: bytes) -> list[bytes]:
    """Return the keys in the query of a request target."""
    parameters = target.partition(b"?")[2].split(b"&")
    return [unquote_to_bytes(one.partition(b"=")[2]) for one in parameters if _is_key(one)]


def without_keys_in_query(target: bytes) -> bytes:
    """Return the request target without the parameters that are for keys."""
    path, _, query = target.partition(b"?")
    kept = b"&".join(one for one in query.split(b"&") if not _is_key(one))
    return path + b"?" + kept if kept else path


def _is_key(parameter: bytes) -> bool:
    name = parameter.partition(b"=")[0]
    return name == _PARAMETER or (b"%" in name and unquote_to_bytes(name) == _PARAMETER)


def lines_of(credentials: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the header lines of what may be keys, each with its CRLF, without those of subprotocols."""
    return b"".join(b"%b: %b\r\n" % one for one in credentials if one[0] != SUBPROTOCOLS)
