"""Reads the admin ports of a service's agents for those who show them: explanations and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

import aiohttp
import orjson

TIMEOUT_S = 5.0


class AdminPort(NamedTuple):
    """Where an agent's admin API is, and the headers that it needs."""

    url: str
    headers: Mapping[str, str]


def admin_session(timeout_s: float) -> aiohttp.ClientSession:
    """Return a session for many agents. Call it on the event loop."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=0),
        json_serialize=lambda content: orjson.dumps(
            content
        ).decode(),  # `json` takes 100 ms for 10,000 targets
    )


Addresses = Callable[[str], Mapping[int, AdminPort]]


class AgentReader:
    """`places` return the admin ports of a service's agents by their numbers. Used on one event loop."""

    def __init__(self, *places: Addresses) -> None:
        self._places = places
        self._session: aiohttp.ClientSession | None = None

    async def read(self, service: str, path: str) -> dict[int, bytes]:
        """Return what each agent that responds has at `path`; those that do not, or refuse, are left out."""
        ports = {number: port for place in self._places for number, port in place(service).items()}
        contents = await asyncio.gather(*(self._get(port, path) for port in ports.values()))
        return {
            number: content for number, content in zip(ports, contents, strict=True) if content is not None
        }

    def numbers(self, service: str) -> list[int]:
        """Return the numbers of the service's agents that can be reached."""
        return sorted(number for place in self._places for number in place(service))

    async def read_one(self, service: str, agent: int, path: str) -> bytes | None:
        """Return what one agent has at `path`; None if it does not respond or refuses."""
        ports = (port for place in self._places if (port := place(service).get(agent)) is not None)
        port = next(ports, None)
        return None if port is None else await self._get(port, path)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _get(self, port: AdminPort, path: str) -> bytes | None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        try:
            async with self._session.get(port.url + path, headers=port.headers) as response:
                content = await response.read()
                return content if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
