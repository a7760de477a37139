"""Meadow in memory, over real HTTP: for the contract, and to try the plug-in without an account."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "a-key-for-tests"
TYPES = ("sheep-1", "sheep-2")
ZONES = ("north-1", "north-2", "south-1")
BOOT_S, LISTED_S = 30.0, 3600.0


@dataclass
class World:
    """The cloud's state. `room` is by (zone, spot); `cut` responses are lost after the work is done."""

    time: float = 1_000_000.0
    key: str = KEY
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    room: dict[tuple[str, bool], int] = field(default_factory=dict)
    quota: int = 1000
    cut: bool = False
    throttled: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def living(self) -> list[dict[str, Any]]:
        return [one for one in self.machines.values() if one["status"] in ("booting", "up")]

    def end(self, machine: str, status: str) -> None:
        self.machines[machine]["status"] = status
        self.ended[machine] = self.time

    def respond(self, method: str, path: str, key: str, body: Any) -> tuple[int, Any]:
        """(HTTP status, JSON). With the lock held."""
        if key != f"Bearer {self.key}":
            return 401, "bad_key"
        parts = path.removeprefix("/v1/").split("/")
        match method, parts:
            case "GET", ["machines"]:
                return 200, {"machines": self._listed()}
            case "POST", ["machines"]:
                return self._create(body)
            case "DELETE", ["machines", one] if one in self.machines:
                if self.machines[one]["status"] in ("booting", "up"):
                    self.end(one, "deleted")
                return 204, None
            case "PUT", ["machines", one, "allow"] if one in self.machines:
                self.machines[one]["allow"] = body
                return 200, self.machines[one]
        return 404, "not_found"

    def _listed(self) -> list[dict[str, Any]]:
        for one in self.living():
            if self.time >= one["created_at"] + BOOT_S:
                one["status"] = "up"
        return [
            one for key, one in self.machines.items() if self.time < self.ended.get(key, self.time) + LISTED_S
        ]

    def _create(self, body: Any) -> tuple[int, Any]:
        if self.throttled > 0:
            self.throttled -= 1
            return 429, "slow_down"
        if set(body) != {"name", "type", "zone", "spot", "ssh_key", "allow"} or body["type"] not in TYPES:
            return 400, "bad_request"
        if body["zone"] not in ZONES or not 0 < len(body["name"]) <= 64:
            return 400, "bad_request"
        living = self.living()
        if any(one["name"] == body["name"] for one in living):
            return 409, "name_taken"
        taken = [one for one in living if (one["zone"], one["spot"]) == (body["zone"], body["spot"])]
        if len(living) >= self.quota:
            return 403, "quota"
        if len(taken) >= self.room.get((body["zone"], body["spot"]), 1000):
            return 503, "no_room"
        number = len(self.machines) + 1
        made = {
            **body,
            "id": f"m{number}",
            "status": "booting",
            "ip": f"10.1.0.{number}",
            "created_at": self.time,
        }
        self.machines[made["id"]] = made
        return 201, made


@contextmanager
def serving(world: World) -> Iterator[str]:
    """The URL of the API on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            with world.lock:
                status, found = world.respond(self.command, self.path, self.headers["Authorization"], body)
                lost = world.cut and self.command == "POST"
            if lost:
                self.close_connection = True
                return
            text = json.dumps({"error": {"code": found}} if status >= 400 else found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(0 if status == 204 else len(text)))
            self.end_headers()
            self.wfile.write(b"" if status == 204 else text)

        do_GET = do_POST = do_PUT = do_DELETE = _respond

        def log_message(self, *_: Any) -> None:
            """Tests need no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
