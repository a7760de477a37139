"""Header lines that tell a client what is left of its limits, as OpenAI's API does it. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def lines_of(allowances: Iterable[tuple[str, float, float]]) -> bytes:
    """Return the header lines, each with its CRLF.

    An allowance is what is limited ("requests", "tokens"), how much there is per minute, which fills evenly, and how much is left.
    """
    lines = "".join(
        f"x-ratelimit-limit-{what}: {per_minute:.0f}\r\n"
        f"x-ratelimit-remaining-{what}: {max(0.0, left):.0f}\r\n"
        f"x-ratelimit-reset-{what}: {duration((per_minute - left) * 60.0 / per_minute)}\r\n"
        for what, per_minute, left in allowances
    )
    return lines.encode("ascii")


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return f"{max(0, round(seconds * 1000))}ms"
    if seconds < 60.0:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
