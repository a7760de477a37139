"""Header lines that tell a client what is left of its limits, as OpenAI's API does it. Pure."""

from __future__ import annotations

_LINES = b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
_REQUESTS, _TOKENS = (_LINES % (what, what, what) for what in (b"requests", b"tokens"))
_BOTH = _REQUESTS + _TOKENS


def lines_of(requests: float, requests_left: float, tokens: float, tokens_left: float) -> bytes:
    """Return the header lines, each with its CRLF, of limits per minute, which fill evenly, and of what is left of them. 0 is no limit."""
    if requests and tokens:
        return _BOTH % (
            int(requests),
            _shown(requests_left),
            _reset(requests, requests_left),
            int(tokens),
            _shown(tokens_left),
            _reset(tokens, tokens_left),
        )
    if requests:
        return _REQUESTS % (int(requests), _shown(requests_left), _reset(requests, requests_left))
    if tokens:
        return _TOKENS % (int(tokens), _shown(tokens_left), _reset(tokens, tokens_left))
    return b""


def _shown(left: float) -> int:
    return int(left) if left > 0.0 else 0


def _reset(per_minute: float, left: float) -> bytes:
    return duration((per_minute - left) * 60.0 / per_minute)


def duration(seconds: float) -> bytes:
    """Return a time as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return b"%dms" % round(seconds * 1000) if seconds >= 0.0005 else b"0ms"
    if seconds < 60.0:
        return f"{seconds:.3g}s".encode()
    minutes, rest = divmod(round(seconds), 60)
    return b"%dm%ds" % (minutes, rest)
