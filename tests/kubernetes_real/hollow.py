"""The kubelet of every node of a real cluster, in this process: Pods are processes of this machine, nodes are objects with a heartbeat.

It is the fake's kubelet over another store. Logs and `exec` are served over TLS on one port, which all nodes name.
"""

from __future__ import annotations

import copy
import http.server
import logging
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import urllib3

from tests.clouds.kubernetes import kube_exec
from tests.clouds.kubernetes.kube_nodes import ready
from tests.clouds.kubernetes.kube_services import Services
from tests.clouds.kubernetes.kube_store import Refused, Store, stamp
from tests.clouds.kubernetes.kube_world import start_on_paper
from tests.clouds.kubernetes.kubelet import Kubelet
from tests.kubernetes_real.cluster import ControlPlane, until
from tests.kubernetes_real.real_api import Json, RealApi
from tests.kubernetes_real.real_store import RealStore

_log = logging.getLogger(__name__)
ADDRESS = "127.0.0.1"
_LOOK_S = 0.05
_BEAT_S = 5.0
_LEASES = "kube-node-lease"
_SETTLE_S = 0.5
_INFO = (
    "machineID",
    "systemUUID",
    "bootID",
    "kernelVersion",
    "osImage",
    "containerRuntimeVersion",
    "kubeletVersion",
    "kubeProxyVersion",
    "operatingSystem",
    "architecture",
)
_CORDON = "node.kubernetes.io/unschedulable"
_UNREADY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_ERRORS = (Refused, OSError, urllib3.exceptions.HTTPError)


@dataclass
class Node:
    """What is set about a node."""

    name: str
    zone: str
    labels: Mapping[str, str] = field(default_factory=dict)
    is_spot: bool = False
    gpus: int = 0
    cpus: int = 64
    pods: int = 110

    def body(self) -> Json:
        marks = {
            "kubernetes.io/hostname": self.name,
            "topology.kubernetes.io/zone": self.zone,
            "karpenter.sh/capacity-type": "spot" if self.is_spot else "on-demand",
            **({"nvidia.com/gpu.product": "NVIDIA-L4"} if self.gpus else {}),
            **self.labels,
        }
        taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": marks},
            "spec": {"taints": [taint] if self.gpus else []},
        }

    def room(self) -> Json:
        found = {"cpu": str(self.cpus), "memory": f"{self.cpus * 4}Gi", "pods": str(self.pods)}
        found |= {"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}
        return {"capacity": found, "allocatable": found}


class HollowKubelet(Kubelet):
    """What runs in Pods that exist no more is killed, where their node is not silent."""

    def __init__(self, store: RealStore, root: Path) -> None:
        self.real = store
        self.refused: set[str] = set()  # names of Pods for which it finds no room
        self.on_paper: set[str] = set()  # namespaces whose Pods run at once, without a process
        self.skews: dict[str, float] = {}  # how far the clocks of nodes are ahead
        self._nodes: dict[str, str] = {}  # by uid of a Pod
        super().__init__(cast(Store, store), root)

    def look(self) -> None:
        for pod in self.real.of("pods"):
            node = pod["spec"].get("nodeName", "")
            if node in ("", *self.silent):
                continue
            self._nodes[pod["metadata"]["uid"]] = node
            self.real.skew_s = self.skews.get(node, 0.0)
            try:
                self._tend(pod)
            except _ERRORS as error:
                _log.warning("the Pod %s: %s", pod["metadata"]["name"], error)
        for uid in {uid for uid, _ in self.running if not self.real.knows(uid)}:
            if self._nodes.get(uid) not in self.silent:
                self.kill({"metadata": {"uid": uid}})
        self._write_names()

    def _tend(self, known: Json) -> None:
        if known["metadata"]["namespace"] in self.on_paper:
            self._tend_on_paper(known)
            return
        if known["metadata"]["name"] in self.refused and known["status"].get("phase") == "Pending":
            self.kill(known)
            status = {"phase": "Failed", "reason": "OutOfcpu", "message": "Node has too little: cpu"}
            self.real.update("pods", {**known, "status": {**known["status"], **status}})
            return
        super()._tend(known)

    def _tend_on_paper(self, known: Json) -> None:
        if known["metadata"].get("deletionTimestamp"):
            self.real.remove_pod(known)
        elif known["status"].get("phase") == "Pending":
            pod = copy.deepcopy(known)
            start_on_paper(pod, self.real.clock("node"))
            self.real.update("pods", pod)


class Hollow:
    """The nodes of a cluster. Make them with `add`."""

    def __init__(self, plane: ControlPlane, root: Path, spaces: set[str]) -> None:
        self.api: RealApi = plane.api
        self.store = RealStore(plane.api, spaces)
        self.kubelet = HollowKubelet(self.store, root)
        self.services = Services(cast(Store, self.store))
        self.nodes: dict[str, Node] = {}
        self._cut_off: set[str] = set()  # nodes whose last heartbeat failed
        self._server = _served(self.kubelet, self.store, plane.folder)
        self.port = int(self._server.server_address[1])
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._server.serve_forever, daemon=True),
            threading.Thread(target=self._repeat, args=(self._look, _LOOK_S), daemon=True),
            threading.Thread(target=self._repeat, args=(self._beat, _BEAT_S), daemon=True),
        ]
        for one in self._threads:
            one.start()

    def close(self) -> None:
        self._over.set()
        self.store.close()
        self._server.shutdown()
        self._server.server_close()
        self.services.close()
        for one in self._threads:
            one.join()
        self.kubelet.close()

    # --- nodes

    def add(self, *nodes: Node) -> None:
        """Register nodes; return when the scheduler may use them."""
        for node in nodes:
            self.api.ensure("nodes", "", node.body())
            self._report(node)
            self._renew(node.name)
            self.nodes[node.name] = node
        for node in nodes:
            until(partial(self._is_usable, node.name), f"the node {node.name} has no place")

    def set_pods(self, name: str, count: int) -> None:
        """How many Pods the node takes. The scheduler hears of it a moment later, which nothing shows."""
        node = self.nodes[name]
        if node.pods != count:
            node.pods = count
            self._report(node)
            time.sleep(_SETTLE_S)

    def silence(self, name: str, *, dies: bool = True) -> None:
        """Its kubelet does nothing any more; if the node `dies`, its containers are gone too."""
        self.kubelet.silent.add(name)
        if dies:
            self._kill(name)

    def revive(self, name: str) -> None:
        """A node of that name is back, as after a restart of the machine."""
        self.kubelet.silent.discard(name)
        self.add(self.nodes[name])

    def remove(self, name: str) -> None:
        """The node is gone, its object too."""
        self.silence(name)
        self.api.delete("nodes", "", name)

    def cordon(self, names: Sequence[str], *, on: bool) -> None:
        """Return when the controller has tainted them, or taken its taint away: it would undo other taints written meanwhile."""
        for name in names:
            self.api.patch("nodes", "", name, {"spec": {"unschedulable": on}})
        for name in names:
            until(partial(self._is_settled, name), f"the taint of a cordon of {name} does not come or go")

    def taint(self, name: str, *taints: Json) -> None:
        """Give it these taints; without any those that it had before are gone.

        A controller that had read the node before, for a taint of its own, takes ours away again: an autoscaler would write them again, too.
        """
        wanted = [*self.nodes[name].body()["spec"]["taints"], *taints]
        until(partial(self._keeps, name, wanted), f"{name} does not keep {wanted}")

    def node_of(self, namespace: str, pod: str) -> str:
        return str(self.api.get("pods", namespace, pod)["spec"].get("nodeName", ""))

    # --- inside

    def _kill(self, node: str) -> None:
        for pod in self.store.of("pods"):
            if pod["spec"].get("nodeName") == node:
                self.kubelet.kill(pod)

    def _is_usable(self, name: str) -> bool:
        found = self.api.get("nodes", "", name)
        return not any(one["key"] in _UNREADY for one in found["spec"].get("taints") or ())

    def _keeps(self, name: str, wanted: list[Json]) -> bool:
        self.api.patch("nodes", "", name, {"spec": {"taints": wanted}})
        time.sleep(_SETTLE_S)
        found = self.api.get("nodes", "", name)["spec"].get("taints") or ()
        return {one["key"] for one in wanted} <= {one["key"] for one in found}

    def _is_settled(self, name: str) -> bool:
        spec = self.api.get("nodes", "", name)["spec"]
        return bool(spec.get("unschedulable")) == any(
            one["key"] == _CORDON for one in spec.get("taints") or ()
        )

    def _report(self, node: Node) -> None:
        status = {
            **node.room(),
            "addresses": [{"type": "InternalIP", "address": ADDRESS}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
            "conditions": [ready("True", stamp(self._now(node.name)), "KubeletReady")],
            "nodeInfo": dict.fromkeys(_INFO, "hollow"),
        }
        self.api.patch_status("nodes", "", node.name, {"status": status})

    def _now(self, node: str) -> float:
        return time.time() + self.kubelet.skews.get(node, 0.0)

    def _beat(self) -> None:
        """A kubelet that could not reach the server reports its node as ready once it can again."""
        for name, node in list(self.nodes.items()):
            if name in self.kubelet.silent:
                continue
            try:
                self._renew(name)
                if name in self._cut_off:
                    self._report(node)
                    self._cut_off.discard(name)
            except _ERRORS:
                self._cut_off.add(name)

    def _renew(self, name: str) -> None:
        now = datetime.fromtimestamp(self._now(name), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now}
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name},
            "spec": spec,
        }
        try:
            self.api.patch("leases", _LEASES, name, {"spec": spec})
        except Refused as refused:
            if refused.code != 404:
                raise
            self.api.create("leases", _LEASES, lease)

    def _look(self) -> None:
        self.kubelet.look()
        self.services.look()

    def _repeat(self, act: Callable[[], None], every_s: float) -> None:
        while not self._over.wait(every_s):
            try:
                act()
            except Exception:  # noqa: BLE001 (as a kubelet, it goes on)
                _log.exception("the hollow kubelet")


class _Handler(http.server.BaseHTTPRequestHandler):
    """`GET /containerLogs/NAMESPACE/POD/CONTAINER` and `exec` alike, which the API server asks of a kubelet."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    kubelet: HollowKubelet
    store: RealStore

    def log_message(self, format: str, *args: Any) -> None:
        """Not on the terminal."""

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        what, namespace, name, container = (*parts.path.strip("/").split("/"), "", "", "")[:4]
        asked = urllib.parse.parse_qs(parts.query)
        try:
            pod = self.store.get("pods", namespace, name)
        except Refused:
            self.send_error(404)
            return
        if what == "containerLogs":
            self._send_log(pod, container, {key: values[-1] for key, values in asked.items()})
        elif what == "exec":
            self._execute(pod, container, asked["command"])
        else:
            self.send_error(404)

    do_POST = do_GET

    def _send_log(self, pod: Json, container: str, asked: Mapping[str, str]) -> None:
        since = ""
        if "sinceSeconds" in asked:
            since = stamp(time.time() - int(asked["sinceSeconds"]))[:19]
        text = b"".join(
            (f"{at} ".encode() if asked.get("timestamps") == "true" else b"") + line
            for at, line in self.kubelet.log_of(pod, container)
            if at[:19] >= since
        )
        text = text[: int(asked["limitBytes"])] if "limitBytes" in asked else text
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _execute(self, pod: Json, container: str, command: list[str]) -> None:
        found = self.kubelet.place_of(pod, container)
        if found is None:
            self.send_error(400, "the container does not run")
            return
        self.send_response(101)
        for key, value in kube_exec.accepted(self.headers["Sec-WebSocket-Key"]).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        kube_exec.carry(cast(Any, self.rfile), cast(Any, self.wfile), found[0], command, found[1])


def _served(kubelet: HollowKubelet, store: RealStore, folder: Path) -> http.server.ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"kubelet": kubelet, "store": store})
    server = http.server.ThreadingHTTPServer((ADDRESS, 0), handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "kubelet.crt", folder / "kubelet.key")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server


@contextmanager
def hollow(plane: ControlPlane, root: Path, spaces: set[str]) -> Iterator[Hollow]:
    root.mkdir(parents=True, exist_ok=True)
    made = Hollow(plane, root, spaces)
    try:
        made.store.wait()
        yield made
    finally:
        made.close()
