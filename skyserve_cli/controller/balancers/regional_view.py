"""What is known of a load balancer agent on a machine of its own, for those who show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RegionalView:
    """What `serve status` shows of an agent. `version` is of the code that serves, `synced`: it has the newest table."""

    synced: bool = False
    version: str | None = None
    newest: bool = False
    ready_targets: int = 0
    starts: int = 0
    trouble: str = ""
