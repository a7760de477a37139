"""Header lines that tell a client what is left of its limits, as OpenAI's API does it. Pure."""

from __future__ import annotations

from lb.core.tenant import Allowance


def lines_of(allowances: tuple[Allowance, ...]) -> bytes:
    """Return the header lines, each with its CRLF."""
    lines = "".join(
        f"x-ratelimit-limit-{one.what}: {one.per_minute:.0f}\r\n"
        f"x-ratelimit-remaining-{one.what}: {max(0.0, one.left):.0f}\r\n"
        f"x-ratelimit-reset-{one.what}: {duration((one.per_minute - one.left) * 60.0 / one.per_minute)}\r\n"
        for one in allowances
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
