"""The make-believe Google Cloud on a socket of the loopback interface.

Every request is validated before it is obeyed, every response before it is sent; faults of a response are this
fake's own fault, and is kept in `World.violations`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.clouds.gcp import gcp_discovery
from tests.clouds.gcp.gcp_parts import Refusal
from tests.clouds.gcp.gcp_world import World


@contextmanager
def serving(world: World) -> Iterator[str]:
    """The URL under which the world is served, by a thread of this process."""

    class Handler(_Handler):
        pass

    Handler.world = world
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    world: World
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.world.clock.now() + self.world.clock_off_s)

    def log_message(self, format: str, *args: object) -> None:
        pass  # the world keeps its own log

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PATCH = do_DELETE = do_PUT = do_GET

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        call, method, api, wrong = gcp_discovery.read(self.command, self.path, body)
        if call is None or api is None:
            self._answer(404, Refusal(404, "notFound", wrong[0]).body)
            return
        with self.world.limits.call(_group(self.command, call.id)) as is_let_in:
            if is_let_in:
                self._obey(call, method, api, wrong)
            else:
                refusal = Refusal(403, "rateLimitExceeded", "Rate Limit Exceeded")
                self._answer(refusal.status, refusal.body)

    def _obey(self, call: gcp_discovery.Call, method: Any, api: Any, wrong: list[str]) -> None:
        world = self.world
        entered = world.enter(call)
        if entered is None:
            self._break_off()
            return
        fault = world.fault(call.id)
        if fault is not None and not fault.after:
            if fault.status:
                self._answer(
                    fault.status, Refusal(fault.status, fault.reason, fault.message).body, fault.headers
                )
            else:
                self._break_off()
            return
        if wrong:
            world.refused.append((call.id, wrong))
            self._answer(400, Refusal(400, "invalid", "; ".join(wrong)).body)
            return
        try:
            answer = world.handle(call, dict(self.headers.items()))
        except Refusal as refusal:
            status, answer = refusal.status, refusal.body
        else:
            status = 200
            world.violations += [
                f"{call.id}: {problem}" for problem in gcp_discovery.answer_problems(method, api, answer)
            ]
        if world.leave(entered) or (fault is not None and not fault.status):
            self._break_off()
        elif fault is not None:
            self._answer(fault.status, Refusal(fault.status, fault.reason, fault.message).body, fault.headers)
        else:
            self._answer(status, answer)

    def _answer(self, status: int, content: Any, headers: Any = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def _break_off(self) -> None:
        self.close_connection = True


def _group(verb: str, method: str) -> str:
    """In which rate quota a call counts."""
    last = method.rpartition(".")[2]
    if last == "wait":
        return "wait"
    if last in ("list", "aggregatedList"):
        return "list"
    return "read" if verb == "GET" else "write"
