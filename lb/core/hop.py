"""What travels with a request that one agent forwards to another, and with its response: a header line each. Pure.

It is believed on the port for peers and nowhere else. Its own region has charged the request to its API key, so a peer
neither checks keys nor counts it as demand.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

HEADER: Final = b"X-SkyServe-Hop"
NAME: Final = b"hop"  # as `lb.http.request_head` names it
FULL: Final = b'"region_full"'  # in the response of a peer that has no room, and has started nothing
_LONGEST_S: Final = 86_400.0
_MOST_ZONES: Final = 100
_LONGEST_CREDIT: Final = 40
_TIMES: Final = re.compile(rb"age=([0-9]{1,9}(?:\.[0-9]{1,6})?);left=([0-9]{1,9}(?:\.[0-9]{1,6})?);")
_SENDERS: Final = 1024  # of which the parts of the line that do not change are cached
_PASSED_ON: Final = (b"policy", b"session", b"continue")


class HopError(ValueError):
    """A header line that cannot be understood."""


class ReportId(NamedTuple):
    """The report number `seq` of an agent, of the process `boot`."""

    boot: int
    seq: int


NO_REPORT: Final = ReportId(0, 0)


class RequestHop(NamedTuple):
    """`age_s` since the request entered its own region, `left_s` until it must have its first byte. `tenant` owns its key.

    `zones` are those of its residency. Its stream may be resumed `breaks_left` times (None: as the peer's own streams).
    `peer` is the agent that forwarded it, which is known by its certificate and not written.
    """

    age_s: float
    left_s: float
    weight: float = 1.0
    tenant: str = ""
    zones: frozenset[str] = frozenset()
    breaks_left: int | None = None
    peer: str = ""


def hop_lines(hop: RequestHop, ours: dict[bytes, bytes]) -> bytes:
    """Return the header lines for a peer; `ours` are those that the client meant for the load balancer."""
    times = f"age={max(0.0, hop.age_s):.3f};left={max(0.0, hop.left_s):.3f};"
    sender = _sender(hop.weight, hop.tenant, hop.zones, hop.breaks_left)
    lines = HEADER + b": " + times.encode("ascii") + sender + b"\r\n"
    for name in _PASSED_ON:
        if name in ours:
            lines += b"X-SkyServe-" + name.capitalize() + b": " + ours[name] + b"\r\n"
    return lines


@lru_cache(maxsize=_SENDERS)
def _sender(weight: float, tenant: str, zones: frozenset[str], breaks_left: int | None) -> bytes:
    """Return the part of the line that many requests share."""
    value = f"weight={weight:g};tenant={_quoted(tenant)}"
    if zones:
        value += f";zones={','.join(_quoted(zone) for zone in sorted(zones))}"
    if breaks_left is not None:
        value += f";breaks={breaks_left}"
    return value.encode("ascii")


def read_hop(value: bytes) -> RequestHop:
    """Return what a peer reports of a request. Raises HopError."""
    times = _TIMES.match(value)
    if times is None:
        raise HopError("the hop of a forwarded request is malformed")
    age_s, left_s = float(times[1]), float(times[2])
    if left_s > _LONGEST_S:
        raise HopError("the hop of a forwarded request is out of bounds")
    return RequestHop(age_s, left_s, *_read_sender(value[times.end() :]))


@lru_cache(maxsize=_SENDERS)
def _read_sender(value: bytes) -> tuple[float, str, frozenset[str], int | None]:
    """Return weight, tenant, zones and breaks left. Raises HopError."""
    fields = dict(part.partition(b"=")[::2] for part in value.split(b";"))
    try:
        weight = float(fields[b"weight"])
        tenant = _unquoted(fields[b"tenant"])
        zones = frozenset(_unquoted(one) for one in fields.get(b"zones", b"").split(b",") if one)
        breaks_left = int(fields[b"breaks"]) if b"breaks" in fields else None
    except (KeyError, ValueError):
        raise HopError("the hop of a forwarded request is malformed") from None
    is_sound = 0.0 < weight < 1e6 and len(tenant) <= 512
    is_sound = is_sound and len(zones) <= _MOST_ZONES and (breaks_left is None or 0 <= breaks_left <= 1000)
    if not is_sound:
        raise HopError("the hop of a forwarded request is out of bounds")
    return weight, tenant, zones, breaks_left


def credit_line(last: ReportId) -> bytes:
    """Return the header line of a response whose agent has room in its place, and made the report `last` before it."""
    return b"X-SkyServe-Credit: %d-%d\r\n" % last


def read_credit(value: bytes) -> ReportId | None:
    """Return what a peer says of its room in a response; None if it says nothing."""
    boot, _, seq = value.partition(b"-")
    is_sound = boot.isdigit() and seq.isdigit() and len(value) <= _LONGEST_CREDIT
    return ReportId(int(boot), int(seq)) if is_sound else None


def _quoted(text: str) -> str:
    return quote_from_bytes(text.encode("utf-8", "surrogateescape"), safe="")


def _unquoted(text: bytes) -> str:
    return unquote_to_bytes(text).decode("utf-8", "surrogateescape")
