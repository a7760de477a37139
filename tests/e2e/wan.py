"""A wide area network on one machine: a network namespace for each region, and a relay in user space between them.

No packet is routed between the namespaces: each sees this machine's end of its own link and nothing else. What one region sends
to another goes through `Wan`, which delays it by half a round trip, counts it, and cuts or freezes it on request. The relay ends TCP
connections, so slow start and loss are not shown: long bodies look faster than they would be.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

_SUBNETS = "10.214"
_PIECE = 65536


def why_not() -> str | None:
    """Why there can be no namespaces here, or None."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and ip (iproute2)"
    name = f"wan{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Way(NamedTuple):
    """One direction: connections that `source` opens to `target`."""

    source: str
    target: str


class Region:
    """A namespace. `address` is that of its programs, `gateway` this machine's end of its link."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.namespace = f"wan{os.getpid()}{name}"
        block = (os.getpid() * 8 + number) % 16000
        prefix, low = f"{_SUBNETS}.{block // 64}", 4 * (block % 64)
        self.gateway, self.address = f"{prefix}.{low + 1}", f"{prefix}.{low + 2}"
        self._link = f"w{os.getpid() % 10**6}{name}"[:15]

    def make(self) -> None:
        commands = [
            f"netns add {self.namespace}",
            f"link add {self._link} type veth peer name eth0 netns {self.namespace}",
            f"addr add {self.gateway}/30 dev {self._link}",
            f"link set {self._link} up",
            f"-n {self.namespace} addr add {self.address}/30 dev eth0",
            f"-n {self.namespace} link set eth0 up",
            f"-n {self.namespace} link set lo up",
        ]
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "delete", self.namespace], check=False)
        subprocess.run(["ip", "link", "delete", self._link], capture_output=True, check=False)

    def inside(self, *command: str) -> list[str]:
        """The command, run in the region."""
        return ["ip", "netns", "exec", self.namespace, *command]


class Wan:
    """The relay. `rtt_ms` is by pairs of regions."""

    def __init__(self, regions: dict[str, Region], rtt_ms: dict[tuple[str, str], float]) -> None:
        self.regions = regions
        self._rtt_ms = rtt_ms
        self._servers: list[asyncio.Server] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self._open: dict[Way, set[asyncio.StreamWriter]] = {}
        self.cut: set[Way] = set()
        self.frozen: set[Way] = set()  # takes bytes and passes none, as a link that is half open
        self.sent: Counter[tuple[str, str, int]] = Counter()  # bytes from, to, port

    def rtt_ms(self, one: str, other: str) -> float:
        return self._rtt_ms.get((one, other)) or self._rtt_ms[other, one]

    async def lead(self, source: str, target: str, port: int) -> int:
        """Listen in the region `source` for connections to a port of `target`; the port there."""
        way = Way(source, target)

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)
            await self._carry(way, port, reader, writer)

        server = await asyncio.start_server(accepted, self.regions[source].gateway, 0)
        self._servers.append(server)
        number: int = server.sockets[0].getsockname()[1]
        return number

    def sever(self, one: str, other: str) -> None:
        """Break the connections between two regions, and refuse new ones."""
        for way in (Way(one, other), Way(other, one)):
            self.cut.add(way)
            for writer in list(self._open.get(way, ())):
                writer.transport.abort()

    def freeze(self, one: str, other: str) -> None:
        """Pass nothing between two regions any longer, without breaking anything."""
        self.frozen |= {Way(one, other), Way(other, one)}

    def mend(self) -> None:
        """All is well again; what was frozen breaks."""
        for way in self.frozen:
            for writer in list(self._open.get(way, ())):
                writer.transport.abort()
        self.cut.clear()
        self.frozen.clear()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._pumps):
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _carry(
        self, way: Way, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        delay_s = self.rtt_ms(*way) / 2000
        writers = [writer]
        try:
            await asyncio.sleep(2 * delay_s)  # SYN, SYN-ACK
            if way in self.cut:
                return
            address = self.regions[way.target].address
            there, back = await asyncio.open_connection(address, port)
            writers.append(back)
            self._open.setdefault(way, set()).update(writers)
            await asyncio.gather(
                self._pump(way, way.source, way.target, port, reader, back, delay_s),
                self._pump(way, way.target, way.source, port, there, writer, delay_s),
            )
        except OSError:
            pass
        finally:
            for one in writers:
                self._open.get(way, set()).discard(one)
                one.transport.abort()

    async def _pump(
        self,
        way: Way,
        source: str,
        target: str,
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        delay_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                at, data = await pieces.get()
                await asyncio.sleep(max(0.0, at - loop.time()))
                if way in self.frozen:
                    continue
                if not data:
                    with suppress(OSError):
                        writer.write_eof() if writer.can_write_eof() else writer.close()
                    return
                self.sent[source, target, port] += len(data)
                writer.write(data)
                await writer.drain()

        delivering = asyncio.ensure_future(deliver())
        try:
            while data := await reader.read(_PIECE):
                pieces.put_nowait((loop.time() + delay_s, data))
            pieces.put_nowait((loop.time() + delay_s, b""))
            await delivering
        except OSError:
            writer.transport.abort()
            raise
        finally:
            delivering.cancel()
