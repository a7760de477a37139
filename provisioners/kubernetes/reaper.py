"""Deletes Pods that no controller visits any more: the program that a CronJob runs in the cluster, by Python's library alone.

The controller renews a Lease per owner while it watches. When the Lease has not been renewed for as long as it says, the program
deletes the owner's Pods and the Deployments of its load balancers, and with them all that they own, then the Lease, then the CronJob that
runs it. The controller writes the time of the API server's clock into the Lease, and that is the clock it is compared with. Without a Lease it deletes nothing. Where its role does not know Deployments, there are no load balancers. The file is sent as it is, so it must not import anything of this package.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

Json = dict[str, Any]
Call = Callable[[str, str], "Json | None"]  # a method and a path; None if there is no such object

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def is_over(lease: Json, now: float) -> bool:
    """Return whether the Lease has not been renewed for as long as it lasts. `now` in UNIX seconds."""
    spec = lease.get("spec") or {}
    renewed, lasts_s = spec.get("renewTime"), spec.get("leaseDurationSeconds")
    if not renewed or not lasts_s:
        return False
    at = datetime.strptime(renewed[:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC).timestamp()
    return bool(now - at > lasts_s)


def steps(namespace: str, name: str, owner: str) -> list[str]:
    """Return what is deleted, in this order."""
    selector = quote(f"app.kubernetes.io/managed-by=skyserve,skyserve-owner={owner}")
    return [
        f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}",
        f"/apis/apps/v1/namespaces/{namespace}/deployments?labelSelector={selector}",
        f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}",
        f"/apis/batch/v1/namespaces/{namespace}/cronjobs/{name}?propagationPolicy=Background",
    ]


def main(call: Call, namespace: str, name: str, owner: str, now: float) -> str:
    """Return a sentence about what was done."""
    lease = call("GET", f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
    if lease is None:
        return f"there is no Lease {name}: nothing is deleted"
    if not is_over(lease, now):
        return f"the Lease {name} stands: nothing is deleted"
    for path in steps(namespace, name, owner):
        try:
            call("DELETE", path)
        except PermissionError:
            if "/deployments?" not in path:
                raise
    return f"no controller has renewed the Lease {name}: the Pods of {owner} were deleted"


def in_cluster(method: str, path: str) -> Json | None:
    """Make a call as the Pod's own service account. Raises OSError, PermissionError among them."""
    response = _response(method, path)
    body = response.read()
    if response.status == 404:
        return None
    if response.status >= 400:
        kind = PermissionError if response.status == 403 else OSError
        raise kind(f"{method} {path}: {response.status} {body[:300].decode(errors='replace')}")
    found: Json = json.loads(body)
    return found


def api_now() -> float:
    """Return the UNIX seconds of the API server's clock. Raises OSError, and TypeError or ValueError for a response without a date."""
    return parsedate_to_datetime(_response("GET", "/version").headers["Date"]).timestamp()


def _response(method: str, path: str) -> HTTPResponse:
    host = os.environ.get("SKYSERVE_API") or (
        f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
    )
    folder = Path(os.environ.get("SKYSERVE_ACCOUNT", _ACCOUNT))
    where = urlsplit(host)
    if where.scheme == "https":
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        connection: HTTPConnection = HTTPSConnection(where.netloc, timeout=30, context=context)
    else:
        connection = HTTPConnection(where.netloc, timeout=30)
    connection.request(
        method, path, headers={"Authorization": f"Bearer {(folder / 'token').read_text().strip()}"}
    )
    return connection.getresponse()


if __name__ == "__main__":
    namespace, name, owner = sys.argv[1:4]
    print(main(in_cluster, namespace, name, owner, api_now()))
