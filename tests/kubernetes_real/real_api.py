"""The API of a real cluster as its administrator uses it: JSON in, JSON out, without the code under test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import urllib3

from tests.clouds.kubernetes.kube_store import Refused

Json = dict[str, Any]
_GROUPS = {
    "deployments": "apis/apps/v1",
    "leases": "apis/coordination.k8s.io/v1",
    "roles": "apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "apis/rbac.authorization.k8s.io/v1",
    "clusterroles": "apis/rbac.authorization.k8s.io/v1",
    "clusterrolebindings": "apis/rbac.authorization.k8s.io/v1",
}
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"


class RealApi:
    """`folder` has the certificates. Thread-safe; errors of the server are `Refused`, others OSError or of urllib3."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._pool = urllib3.PoolManager(
            cert_file=str(folder / "admin.crt"),
            key_file=str(folder / "admin.key"),
            ca_certs=str(folder / "ca.crt"),
            maxsize=32,
            retries=False,
        )

    def call(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        headers = {"Content-Type": kind, "Accept": "application/json"}
        data = None if body is None else json.dumps(body)
        response = self._pool.request(method, f"{self.url}/{path}", body=data, headers=headers, timeout=30.0)
        found: Json = {"text": response.data.decode(errors="replace")}
        with suppress(ValueError):
            found = json.loads(response.data)
        if response.status >= 400:
            raise Refused(response.status, found.get("reason", ""), found.get("message", str(found)))
        return found

    # --- objects, by resource as the path has it

    def create(self, resource: str, namespace: str, body: Json) -> Json:
        return self.call("POST", place(resource, namespace), body)

    def get(self, resource: str, namespace: str, name: str) -> Json:
        return self.call("GET", place(resource, namespace, name))

    def list(self, resource: str, namespace: str = "", labels: str = "") -> list[Json]:
        found = self.call("GET", f"{place(resource, namespace)}?labelSelector={labels}")
        items: list[Json] = found["items"]
        return items

    def patch(self, resource: str, namespace: str, name: str, body: Json, kind: str = MERGE) -> Json:
        return self.call("PATCH", place(resource, namespace, name), body, kind)

    def patch_status(self, resource: str, namespace: str, name: str, body: Json, kind: str = MERGE) -> Json:
        return self.call("PATCH", f"{place(resource, namespace, name)}/status", body, kind)

    def delete(self, resource: str, namespace: str, name: str, options: Json | None = None) -> None:
        """Delete it, unless it is gone or another one by now."""
        try:
            self.call("DELETE", place(resource, namespace, name), options or {})
        except Refused as refused:
            if refused.code not in (404, 409):
                raise

    def ensure(self, resource: str, namespace: str, body: Json) -> None:
        with suppress(Refused):
            self.create(resource, namespace, body)
        self.get(resource, namespace, body["metadata"]["name"])

    def watch(self, resource: str, version: str) -> Iterator[Json]:
        """Yield the events of all namespaces until the server ends it. Raises OSError for one that says so."""
        path = f"{place(resource, '')}?watch=true&resourceVersion={version}&timeoutSeconds=600"
        limit = urllib3.Timeout(connect=5.0, read=700.0)
        response = self._pool.request("GET", f"{self.url}/{path}", preload_content=False, timeout=limit)
        rest = b""
        try:
            for chunk in response.stream(amt=None):
                *lines, rest = (rest + chunk).split(b"\n")
                for event in (json.loads(line) for line in lines if line.strip()):
                    if event["type"] == "ERROR":
                        raise OSError(event["object"].get("message"))
                    yield event
        finally:
            response.close()


def place(resource: str, namespace: str, name: str = "") -> str:
    """Return the path of an object, or of a list; without a namespace that of all."""
    inside = f"/namespaces/{namespace}" if namespace else ""
    return f"{_GROUPS.get(resource, 'api/v1')}{inside}/{resource}" + (f"/{name}" if name else "")
