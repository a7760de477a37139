"""Where a probe goes on if its response is a redirect. Pure.

A server that adds a slash to its paths redirects the probe to itself; SkyPilot's probe, by its client library, follows. Another
host is not followed: what is well there says nothing of the replica.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import SplitResult, urljoin, urlsplit

from skyserve_cli.spec.model import Probe

MOST_REDIRECTS = 3
_KEEPS_METHOD = (307, 308)
_BECOMES_GET = (301, 302, 303)
_MOST_SHOWN = 100  # characters


def redirected(endpoint: str, probe: Probe, status: int, location: str) -> Probe | None:
    """Return the probe that follows the redirect; None: the response is none, or leads to another host."""
    if status not in (*_KEEPS_METHOD, *_BECOMES_GET) or not location:
        return None
    base = endpoint.rstrip("/")
    to = urlsplit(urljoin(base + probe.path, location))
    at = urlsplit(base)
    if _origin(to) != _origin(at) or not to.path.startswith(at.path):
        return None
    path = to.path[len(at.path) :] + (f"?{to.query}" if to.query else "")
    return replace(probe, path=path or "/", post_data=probe.post_data if status in _KEEPS_METHOD else None)


def described(status: int, location: str) -> str:
    """Return what is wrong with a response that is not 200. A query, which may hold a secret, is left out."""
    if not location:
        return f"probe returned {status}"
    return f"probe returned {status}, to {location.partition('?')[0][:_MOST_SHOWN]}"


def _origin(url: SplitResult) -> tuple[str, str | None, int]:
    return url.scheme, url.hostname, url.port or (443 if url.scheme == "https" else 80)
