"""What TLS between a load balancer agent and a replica costs: CPU of the agent and of the machine's program, and latency.

    python -m benchmarks.tls_front [--rounds 3] [--seconds 5] [--fronts none,python,native,nginx,haproxy,nginx-plain]

An engine in this process responds to requests, or streams chunks of an SSE response; the agent reaches it by plain HTTP (`none`),
through `host_agent.tls_proxy` (`native`: by its part in C, `python`: without), or through nginx's stream module or HAProxy (packages
nginx, libnginx-mod-stream and haproxy of Debian), one worker each; `nginx-plain` is nginx without TLS, which is about what moving a chunk costs at
all. CPU is what /proc counts for each process in the window, over the requests or chunks of the window. All take turns in each round;
printed are medians over the rounds. Requests are sent by one client, one after the other, so latency is that of an idle system; `streams`
run side by side, each with a chunk every 20 ms, as tokens come.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lb.config.file import save
from lb.config.schema import Table, Target
from provisioners.remote.certificates import Authority
from provisioners.remote.host_agent.bundle import agent_bundle
from provisioners.remote.host_agent.front_port import port_of
from provisioners.remote.host_agent.tls_proxy import CERTIFICATE

TOKEN = "own-chat-1-0123456789"
STREAMS = 100
EVERY_S = 0.02
_TICKS_S = os.sysconf("SC_CLK_TCK")
_CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":" lake"}}]}\n\n'
_CHUNKED = b"%x\r\n%b\r\n" % (len(_CHUNK), _CHUNK)
_PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Row:
    agent_us: float
    front_us: float
    p50_ms: float = 0.0
    p99_ms: float = 0.0


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            if b"GET /stream" not in head:
                writer.write(_PLAIN)
                continue
            writer.write(_SSE)
            while not writer.is_closing():
                writer.write(_CHUNKED)
                await writer.drain()
                await asyncio.sleep(EVERY_S)
    writer.close()


def cpu_s(process: subprocess.Popen[bytes] | None) -> float:
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


def ours(folder: Path, to: int, *, native: bool) -> tuple[list[str], int]:
    """Return the command of the machine's own program; its port is known once it runs."""
    (folder / "agent.pyz").write_bytes(agent_bundle(native=native))
    order = {"front": {"port": None, "to": to}, "has_port": True, "claim_path": str(folder / "none")}
    (folder / "order.json").write_text(json.dumps(order))
    return [sys.executable, str(folder / "agent.pyz"), "front", str(folder)], 0


def nginx(folder: Path, to: int, *, tls: bool) -> tuple[list[str], int]:
    port, pem = free_port(), folder / CERTIFICATE
    certificate = f"ssl_certificate {pem}; ssl_certificate_key {pem};" if tls else ""
    (folder / "nginx.conf").write_text(
        f"""
        load_module /usr/lib/nginx/modules/ngx_stream_module.so;
        daemon off; master_process off; pid {folder}/nginx.pid; error_log /dev/null;
        events {{ worker_connections 4096; }}
        stream {{ server {{ listen 127.0.0.1:{port}{" ssl" if tls else ""}; {certificate} proxy_pass 127.0.0.1:{to}; tcp_nodelay on; }} }}
        """
    )
    return ["/usr/sbin/nginx", "-c", str(folder / "nginx.conf")], port


def haproxy(folder: Path, to: int) -> tuple[list[str], int]:
    port = free_port()
    (folder / "haproxy.cfg").write_text(
        f"""global
  nbthread 1
defaults
  mode tcp
  timeout connect 10s
  timeout client 1h
  timeout server 1h
frontend tls
  bind 127.0.0.1:{port} ssl crt {folder / CERTIFICATE}
  default_backend engine
backend engine
  server engine 127.0.0.1:{to}
"""
    )
    return ["/usr/sbin/haproxy", "-db", "-f", str(folder / "haproxy.cfg")], port


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


#: Programs in front of the engine: folder and its port to command and port.
FRONTS: dict[str, Callable[[Path, int], tuple[list[str], int]]] = {
    "python": partial(ours, native=False),
    "native": partial(ours, native=True),
    "nginx": partial(nginx, tls=True),
    "haproxy": haproxy,
    "nginx-plain": partial(nginx, tls=False),
}
PLAIN = ("none", "nginx-plain")


def started(
    folder: Path, port: int, front: str
) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes] | None]:
    """The agent, and the program in front of the engine."""
    process, tls, authority = None, front not in PLAIN, Authority(bytes(32), "own")
    if front != "none":
        (folder / CERTIFICATE).write_bytes(authority.of_machine(TOKEN))
        command, given = FRONTS[front](folder, port)
        process = subprocess.Popen(command)
        await_(lambda: is_open(given) if given else port_of(folder) is not None, process)
        port = given or port_of(folder) or 0
    ca = base64.b64encode(authority.certificate).decode() if tls else ""
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    target = Target("1", url, health_path="/", tls_name=TOKEN if tls else "")
    save(folder / "table.json", Table("bench", "1", (target,), targets_ca=ca))
    command = [sys.executable, "-m", "lb", "--port", "0", "--service", "bench"]
    command += ["--table-file", str(folder / "table.json"), "--ready-file", str(folder / "ready.json")]
    agent = subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.DEVNULL)
    await_((folder / "ready.json").exists, agent)
    return agent, process


def await_(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until a program is ready. Raises SystemExit if it has ended, or after half a minute."""
    until = time.monotonic() + 30.0
    while not holds():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"it does not start: {process.args!r}")
        time.sleep(0.02)


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


async def requests(port: int, seconds: float) -> list[float]:
    """Latencies of requests over one connection, one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found, until = [], time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: bench\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head, head
        await reader.readexactly(2)
        found.append(time.perf_counter() - started)
    writer.close()
    return found


async def stream(port: int, until: float) -> int:
    """The chunks of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /stream HTTP/1.1\r\nHost: bench\r\n\r\n")
    count = 0
    while time.perf_counter() < until:
        count += (await reader.readuntil(b"}\n\n")).count(b"lake")
    writer.close()
    return count


async def measured(front: str, seconds: float) -> tuple[Row, Row]:
    """Per request and per chunk."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = await asyncio.start_server(engine, "127.0.0.1", 0)
        agent, program = started(folder, server.sockets[0].getsockname()[1], front)
        try:
            port = json.loads((folder / "ready.json").read_text())["port"]
            await requests(port, 1.0)  # warm
            rows = []
            for kind in ("requests", "streams"):
                before = cpu_s(agent), cpu_s(program)
                if kind == "requests":
                    found = sorted(await requests(port, seconds))
                    count, p50, p99 = len(found), found[len(found) // 2], found[len(found) * 99 // 100]
                else:
                    until = time.perf_counter() + seconds
                    count = sum(await asyncio.gather(*(stream(port, until) for _ in range(STREAMS))))
                    p50 = p99 = 0.0
                agent_us = 1e6 * (cpu_s(agent) - before[0]) / count
                rows.append(Row(agent_us, 1e6 * (cpu_s(program) - before[1]) / count, 1e3 * p50, 1e3 * p99))
            return rows[0], rows[1]
        finally:
            for process in (agent, program):
                if process is not None:
                    process.kill()
                    process.wait()
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--fronts", default=",".join(("none", *FRONTS)), help="which of them, in this order")
    given = parser.parse_args()
    if unknown := set(given.fronts.split(",")) - {"none", *FRONTS}:
        parser.error(f"--fronts: no {', '.join(sorted(unknown))}; there are none, {', '.join(FRONTS)}")
    found: dict[str, list[tuple[Row, Row]]] = {name: [] for name in given.fronts.split(",")}
    for _ in range(given.rounds):
        for name, rounds in found.items():
            rounds.append(asyncio.run(measured(name, given.seconds)))
    for number, unit in enumerate(("request", "chunk")):
        for name, rounds in found.items():
            rows = [rows[number] for rows in rounds]

            def median(field: str, rows: list[Row] = rows) -> float:
                return float(statistics.median(getattr(row, field) for row in rows))

            print(
                f"{name:11} per {unit:7} agent {median('agent_us'):7.1f} us CPU   "
                f"front {median('front_us'):7.1f} us CPU   p50 {median('p50_ms'):.3f} ms   p99 {median('p99_ms'):.3f} ms"
            )


if __name__ == "__main__":
    main()
