"""What several verbs print about events and replicas. Imports no Rich and no store, for verbs that only read."""

from __future__ import annotations

import re

from skyserve_cli.commands.options import View
from skyserve_cli.output import place

ONLY_HERE = "only this machine can reach it; set service.load_balancer.host to 0.0.0.0 to open it"


def words(kind: str) -> str:
    """``ProbePassed`` -> ``probe passed``"""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).lower()


def live_replicas(view: View) -> list[View]:
    return [replica for replica in view["replicas"] if replica["state"] != "GONE"]


def obituary(replica_id: int, where: View, reason: str) -> str:
    """How a replica ended, in one sentence. `where` has its place and its message."""
    said = f", {where['message']}" if where["message"] else ""
    return f"replica {replica_id} in {place(where)} ended: {reason}{said}"
