"""One load balancer agent as a process of its own, and what can be seen of it from outside: its admin port, its
memory, its descriptors, its log.

An async context manager: leaving it ends the agent (SIGTERM, then SIGKILL) by its own id.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

_T = TypeVar("_T")
_TOKEN = "a-token-for-chaos"
_ROOT = Path(__file__).resolve().parents[2]
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_POLL_S = 0.05
_BAD_LINE = re.compile(
    r"Traceback|\bERROR\b|\bCRITICAL\b|^\w*(?:Error|Exception):|never (?:awaited|retrieved)"
)


async def until(condition: Callable[[], Awaitable[_T]], what: str, patience_s: float = 60.0) -> _T:
    """Poll until `condition` is truthy; its value. Raises AssertionError with `what`."""
    for _ in range(int(patience_s / _POLL_S)):
        value = await condition()
        if value:
            return value
        await asyncio.sleep(_POLL_S)
    raise AssertionError(what)


def environment() -> dict[str, str]:
    """Of a child that is to find the same packages as we do."""
    paths = [str(_ROOT), *(path for path in sys.path if path)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


class Balancer:
    """`python -m lb` with nothing in its table yet; of another interpreter, the load balancer that is installed there."""

    def __init__(self, *arguments: str, python: str = sys.executable) -> None:
        self._arguments = arguments
        self._python = python
        self._folder = tempfile.TemporaryDirectory(prefix="skyserve-chaos-")
        self.log = Path(self._folder.name) / "lb.log"
        self.port = 0
        self._admin_port = 0
        self._revision = 0

    async def __aenter__(self) -> Balancer:
        own = environment() if self._python == sys.executable else dict(os.environ)
        with self.log.open("wb") as talk:
            self._process = await asyncio.create_subprocess_exec(
                self._python, "-m", "lb", "--port", "0", "--log-level", "info", *self._arguments,
                stdout=asyncio.subprocess.PIPE, stderr=talk, env=own | {"SKYSERVE_LB_TOKEN": _TOKEN},
                cwd=self._folder.name, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 30)
        assert line, self.log.read_text()
        listening = json.loads(line)
        self.port, self._admin_port = listening["port"], listening["admin_port"]
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {_TOKEN}"})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), 10)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._folder.cleanup()

    # --- its admin port

    async def push(self, targets: Sequence[Mapping[str, Any]], **options: Any) -> None:
        """A table of these targets, with the options that are given and the defaults of all others."""
        self._revision += 1
        table = {"service": "default", "revision": f"r{self._revision}", "targets": list(targets), **options}
        url = f"http://127.0.0.1:{self._admin_port}/-/targets"
        async with self._http.put(url, json=table) as response:
            assert response.status == 200, await response.text()

    async def ask(self, path: str) -> Any:
        """The response of the admin port: parsed JSON, or text."""
        async with self._http.get(f"http://127.0.0.1:{self._admin_port}{path}") as response:
            assert response.status == 200, await response.text()
            return await (response.json() if response.content_type == "application/json" else response.text())

    async def stats(self) -> Any:
        return await self.ask("/-/stats?window_s=60")

    async def at_rest(self) -> bool:
        """No booking is open and no request is held."""
        stats = await self.stats()
        running = stats["in_flight"] + sum(target["in_flight"] for target in stats["targets"])
        return bool(running == 0 and stats["queued"] == 0)

    async def standings(self) -> dict[str, str]:
        return {one["id"]: one["standing"] for one in (await self.ask("/workers"))["workers"]}

    async def kinds(self) -> dict[str, str]:
        """What engines the agent believes its targets to be."""
        found = re.findall(r"target=(\S+) kind=(\w+)", self.log.read_text())
        return dict(found)

    async def counters(self) -> dict[str, float]:
        """Every counter and gauge, summed over its labels, without the service's prefix."""
        sums: dict[str, float] = {}
        for line in (await self.ask("/-/metrics")).splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0].removeprefix("skyserve_lb_")
                sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
        return sums

    # --- its process

    @property
    def pid(self) -> int:
        return self._process.pid

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * _PAGE_BYTES / 2**20

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def complaints(self) -> list[str]:
        """Lines of its log that no fault of others may cause."""
        return [line for line in self.log.read_text().splitlines() if _BAD_LINE.search(line)]
