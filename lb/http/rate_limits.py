"""Header lines that tell a client what is left of its limits, as OpenAI's API does it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

_LINES = {
    what.decode(): b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
    % (what, what, what)
    for what in (b"requests", b"tokens")
}


def lines_of(allowances: Iterable[tuple[str, float, float]]) -> bytes:
    """Return the header lines, each with its CRLF.

    An allowance is what is limited ("requests", "tokens"), how much there is per minute, which fills evenly, and how much is left.
    """
    lines = b""
    for what, per_minute, left in allowances:
        reset = duration((per_minute - left) * 60.0 / per_minute)
        lines += _LINES[what] % (int(per_minute), int(left) if left > 0.0 else 0, reset)
    return lines


def duration(seconds: float) -> bytes:
    """Return a time as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return b"%dms" % max(0, round(seconds * 1000))
    if seconds < 60.0:
        return f"{seconds:.3g}s".encode()
    minutes, rest = divmod(round(seconds), 60)
    return b"%dm%ds" % (minutes, rest)
