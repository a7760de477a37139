"""Cross-origin resource sharing (CORS): which web pages may call, and the header lines that allow it. Pure.

A browser first sends a preflight (`OPTIONS` with `Access-Control-Request-Method`) for a request with a key or a JSON
body. The preflight has no key, so it is decided before access is checked, and no target receives it. The request itself
is never rejected here: the browser withholds its response from a page that may not read it.

Caches (Fetch standard, "CORS protocol and HTTP caches"): with `*` every response has the same lines, whether or not
the request names an origin. Otherwise every response has `Vary: Origin`, also one for an origin that is not allowed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lb.config.cors import ANY, SUBDOMAIN, TOKEN, Cors

_MAX_CACHED = 1024
_LONGEST_CACHED = 256  # bytes; hosts of real origins are at most 253
_ALWAYS = {b"GET", b"HEAD", b"POST"}  # browsers send these methods, listed or not
_LIST = re.compile(rf"{TOKEN}(?:[ \t]*,[ \t]*{TOKEN})*".encode())
_VARY_PREFLIGHT = b"Vary: Origin, Access-Control-Request-Headers\r\n"


class CorsDecision(NamedTuple):
    """What to do: with `status` 204 or 403, respond to this preflight with `lines`, without a target.

    With None, add `lines` to any response to this request. `lines` are whole header lines, each with its CRLF, or empty.
    """

    status: int | None
    lines: bytes
    problem: str = ""  # why a preflight is rejected


class CorsRules(dict[bytes | None, bytes]):
    """One compiled `Cors`: the header lines of responses by `Origin` (None: no such header).

    They are those of any response but a preflight's, so that a request costs one lookup. Missing origins are added, up to a bound.
    """

    def __init__(self, cors: Cors) -> None:
        super().__init__()
        self._any = ANY in cors.origins
        self._vary = b"" if self._any else b"Vary: Origin\r\n"
        patterns = [re.escape(one).replace(r"\*", SUBDOMAIN) for one in cors.origins]
        self._allowed = re.compile("|".join(patterns or ["(?!)"]).encode())
        self._methods = _ALWAYS | {one.encode() for one in cors.methods}
        self._headers = {one.lower().encode() for one in cors.headers}
        credentials = _line("Access-Control-Allow-Credentials", "true" if cors.credentials else "")
        methods = _line("Access-Control-Allow-Methods", ", ".join(cors.methods))
        self._preflight = credentials + methods + _line("Access-Control-Max-Age", str(cors.max_age_s))
        self._response = credentials + _line("Access-Control-Expose-Headers", ", ".join(cors.exposed_headers))

    def __missing__(self, origin: bytes | None) -> bytes:
        allow = self._allow(origin)
        lines = self._vary + allow + (self._response if allow else b"")
        if origin is None or len(origin) <= _LONGEST_CACHED:
            if len(self) >= _MAX_CACHED:  # only a client that invents origins comes here
                self.clear()
            self[origin] = lines
        return lines

    def decide(
        self, method: bytes, origin: bytes | None, asked_method: bytes | None, asked_headers: bytes | None
    ) -> CorsDecision:
        """Decides by `Origin` and `Access-Control-Request-Method`, `-Headers`; None: the request has no such header."""
        if method != b"OPTIONS" or origin is None or asked_method is None:
            return CorsDecision(None, self[origin])
        allow = self._allow(origin)
        if not allow:
            return CorsDecision(403, self[origin], "this origin is not allowed")
        if asked_method not in self._methods:
            return CorsDecision(403, self[origin], "this method is not allowed")
        if asked_headers and not self._may_carry(asked_headers):
            return CorsDecision(403, self[origin], "one of these headers is not allowed")
        headers = b"Access-Control-Allow-Headers: " + asked_headers + b"\r\n" if asked_headers else b""
        return CorsDecision(204, _VARY_PREFLIGHT + allow + headers + self._preflight)

    def _allow(self, origin: bytes | None) -> bytes:
        if self._any:
            return b"Access-Control-Allow-Origin: *\r\n"
        if origin is None or not self._allowed.fullmatch(origin):
            return b""
        return b"Access-Control-Allow-Origin: " + origin + b"\r\n"

    def _may_carry(self, asked: bytes) -> bool:
        """Also what any header may be must be a list of names, since it is copied into the response."""
        names = {name.strip().lower() for name in asked.split(b",")}
        return bool(_LIST.fullmatch(asked)) and (b"*" in self._headers or names <= self._headers)


def _line(name: str, value: str) -> bytes:
    return f"{name}: {value}\r\n".encode() if value else b""
