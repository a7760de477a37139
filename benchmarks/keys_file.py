"""What 10,000 API keys in a watched file cost an agent, beside 10.

    python -m benchmarks.keys_file [--keys 10000] [--rounds 20] [--compiled] [--check]

Agents (`python -m lb`) with few and with many keys serve the same requests, in turns, of keys that are drawn from all. Standard output
has their memory, the CPU time of a request (the median over rounds), and for the one with many keys: how long it takes until a key that is
added or revoked is in force, and how long other requests take meanwhile: the time of a request, or the CPU time that the agent had during it
if that is less, because the machine may have other things to do. With `--check` the exit code is 1 if a goal is missed:
20 MiB, 5 %, 2 s and 50 ms.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.router.machine import native_agent

ROOT = Path(__file__).resolve().parents[1]
FEW = 10
REQUESTS = 500
SETTLED_S = 4.0  # a file that is young is read again
TOKEN = "benchmark"
GOALS = {"memory_mib": 20.0, "cpu_ratio": 1.05, "added_s": 2.0, "revoked_s": 2.0, "slowest_ms": 50.0}


class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b'{"usage": {"prompt_tokens": 5, "completion_tokens": 3}}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.wfile.write(head + body)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


def secret(number: int) -> str:
    return f"secret-of-key-{number:08d}"


def write_keys(path: Path, numbers: list[int]) -> None:
    entries = [
        {
            "name": f"key-{one}",
            "sha256": hashlib.sha256(secret(one).encode()).hexdigest(),
            "requests_per_minute": 1e6,
        }
        for one in numbers
    ]
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(entries))
    draft.replace(path)


class Agent:
    def __init__(self, folder: Path, keys: int, engine: int, code: Path) -> None:
        folder.mkdir()
        self.keys = keys
        self.file = folder / "keys.json"
        write_keys(self.file, list(range(keys)))
        command = [sys.executable, "-m", "lb", "--port", "0", "--admin-port", "0", "--no-pump"]
        command += ["--table-file", str(folder / "table.json"), "--service", "default"]
        environment = {**os.environ, "SKYSERVE_LB_TOKEN": TOKEN, "PYTHONPATH": str(code)}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=(folder / "log").open("w")
        )
        assert self.process.stdout is not None
        ports = json.loads(self.process.stdout.readline())
        self.port, self.admin_port = ports["port"], ports["admin_port"]
        table = self.admin("GET", "/-/targets")
        table |= {"revision": "1", "targets": [{"id": "a", "url": f"http://127.0.0.1:{engine}"}]}
        table["access"] = {"keys": [], "keys_file": str(self.file)}
        self.admin("PUT", "/-/targets", table)

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin_port}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def connection(self) -> http.client.HTTPConnection:
        made = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        made.connect()
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def serve(self, numbers: list[int]) -> float:
        """Send a request with each of these keys. Returns CPU microseconds per request."""
        connection, before = self.connection(), self.cpu_s()
        for number in numbers:
            assert status(connection, number) == 200
        connection.close()
        return (self.cpu_s() - before) / len(numbers) * 1e6

    def cpu_s(self) -> float:
        """Return the CPU time of its event loop."""
        return int(Path(f"/proc/{self.process.pid}/schedstat").read_text().split()[0]) / 1e9

    def rss_mib(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def status(connection: http.client.HTTPConnection, number: int) -> int:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}'
    headers = {"Authorization": f"Bearer {secret(number)}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    response = connection.getresponse()
    response.read()
    return response.status


def change(agent: Agent) -> dict[str, float]:
    """Add a key, revoke another, and measure when that is in force, and the requests of a third one meanwhile."""
    slow: list[float] = []
    done = threading.Event()

    def watch() -> None:
        connection = agent.connection()
        while not done.is_set():
            began, cpu_s = time.perf_counter(), agent.cpu_s()
            assert status(connection, 1) == 200
            slow.append(min(time.perf_counter() - began, agent.cpu_s() - cpu_s))
            time.sleep(0.002)

    def wait(number: int, wanted: int) -> float:
        began, connection = time.perf_counter(), agent.connection()
        while status(connection, number) != wanted:
            time.sleep(0.01)
            assert time.perf_counter() - began < 30
        return time.perf_counter() - began

    watcher = threading.Thread(target=watch)
    watcher.start()
    write_keys(agent.file, list(range(agent.keys + 1)))
    added = wait(agent.keys, 200)
    write_keys(agent.file, list(range(1, agent.keys + 1)))
    revoked = wait(0, 401)
    done.set()
    watcher.join()
    return {"added_s": added, "revoked_s": revoked, "slowest_ms": max(slow) * 1000}


def main() -> int:
    parser = argparse.ArgumentParser(description="Many API keys in a watched file.")
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compiled", action="store_true", help="the agent as wheels have it")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    rng = random.Random(1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        code = native_agent(ROOT) if given.compiled else ROOT
        agents = [
            Agent(folder / str(keys), keys, engine.server_address[1], code) for keys in (FEW, given.keys)
        ]
        for agent in agents:
            stack.callback(agent.close)
            agent.serve(list(range(agent.keys)))  # every key has been used
            time.sleep(SETTLED_S)
        cpu: list[list[float]] = [[], []]
        for _ in range(given.rounds):
            for index, agent in enumerate(agents):
                cpu[index].append(agent.serve([rng.randrange(1, agent.keys) for _ in range(REQUESTS)]))
        few, many = (statistics.median(each) for each in cpu)
        _, changed = (change(agent) for agent in agents)
        rss = [agent.rss_mib() for agent in agents]
        found = {"memory_mib": rss[1] - rss[0], "cpu_ratio": many / few, **changed}
        print(f"keys {FEW}: {rss[0]:.1f} MiB, {few:.0f} us of CPU a request")
        print(f"keys {given.keys}: {rss[1]:.1f} MiB, {many:.0f} us of CPU a request")
    missed = [name for name, goal in GOALS.items() if found[name] > goal]
    for name, value in found.items():
        print(f"{name}: {value:.3g} (goal: {GOALS[name]:g}){' MISSED' if name in missed else ''}")
    return 1 if missed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
