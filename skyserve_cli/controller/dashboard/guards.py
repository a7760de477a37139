"""What a request of a browser must be like. Pure functions of its method, path and headers.

A page of another site can send requests to this port, and by changing what its own name resolves to (DNS rebinding) it can even
be of the same origin as this port. So the Host must be a name of this machine, only requests of this origin may
change anything, and the cookie is never sent by other sites (SameSite=Strict).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
#: In every response. Charts set their sizes by script, which `style-src` allows; no style is written in HTML.
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)
_READS = frozenset({"GET", "HEAD"})


def refusal(method: str, headers: Mapping[str, str], names: Collection[str]) -> tuple[int, str] | None:
    """Return the status and the reason for which a request is refused; None if it is not.

    `names` are host names by which this port may be called, beside those of loopback.
    """
    host = host_name(headers.get("Host", ""))
    if host not in LOOPBACK_NAMES and host not in names:
        return 421, "this port is not served under that name; see dashboard.hosts in config.yaml"
    if method not in _READS and headers.get("Sec-Fetch-Site", "") != "same-origin":
        return 403, "only the page itself may send this request"
    return None


def host_name(host: str) -> str:
    """Return the Host header without its port, in lower case."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[: name.find("]") + 1]
    return name.rpartition(":")[0] if ":" in name else name
