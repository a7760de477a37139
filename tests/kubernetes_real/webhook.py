"""A mutating webhook of a real API server, on loopback over TLS: it changes the Pods of a namespace as they are created."""

from __future__ import annotations

import base64
import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.real_api import Json
from tests.kubernetes_real.spaces import Space

_LABEL = "skyserve.test/webhook"
_PLACE = "apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


@contextmanager
def webhook(space: Space, change: Callable[[Json], None]) -> Iterator[None]:
    """While it is open, `change` is applied to every Pod that is created in the namespace; without it there is none."""
    server = _served(space, change)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    space.api.patch("namespaces", "", space.name, {"metadata": {"labels": {_LABEL: space.name}}})
    space.api.call("POST", _PLACE, _configuration(space, server.server_address[1]))
    try:
        until(lambda: _is_in_force(space), "the API server does not call the webhook", 30.0)
        yield
    finally:
        space.api.call("DELETE", f"{_PLACE}/{space.name}")
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    change: Callable[[Json], None]

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the terminal."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        pod = request["object"]
        self.change(pod)
        patch = [{"op": "replace", "path": "/spec", "value": pod["spec"]}]
        patch.append({"op": "add", "path": "/metadata", "value": pod["metadata"]})
        response = {
            "uid": request["uid"],
            "allowed": True,
            "patchType": "JSONPatch",
            "patch": base64.b64encode(json.dumps(patch).encode()).decode(),
        }
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        text = json.dumps(review).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _served(space: Space, change: Callable[[Json], None]) -> http.server.ThreadingHTTPServer:
    def changed(pod: Json) -> None:
        change(pod)
        pod["metadata"].setdefault("annotations", {})[_LABEL] = "changed"

    handler = type("Handler", (_Handler,), {"change": staticmethod(changed)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = space.world.plane.folder
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


def _configuration(space: Space, port: int) -> Json:
    authority = (space.world.plane.folder / "ca.crt").read_bytes()
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    hook = {
        "name": "sidecars.skyserve.test",
        "clientConfig": {
            "url": f"https://127.0.0.1:{port}/",
            "caBundle": base64.b64encode(authority).decode(),
        },
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {_LABEL: space.name}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 5,
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": space.name},
        "webhooks": [hook],
    }


def _is_in_force(space: Space) -> bool:
    """The API server reads its webhooks by a watch."""
    own = {"name": "main", "image": "any"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "try"},
        "spec": {"containers": [own]},
    }
    made = space.api.call("POST", f"api/v1/namespaces/{space.name}/pods?dryRun=All", body)
    return _LABEL in (made["metadata"].get("annotations") or {})
