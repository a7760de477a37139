"""A service in three regions of a `Wan`: an agent and two engines in each, with the tables that a controller would push."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.wan import Region, Wan
from tests.integration.lb_harness import ROOT, TOKEN, until
from tests.integration.region_links import identity

RTT_MS = {("us", "eu"): 90.0, ("us", "asia"): 150.0, ("eu", "asia"): 220.0}
NAMES = ("us", "eu", "asia")
BACKUPS = {"us": "eu", "eu": "us", "asia": "us"}  # the nearest
ENGINES = 2  # in each region
CHAT = "/v1/chat/completions"
_AGENT, _ADMIN, _PEERS, _ENGINE = 8000, 8001, 8443, 9000
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "SKYSERVE_LB_TOKEN": TOKEN}


class WanService:
    """The programs of all regions. `table` is laid over the table of each agent."""

    def __init__(self, wan: Wan, folder: Path, http: aiohttp.ClientSession, speed: float) -> None:
        self.wan = wan
        self.http = http
        self.table: dict[str, Any] = {}
        self.zones: dict[str, Sequence[str]] = {}
        self._folder = folder
        self._speed = speed
        self._ways: dict[tuple[str, str, int], int] = {}
        self._agents: dict[str, asyncio.subprocess.Process] = {}
        self._engines: list[asyncio.subprocess.Process] = []
        self._pushes = 0

    def url(self, name: str) -> str:
        """Where clients of the region ask: they are near its agent."""
        return f"http://{self.wan.regions[name].address}:{_AGENT}"

    async def start(self) -> None:
        for one in NAMES:
            for other in NAMES:
                if one != other:
                    for port in (_PEERS, *(_ENGINE + number for number in range(ENGINES))):
                        self._ways[one, other, port] = await self.wan.lead(one, other, port)
        await asyncio.gather(
            *(self._start_engine(name, number) for name in NAMES for number in range(ENGINES))
        )
        for name in NAMES:
            await self.start_agent(name)

    async def _start_engine(self, name: str, number: int) -> None:
        region = self.wan.regions[name]
        words = [
            "--host",
            region.address,
            "--port",
            str(_ENGINE + number),
            "--model",
            "m",
            "--profile",
            "a100-7b",
        ]
        process = await asyncio.create_subprocess_exec(
            *region.inside(sys.executable, "-m", "skyserve_cli.engine", *words, "--speed", str(self._speed)),
            stderr=asyncio.subprocess.PIPE, env=_ENVIRONMENT,
        )  # fmt: skip
        assert process.stderr is not None
        self._engines.append(process)
        said = (await asyncio.wait_for(process.stderr.readline(), 120)).decode()
        assert re.search(r"http://\S+", said), said

    async def start_agent(self, name: str, age_days: float = 0) -> None:
        """Start, or start again, the agent of a region, with a certificate of that age. It has the table that it was pushed last."""
        region = self.wan.regions[name]
        known = identity(self._folder / name, name, age_days=age_days)
        words = [
            "--host",
            region.address,
            "--port",
            str(_AGENT),
            "--region",
            f"cloud/{name}",
            "--policy",
            "gorgo",
        ]
        words += ["--admin-host", region.address, "--admin-port", str(_ADMIN), "--peers-port", str(_PEERS)]
        words += ["--peers-certfile", str(known.own), "--peers-cafile", str(known.authority)]
        words += ["--table-file", str(self._folder / f"{name}.json")]
        with (self._folder / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *region.inside(sys.executable, "-m", "lb", *words),
                stdout=asyncio.subprocess.PIPE, stderr=log, env=_ENVIRONMENT,
            )  # fmt: skip
        self._agents[name] = process
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 120), self.log(name)

    def kill_agent(self, name: str) -> None:
        self.signal_agent(name, signal.SIGKILL)

    def signal_agent(self, name: str, number: signal.Signals) -> None:
        self._agents[name].send_signal(number)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    async def end(self) -> None:
        for process in (*self._agents.values(), *self._engines):
            if process.returncode is None:
                process.kill()
            await process.wait()

    # --- the controller's part

    async def push(self, name: str, dead: Sequence[str] = ()) -> None:
        """The table of a region's agent. It has the replicas of the regions in `dead` that it inherits."""
        owners = {one: BACKUPS[one] if one in dead else one for one in NAMES}
        regions = {"agent": f"cloud/{name}#1", "here": f"cloud/{name}"}
        regions["peers"] = [self._peer(name, other) for other in NAMES if other != name]  # type: ignore[assignment]
        targets = [row for one in NAMES if owners[one] == name for row in self._rows(name, one)]
        standby = [
            {"owner": f"cloud/{one}", "targets": self._rows(name, one)}
            for one in NAMES
            if owners[one] != name and BACKUPS[one] == name
        ]
        self._pushes += 1
        table = {"service": "default", "revision": f"r{self._pushes}", "policy": "gorgo", "regions": regions}
        zones = {"residency": list(self.zones.get(name, ()))}
        await self.admin(
            name,
            "PUT",
            "/-/targets",
            json={**table, **zones, "targets": targets, "standby": standby, **self.table},
        )

    async def linked(self) -> None:
        """Push all tables; then every agent knows every other one, and what its engines are."""
        for name in NAMES:
            await self.push(name)

        async def all_know() -> bool:
            rows = [row for name in NAMES for row in (await self.regions(name))["peers"]]
            return len(rows) == 6 and all(
                row["rtt_ms"] is not None and row["engine"] == "skyserve" for row in rows
            )

        await until(all_know, tries=3000)

    def _peer(self, name: str, other: str) -> dict[str, Any]:
        url = f"https://{self.wan.regions[name].gateway}:{self._ways[name, other, _PEERS]}"
        served = list(self.zones.get(other, ()))
        return {
            "id": f"cloud/{other}#1",
            "region": f"cloud/{other}",
            "url": url,
            "tls_name": other,
            "zones": served,
        }

    def _rows(self, name: str, of: str) -> list[dict[str, Any]]:
        rows = []
        for number in range(ENGINES):
            host, port = self.wan.regions[of].address, _ENGINE + number
            if of != name:
                host, port = self.wan.regions[name].gateway, self._ways[name, of, port]
            served = list(self.zones.get(of, ()))
            rows.append(
                {
                    "id": f"{of}-{number}",
                    "url": f"http://{host}:{port}",
                    "region": f"cloud/{of}",
                    "zones": served,
                }
            )
        return rows

    # --- looking

    async def admin(self, name: str, method: str, path: str, **more: Any) -> Any:
        url = f"http://{self.wan.regions[name].address}:{_ADMIN}{path}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self.http.request(method, url, headers=headers, **more) as response:
            text = await response.text()
            assert response.status == 200, (response.status, text)
            return json.loads(text) if response.content_type == "application/json" else text

    async def regions(self, name: str) -> Any:
        return await self.admin(name, "GET", "/-/regions")

    async def peer(self, name: str, other: str) -> Any:
        rows = (await self.regions(name))["peers"]
        return next(one for one in rows if one["region"] == f"cloud/{other}")

    async def served(self) -> dict[str, int]:
        """How many requests the engines of each region have finished."""
        found = dict.fromkeys(NAMES, 0)
        for name in NAMES:
            for number in range(ENGINES):
                url = f"http://{self.wan.regions[name].address}:{_ENGINE + number}/metrics"
                async with self.http.get(url) as response:
                    text = await response.text()
                values = re.findall(r"^vllm:request_success_total\S* (\S+)$", text, re.MULTILINE)
                found[name] += round(sum(map(float, values)))
        return found

    def requests_sent(self, source: str, *targets: str) -> int:
        """Bytes from a region to engines of others."""
        return sum(
            size
            for (one, other, port), size in self.wan.sent.items()
            if one == source and other in targets and port != _PEERS
        )


@asynccontextmanager
async def wan_service(folder: Path, speed: float = 1.0) -> AsyncIterator[WanService]:
    regions = {name: Region(name, number) for number, name in enumerate(NAMES)}
    wan = Wan(regions, RTT_MS)
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        service = WanService(wan, folder, http, speed)
        try:
            for region in regions.values():
                region.make()
            await service.start()
            await service.linked()
            yield service
        finally:
            await service.end()
            await wan.close()
            for region in regions.values():
                region.remove()
