"""The metadata services of three clouds, inside a machine's network namespace, run and controlled from the test.

Strict about what the clouds are strict about: AWS responds only with a session token (IMDSv2), GCP only with
`Metadata-Flavor: Google`, Azure only with `Metadata: true`, and all refuse what came through a proxy.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import threading
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from urllib.parse import parse_qs, urlsplit

ADDRESS = ("169.254.169.254", 80)
_CLONE_NEWNET = 0x40000000


class Metadata:
    """The metadata service of one machine. `asked` are the paths of all requests, refused ones marked with "!"."""

    def __init__(self, cloud: str, instance_id: str) -> None:
        self.cloud = cloud
        self.instance_id = instance_id
        self.asked: list[str] = []
        self._tokens: set[str] = set()
        self._changed = threading.Condition()
        self._etag = 1
        self._preempt_at: float | None = None
        self._retire_at: float | None = None
        self._server: ThreadingHTTPServer | None = None

    def announce(self, preempt_at: float) -> None:
        """The machine will be taken at that instant (UNIX seconds)."""
        with self._changed:
            self._preempt_at = preempt_at
            self._etag += 1
            self._changed.notify_all()

    def maintain(self, at: float | None) -> None:
        """The machine will be stopped for maintenance of its host then; None: not any more."""
        self._retire_at = at

    def start(self, namespace: str) -> None:
        """Serve in the network namespace, until `stop`."""
        ready = threading.Event()
        threading.Thread(target=self._serve, args=(namespace, ready), daemon=True).start()
        assert ready.wait(10), "the metadata service did not come up"

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _serve(self, namespace: str, ready: threading.Event) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        assert libc.setns(fd, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())  # this thread alone
        os.close(fd)
        service = self

        class Handler(_Handler):
            metadata = service

        self._server = _Server(ADDRESS, Handler)
        ready.set()
        self._server.serve_forever(0.05)

    # --- the three clouds: (status, body, ETag)

    def aws(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> tuple[int, str, str]:
        if method == "PUT" and path == "/latest/api/token":
            if (
                "x-forwarded-for" in headers
                or not headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdigit()
            ):
                return 400, "", ""
            token = secrets.token_urlsafe(16)
            self._tokens.add(token)
            return 200, token, ""
        if headers.get("x-aws-ec2-metadata-token") not in self._tokens:
            return 401, "", ""
        if path == "/latest/meta-data/instance-id":
            return 200, self.instance_id, ""
        if path == "/latest/meta-data/spot/instance-action" and self._preempt_at is not None:
            return 200, json.dumps({"action": "terminate", "time": _iso(self._preempt_at)}), ""
        if path == "/latest/meta-data/events/maintenance/scheduled":
            if self._retire_at is None:
                return 200, "[]", ""
            at = datetime.fromtimestamp(int(self._retire_at), UTC).strftime("%d %b %Y %H:%M:%S GMT")
            event = {
                "NotBefore": at,
                "NotAfter": at,
                "Code": "system-reboot",
                "EventId": "e",
                "State": "active",
            }
            return 200, json.dumps([{**event, "Description": "scheduled reboot"}]), ""
        return 404, "", ""

    def gcp(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> tuple[int, str, str]:
        if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
            return 403, "", ""
        if method == "GET" and path == "/computeMetadata/v1/instance/maintenance-event":
            return 200, "NONE" if self._retire_at is None else "TERMINATE_ON_HOST_MAINTENANCE", "m"
        if method != "GET" or path != "/computeMetadata/v1/instance/preempted":
            return 404, "", ""
        with self._changed:
            if query.get("wait_for_change") == "true":
                self._changed.wait_for(
                    lambda: query.get("last_etag") != f"{self._etag:x}", float(query.get("timeout_sec", 300))
                )
            return 200, "FALSE" if self._preempt_at is None else "TRUE", f"{self._etag:x}"

    def azure(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> tuple[int, str, str]:
        if headers.get("metadata") != "true" or "x-forwarded-for" in headers or "api-version" not in query:
            return 400, "", ""
        if method != "GET" or path != "/metadata/scheduledevents":
            return 404, "", ""
        events = []
        for kind, instant in (("Preempt", self._preempt_at), ("Redeploy", self._retire_at)):
            if instant is None:
                continue
            at = format_datetime(datetime.fromtimestamp(int(instant), UTC), usegmt=True)
            events.append(
                {
                    "EventId": f"f020ba2e-{kind}",
                    "EventType": kind,
                    "EventStatus": "Scheduled",
                    "ResourceType": "VirtualMachine",
                    "Resources": [self.instance_id],
                    "NotBefore": at,
                    "EventSource": "Platform",
                }
            )
        return 200, json.dumps({"DocumentIncarnation": self._etag, "Events": events}), ""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        TCPServer.server_bind(
            self
        )  # HTTPServer's looks its own name up, which takes seconds without a network


class _Handler(BaseHTTPRequestHandler):
    metadata: Metadata

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        headers = {key.lower(): value for key, value in self.headers.items()}
        cloud = {"aws": self.metadata.aws, "gcp": self.metadata.gcp, "azure": self.metadata.azure}[
            self.metadata.cloud
        ]
        status, body, etag = cloud(method, url.path, query, headers)
        self.metadata.asked.append(url.path if status < 400 or status == 404 else f"!{url.path}")
        self.send_response(status)
        if etag:
            self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


def _iso(at: float) -> str:
    return datetime.fromtimestamp(int(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
