"""Values in the queries of several routes, and their bounds."""

from __future__ import annotations

import math

from aiohttp import web

MAX_HISTORY_REPLICAS = 5_000


def since_of(request: web.Request) -> float:
    """Return the instant `since` in UNIX seconds, 0 without one. Raises ValueError."""
    since = float(request.query.get("since", 0.0))
    if not math.isfinite(since):
        raise ValueError("since is not an instant")
    return since
