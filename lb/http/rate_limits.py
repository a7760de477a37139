"""Header lines that tell a client what is left of its limits, as OpenAI's API does it. Pure."""

from __future__ import annotations


def lines_of(requests: float, requests_left: float, tokens: float, tokens_left: float) -> bytes:
    """Return the header lines, each with its CRLF, of limits per minute, which fill evenly, and of what is left of them. 0 is no limit."""
    lines = ""
    if requests:
        lines = (
            f"x-ratelimit-limit-requests: {int(requests)}\r\nx-ratelimit-remaining-requests: {_shown(requests_left)}\r\n"
            f"x-ratelimit-reset-requests: {_reset(requests, requests_left)}\r\n"
        )
    if tokens:
        lines += (
            f"x-ratelimit-limit-tokens: {int(tokens)}\r\nx-ratelimit-remaining-tokens: {_shown(tokens_left)}\r\n"
            f"x-ratelimit-reset-tokens: {_reset(tokens, tokens_left)}\r\n"
        )
    return lines.encode()


def _shown(left: float) -> int:
    return int(left) if left > 0.0 else 0


def _reset(per_minute: float, left: float) -> str:
    return duration((per_minute - left) * 60.0 / per_minute)


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return f"{round(seconds * 1000)}ms" if seconds >= 0.0005 else "0ms"
    if seconds < 60.0:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
