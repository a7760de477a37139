"""An engine with one seat: requests, and probes if they are not on a thread of their own, are served one after the other.

    python -m benchmarks.chaos.one_seat PORT SECONDS thread|queue

`GET /health` is the probe. `POST /hang` lets it stop as a frozen program does, and `POST /fail` lets it respond to everything
else with 500; both are served at once.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_BODY = (
    b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]}'
)


class OneSeat(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, service_s: float, *, probes_queue: bool) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.service_s = service_s
        self.probes_queue = probes_queue
        self.waiting: queue.Queue[tuple[float, threading.Event]] = queue.Queue()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.fails = False
        threading.Thread(target=self._work, daemon=True).start()

    def serve(self, work_s: float) -> None:
        """Wait for the seat, first come, first served, and for the work."""
        done = threading.Event()
        self.waiting.put((work_s, done))
        done.wait()

    def _work(self) -> None:
        while True:
            work_s, done = self.waiting.get()
            self.goes_on.wait()
            time.sleep(work_s)
            done.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OneSeat

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._respond(404, b"")
        elif self.server.probes_queue:
            self.server.serve(0.0)
            self._respond(200, b"ok")
        else:
            self.server.goes_on.wait()
            self._respond(200, b"ok")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/hang":
            self.server.goes_on.clear()
            self._respond(200, b"")
        elif self.path == "/fail":
            self.server.fails = True
            self._respond(200, b"")
        else:
            self.server.serve(self.server.service_s)
            self._respond(500 if self.server.fails else 200, _BODY)

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    OneSeat(int(sys.argv[1]), float(sys.argv[2]), probes_queue=sys.argv[3] == "queue").serve_forever()
