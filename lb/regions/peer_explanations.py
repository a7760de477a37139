"""What has become of a request at the peers that it was forwarded to, by their own account."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

from lb.core.forwarding import Forwarding
from lb.engines.http_get import HttpGetter
from lb.observe.explain import Explanation
from lb.proxy.peer_entrance import EXPLAIN

TIMEOUT_S = 2.0


async def peer_explanations(
    explanation: Explanation, forwarding: Forwarding, getter: HttpGetter
) -> list[dict[str, Any]]:
    """Ask each of the peers. `steps` is None where one has no account of it, or cannot be asked (`trouble`)."""
    targets = {target.id: target for target in forwarding.peer_table.table.targets}
    path = EXPLAIN.decode() + quote(explanation.request_id, safe="")
    found = []
    for peer_id in explanation.targets_of("forwards"):
        row: dict[str, Any] = {"peer": peer_id, "steps": None}
        try:
            fetched = await getter.fetch(targets[peer_id], path, TIMEOUT_S)
            row |= json.loads(fetched.body) if fetched.status == 200 else {}
        except (KeyError, ValueError, OSError, asyncio.TimeoutError) as error:  # noqa: UP041 (not the same in 3.10)
            row["trouble"] = str(error) or type(error).__name__
        found.append(row)
    return found
