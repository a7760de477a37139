"""Agents of several regions as processes, linked over loopback, with the tables that a controller would push."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integration.lb_harness import RunningAgent, World, until
from tests.integration.region_links import identity

Row = dict[str, Any]


class LinkedAgents:
    """An agent per region; each pushed table has the other agents as peers. `zones` are those that a region serves."""

    def __init__(self, agents: Mapping[str, RunningAgent], zones: Mapping[str, Sequence[str]]) -> None:
        self.agents = dict(agents)
        self._zones = zones
        self._pushes = 0

    @classmethod
    async def start(
        cls,
        stage: World,
        folder: Path,
        *names: str,
        mortal: Sequence[str] = (),
        zones: Mapping[str, Sequence[str]] | None = None,
    ) -> LinkedAgents:
        """Start an agent in each region; those named in `mortal` may be killed."""
        agents = {}
        for name in names:
            known = identity(folder / name, name)
            files = ("--peers-certfile", str(known.own), "--peers-cafile", str(known.authority))
            words = ("--region", f"cloud/{name}", "--policy", "gorgo", *files)
            agents[name] = await stage.agent(*words, clean_exit=name not in mortal)
        return cls(agents, zones or {})

    def __getitem__(self, name: str) -> RunningAgent:
        return self.agents[name]

    def row(self, name: str, region: str, url: str) -> Row:
        """A target of a table."""
        found: Row = {"id": name, "url": url, "region": f"cloud/{region}"}
        return found | {"zones": list(self._zones.get(region, ()))}

    async def own(
        self, name: str, *targets: Row, standby: Mapping[str, Sequence[Row]] | None = None, **rest: Any
    ) -> None:
        """Push the table of the agent of region `name`. `standby` are targets by the region that owns them."""
        peers = [
            {
                "id": f"cloud/{other}#1",
                "region": f"cloud/{other}",
                "url": f"https://127.0.0.1:{agent.peers_port}",
                "tls_name": other,
                "zones": list(self._zones.get(other, ())),
            }
            for other, agent in self.agents.items()
            if other != name
        ]
        regions = {"agent": f"cloud/{name}#1", "here": f"cloud/{name}", "peers": peers}
        waiting = [
            {"owner": f"cloud/{owner}", "targets": list(those)} for owner, those in (standby or {}).items()
        ]
        self._pushes += 1
        revision = f"r{self._pushes}"
        await self.agents[name].push(*targets, revision=revision, regions=regions, standby=waiting, **rest)

    async def regions(self, name: str) -> Any:
        return await self.agents[name].request("GET", "/-/regions")

    async def peer(self, name: str, other: str) -> Any:
        """The row of `other` in the status of the agent of `name`."""
        rows = (await self.regions(name))["peers"]
        return next(one for one in rows if one["region"] == f"cloud/{other}")

    async def fresh(self) -> None:
        """Every agent has heard every other one, and knows the distance."""

        async def heard() -> bool:
            rows = [row for name in self.agents for row in (await self.regions(name))["peers"]]
            return all(row["rtt_ms"] is not None for row in rows)

        await until(heard)

    async def metric(self, name: str, series: str) -> float:
        """The value of a series (`family{labels}` as a regular expression) of the agent's metrics; 0 without one."""
        text = await self.agents[name].request("GET", "/-/metrics")
        found = re.findall(rf"^skyserve_lb_{series} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))
