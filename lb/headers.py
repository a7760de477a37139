"""Which headers cross the proxy. Pure functions over case-insensitive multi-dicts; values are never changed.

- Hop-by-hop headers (RFC 9110 §7.6.1) and those that `Connection` lists stay on their hop.
- `Host` is preserved: what stands behind is the user's own application, and frameworks compare `Origin` with
  it. A target addressed by https gets its own name, since TLS terminators route on it.
- `X-Forwarded-For` is appended to, `X-Forwarded-Proto` and `X-Forwarded-Host` are set where a proxy before us
  has not set them. `X-Request-Id` is kept or created.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from multidict import CIMultiDict

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "expect",  # answered by this hop, which buffers the body
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_HANDSHAKE = (
    "Sec-WebSocket-Key",
    "Sec-WebSocket-Version",
    "Sec-WebSocket-Extensions",
    "Sec-WebSocket-Protocol",
)
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A copy without what belongs to one connection only. Repeated headers stay repeated, in order."""
    listed = {
        name.strip().lower()
        for field, value in headers.items()
        if field.lower() == "connection"
        for name in value.split(",")
    }
    passed: CIMultiDict[str] = CIMultiDict()
    for field, value in headers.items():
        lowered = field.lower()
        if lowered not in _HOP_BY_HOP and lowered not in listed:
            passed.add(field, value)
    return passed


def to_target(
    headers: Mapping[str, str], *, peer: str | None, scheme: str, host: str, request_id: str
) -> CIMultiDict[str]:
    """The request headers a target gets, but for `Content-Length`, which is the buffered body's."""
    passed = end_to_end(headers)
    passed.popall("Content-Length", None)
    passed["Host"] = host
    if peer:
        before = passed.popall("X-Forwarded-For", [])
        passed["X-Forwarded-For"] = ", ".join([*before, peer])
    passed.setdefault("X-Forwarded-Proto", scheme)
    passed.setdefault("X-Forwarded-Host", host)
    passed["X-Request-Id"] = request_id
    return passed


def without_handshake(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    """For a WebSocket: either side of the proxy shakes hands for itself."""
    passed = headers.copy()
    for name in _HANDSHAKE:
        passed.popall(name, None)
    return passed


def wants_websocket(headers: Mapping[str, str]) -> bool:
    tokens = {token.strip().lower() for token in headers.get("Connection", "").split(",")}
    return "upgrade" in tokens and headers.get("Upgrade", "").lower() == "websocket"


def sane_request_id(value: str | None) -> str | None:
    """The client's request id if it is short and printable, else None."""
    return value if value and _SANE_ID.fullmatch(value) else None
