"""What travels with a request that one agent forwards to another: one header line. Pure.

It is believed on the port for peers and nowhere else. Its own region has charged the request to its API key, so a peer
neither checks keys nor counts it as demand.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

HEADER = b"X-SkyServe-Hop"
NAME = b"hop"  # as `lb.http.request_head` names it
FULL = b'"region_full"'  # in the response of a peer that has no room, and has started nothing
_LONGEST_S = 86_400.0
_PASSED_ON = (b"policy", b"session", b"continue")


class HopError(ValueError):
    """A header line that cannot be understood."""


class RequestHop(NamedTuple):
    """`age_s` since the request entered its own region, `left_s` until it must have its first byte. `tenant` owns its key."""

    age_s: float
    left_s: float
    weight: float = 1.0
    tenant: str = ""


def hop_lines(hop: RequestHop, ours: dict[bytes, bytes]) -> bytes:
    """Return the header lines for a peer; `ours` are those that the client meant for the load balancer."""
    tenant = quote_from_bytes(hop.tenant.encode("utf-8", "surrogateescape"), safe="")
    value = (
        f"age={max(0.0, hop.age_s):.3f};left={max(0.0, hop.left_s):.3f};weight={hop.weight:g};tenant={tenant}"
    )
    lines = HEADER + b": " + value.encode("ascii") + b"\r\n"
    for name in _PASSED_ON:
        if name in ours:
            lines += b"X-SkyServe-" + name.capitalize() + b": " + ours[name] + b"\r\n"
    return lines


def read_hop(value: bytes) -> RequestHop:
    """Return what a peer says of a request. Raises HopError."""
    said = dict(part.partition(b"=")[::2] for part in value.split(b";"))
    try:
        age_s, left_s, weight = (float(said[name]) for name in (b"age", b"left", b"weight"))
        tenant = unquote_to_bytes(said[b"tenant"]).decode("utf-8", "surrogateescape")
    except (KeyError, ValueError):
        raise HopError("the hop of a forwarded request is malformed") from None
    is_sound = isfinite(age_s) and 0.0 <= left_s <= _LONGEST_S and 0.0 < weight < 1e6 and len(tenant) <= 512
    if not is_sound:
        raise HopError("the hop of a forwarded request is out of bounds")
    return RequestHop(max(0.0, age_s), left_s, weight, tenant)
