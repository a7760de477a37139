"""What the controller knows of a load balancer agent on a machine of its own, for people."""

from __future__ import annotations

from dataclasses import dataclass

from lb.config.schema import Build
from policies.model import Json


@dataclass(frozen=True, slots=True)
class RegionalView:
    """What `serve status` shows of an agent. `version` is of the code that serves, `synced`: it has the newest table.

    `owned` are the regions whose replicas it has, None where every agent has all; `peers` is what it says of its peers,
    `taken_over` are the regions that it serves on its own decision, as their agents are not heard. `ttft_s` are the median and the 90th
    percentile of its times to first token in the last minute. `build` is how it runs; None: not known, or an older agent.
    """

    synced: bool = False
    version: str | None = None
    newest: bool = False
    ready_targets: int = 0
    starts: int = 0
    trouble: str = ""
    owned: tuple[str, ...] | None = None
    peers: tuple[Json, ...] = ()
    taken_over: tuple[str, ...] = ()
    ttft_s: tuple[float | None, float | None] = (None, None)
    build: Build | None = None
