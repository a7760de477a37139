"""A cluster: its API server's rules (`Store`), a scheduler, a kubelet, and what may go wrong. Time is given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from provisioners.kubernetes.quantities import amount, unix_s
from tests.clouds.kubernetes.kube_admission import Admission
from tests.clouds.kubernetes.kube_apply import applied
from tests.clouds.kubernetes.kube_deployments import Deployments
from tests.clouds.kubernetes.kube_nodes import Nodes, ready
from tests.clouds.kubernetes.kube_scheduler import place, requests
from tests.clouds.kubernetes.kube_services import Services
from tests.clouds.kubernetes.kube_store import Json, Refused, Store, stamp
from tests.clouds.kubernetes.kubelet import Kubelet, natives, set_condition

NAMESPACE = "ml"
GRACE_S = 30


@dataclass
class Troubles:
    """`denied` are verbs and resources, `allowed` the only ones; a cut response is of a request that was carried out."""

    token: str = ""  # that is demanded
    denied: set[tuple[str, str]] = field(default_factory=set)
    allowed: frozenset[tuple[str, str]] | None = None  # by role-based access control; None: everything
    throttled: int = 0
    cut: int = 0
    fail: int = 0  # requests that get 500 before anything is done
    is_mute: bool = False
    crash: tuple[int, bool] | None = (
        None  # the call of that number from now is the last of its caller: before or after
    )
    is_down: bool = False

    def refuses(self, verb: str, resource: str) -> bool:
        asked = (verb, resource)
        return asked in self.denied or (self.allowed is not None and asked not in self.allowed)


class KubeWorld:
    def __init__(self, root: Path | None, now: Callable[[], float], *, strict: bool = True) -> None:
        self.store = Store(now, strict=strict)
        self.kubelet = None if root is None else Kubelet(self.store, root)
        self.troubles = Troubles()
        self.deployments = Deployments(self)
        self.nodes = Nodes(self)
        self.has_disruptions = True  # DisruptionTarget, which clusters have since 1.26
        self.admit: Callable[[Json], object] = lambda pod: (
            None
        )  # a webhook that may change a Pod, as meshes and queues have
        self.services = None if root is None else Services(self.store)
        self.store.orphaned = lambda pod: self.delete(
            "pods", pod["metadata"]["namespace"], pod["metadata"]["name"], {}
        )
        self.admission = Admission()
        self.version = "v1.30.0"
        self.applied: dict[tuple[str, str, str, str], Json] = {}  # by kind, namespace, name and manager
        self.launches: dict[str, int] = {}
        self.counts: dict[str, int] = {}  # requests by verb and resource
        self.create(
            "namespaces", "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
        )

    @property
    def now(self) -> float:
        return self.store.now()

    # --- what there is

    def add_node(
        self,
        name: str,
        zone: str,
        *,
        spot: bool = False,
        gpus: int = 0,
        product: str = "NVIDIA-L4",
        cpus: int = 64,
        pods: int = 110,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        marks = {
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/zone": zone,
            "node.kubernetes.io/instance-type": "g6.8xlarge" if gpus else "m7.8xlarge",
            "karpenter.sh/capacity-type": "spot" if spot else "on-demand",
            **(labels or {}),
        }
        allocatable = {"cpu": f"{cpus * 1000 - 80}m", "memory": f"{cpus * 4}Gi", "pods": str(pods)}
        taints = []
        if gpus:
            marks["nvidia.com/gpu.product"] = product
            allocatable["nvidia.com/gpu"] = str(gpus)
            taints = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
        self.store.create(
            "nodes",
            "",
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": marks},
                "spec": {"taints": taints} if taints else {},
                "status": {
                    "allocatable": allocatable,
                    "capacity": allocatable,
                    "conditions": [ready("True", self.store.stamp("control"), "KubeletReady")],
                },
            },
        )
        self.schedule()

    def set_pods(self, node: str, count: int) -> None:
        """How many Pods a node takes."""
        found = self.store.get("nodes", "", node)
        found["status"]["allocatable"]["pods"] = str(count)
        self.store.update("nodes", found)
        self.schedule()

    def taint(self, node: str, key: str, effect: str = "NoSchedule") -> None:
        """The API sets a time for NoExecute alone."""
        found = self.store.get("nodes", "", node)
        taint = {"key": key, "effect": effect}
        if effect == "NoExecute":
            taint["timeAdded"] = self.store.stamp("api")
        found["spec"].setdefault("taints", []).append(taint)
        self.store.update("nodes", found)

    def pod_names(self, owner: str | None = None) -> list[str]:
        return [
            one["metadata"]["name"]
            for one in self.store.list("pods", None)
            if owner in (None, one["metadata"]["labels"].get("skyserve-owner"))
        ]

    def running(self) -> list[str]:
        """Return the Pods that take room on nodes, or will."""
        return [
            one["metadata"]["name"]
            for one in self.store.list("pods", None)
            if one["status"].get("phase") not in ("Succeeded", "Failed")
        ]

    # --- what the API does

    def create(self, resource: str, namespace: str, body: Json, *, is_dry: bool = False) -> Json:
        """Create an object. Of a dry run nothing is stored, and nothing starts."""
        with self.store.lock:
            if resource == "pods":
                body = copy.deepcopy(body)
                body["spec"].setdefault("terminationGracePeriodSeconds", GRACE_S)
                body["spec"].setdefault("restartPolicy", "Always")
                body["status"] = {"phase": "Pending", "conditions": []}
                self.admit(body)
                if ("pods", namespace, body["metadata"]["name"]) not in self.store.objects:
                    accounts = [
                        one["metadata"]["name"] for one in self.store.list("serviceaccounts", namespace)
                    ]
                    self.admission.admit_pod(body, accounts, self._live())
            if is_dry:
                return self.store.create(resource, namespace, body, is_dry=True)
            if resource == "services":
                body = copy.deepcopy(body)
                if self.services is not None and body["spec"].get("clusterIP") != "None":
                    body["spec"]["clusterIP"] = self.services.address()
                body["spec"].setdefault("clusterIP", "10.0.0.10")
            made = self.store.create(resource, namespace, body)
            if resource == "namespaces":
                self._make_account(made["metadata"]["name"])
            if resource == "pods":
                name = made["metadata"]["name"]
                self.launches[name] = self.launches.get(name, 0) + 1
                self.schedule()
            return made

    def apply(self, resource: str, namespace: str, body: Json, manager: str, *, is_dry: bool = False) -> Json:
        """Server-side apply by a manager who forces it: its fields become those of `body`, and those that it had before go."""
        key, given = (resource, namespace, body["metadata"]["name"]), copy.deepcopy(body)
        with self.store.lock:
            before = self.applied.get((*key, manager), {})
            if key not in self.store.objects:
                made = self.create(resource, namespace, body, is_dry=is_dry)
            elif is_dry:
                self.store.validate(resource, namespace, applied(self.store.get(*key), before, given))
                return self.store.get(*key)
            else:
                known = self.store.get(*key)
                made = self.store.put(*key, applied(known, before, given))
            if not is_dry:
                self.applied[*key, manager] = given
            return made

    def delete(self, resource: str, namespace: str, name: str, options: Json) -> Json:
        with self.store.lock:
            item = self.store.get(resource, namespace, name)
            meta = item["metadata"]
            uid = (options.get("preconditions") or {}).get("uid")
            if uid is not None and uid != meta["uid"]:
                raise Refused(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {resource} "{name}": the UID in the precondition ({uid}) does not match '
                    f"the UID in record ({meta['uid']})",
                )
            grace_s = options.get("gracePeriodSeconds")
            if resource == "deployments" and options.get("propagationPolicy") == "Foreground":
                meta |= {"deletionTimestamp": self.store.stamp("api"), "finalizers": ["foregroundDeletion"]}
                return self.store.update(resource, item)
            if resource != "pods":
                self.store.remove(resource, item)
                return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
            if grace_s is None:
                grace_s = item["spec"]["terminationGracePeriodSeconds"]
            if not item["spec"].get("nodeName") or item["status"]["phase"] in ("Succeeded", "Failed"):
                grace_s = 0  # as the strategy for Pods has it
            if grace_s == 0:
                if self.kubelet is not None and not self.nodes.is_silent(item):
                    self.kubelet.kill(item)
                self.store.remove_pod(item)
                self.schedule()
                return item
            if not meta.get("deletionTimestamp") or grace_s < meta["deletionGracePeriodSeconds"]:
                meta["deletionTimestamp"] = stamp(self.store.clock("api") + grace_s)
                meta["deletionGracePeriodSeconds"] = grace_s
                item = self.store.update(resource, item)
            return item

    def schedule(self) -> None:
        """Place the Pods that wait, oldest first, and say why others cannot be."""
        with self.store.lock:
            waiting = [
                one
                for one in self.store.of("pods")
                if not one["spec"].get("nodeName") and one["status"]["phase"] == "Pending"
            ]
            at = self.store.clock("control")
            for known in sorted(waiting, key=lambda one: int(one["metadata"]["resourceVersion"])):
                pod = copy.deepcopy(known)
                if pod["spec"].get("schedulingGates"):
                    why = "Scheduling is blocked due to non-empty scheduling gates"
                    set_condition(pod, "PodScheduled", False, at, "SchedulingGated", why)
                    self.store.update("pods", pod)
                    continue
                node, why = place(pod, self.store.of("nodes"), self.store.of("pods"))
                if node is None:
                    set_condition(pod, "PodScheduled", False, at, "Unschedulable", why)
                else:
                    pod["spec"]["nodeName"] = node
                    set_condition(pod, "PodScheduled", True, at)
                    if self.kubelet is None:
                        start_on_paper(pod, self.store.clock("node"))
                self.store.update("pods", pod)

    def open_gates(self, name: str) -> None:
        """Nothing holds the Pod back from the scheduler any more."""
        with self.store.lock:
            pod = self.store.get("pods", NAMESPACE, name)
            pod["spec"].pop("schedulingGates", None)
            self.store.update("pods", pod)
            self.schedule()

    def look(self) -> None:
        """One round of the controllers."""
        with self.store.lock:
            if self.kubelet is not None:
                self.kubelet.look()
            else:
                self._end_on_paper()
            self.store.collect()
            self.nodes.look()
            self.deployments.look()
            self.schedule()
            if self.services is not None:
                self.services.look()

    # --- what happens to it

    def disrupt(self, name: str, reason: str, message: str) -> None:
        """A Pod will be evicted: the condition comes first, where the cluster has it."""
        if not self.has_disruptions:
            return
        with self.store.lock:
            pod = self.store.get("pods", NAMESPACE, name)
            set_condition(pod, "DisruptionTarget", True, self.store.clock("api"), reason, message)
            self.store.update("pods", pod)

    def evict(self, name: str) -> None:
        """As the eviction API does, for a node that is drained. Raises Refused where a disruption budget does not allow it."""
        with self.store.lock:
            self.deployments.check_budgets(self.store.get("pods", NAMESPACE, name))
        self.disrupt(name, "EvictionByEvictionAPI", "Eviction API: evicting")
        self.delete("pods", NAMESPACE, name, {})

    def lose(self, name: str) -> None:
        """The node of a Pod is gone, its object too: the garbage collector of Pods has deleted it."""
        with self.store.lock:
            pod = self.store.get("pods", NAMESPACE, name)
            if self.kubelet is not None:
                self.kubelet.kill(pod)
            if self.has_disruptions:
                at = self.store.clock("control")
                why = "PodGC: node no longer exists"
                set_condition(pod, "DisruptionTarget", True, at, "DeletionByPodGC", why)
            pod["status"]["phase"] = "Failed"
            self.store.remove_pod(pod)
            self.schedule()

    def cordon(self, node: str, *, on: bool = True) -> None:
        """The node takes no more Pods."""
        with self.store.lock:
            found = self.store.get("nodes", "", node)
            found["spec"]["unschedulable"] = on
            self.store.update("nodes", found)
            self.schedule()

    def preempt_node(self, node: str) -> None:
        with self.store.lock:
            self.store.remove("nodes", self.store.get("nodes", "", node))
            for pod in [one for one in self.store.of("pods") if one["spec"].get("nodeName") == node]:
                self.lose(pod["metadata"]["name"])

    def refuse_pod(self, name: str) -> None:
        """The kubelet does not accept a Pod that the scheduler has placed: another one was faster."""
        with self.store.lock:
            pod = self.store.get("pods", NAMESPACE, name)
            if self.kubelet is not None:
                self.kubelet.kill(pod)
            pod["status"] |= {
                "phase": "Failed",
                "reason": "OutOfcpu",
                "message": "Node didn't have enough resource: cpu",
            }
            pod["status"].pop("containerStatuses", None)
            self.store.update("pods", pod)

    def close(self) -> None:
        if self.services is not None:
            self.services.close()
        if self.kubelet is not None:
            self.kubelet.close()

    # --- inside

    def _make_account(self, namespace: str) -> None:
        body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        self.store.create("serviceaccounts", namespace, body)

    def _live(self) -> list[Json]:
        return [one for one in self.store.of("pods") if one["status"]["phase"] not in ("Succeeded", "Failed")]

    def _end_on_paper(self) -> None:
        for known in list(self.store.of("pods")):
            deleted_at = unix_s(known["metadata"].get("deletionTimestamp"))
            if (
                deleted_at is not None
                and deleted_at <= self.store.clock("api")
                and not self.nodes.is_silent(known)
            ):
                self.store.remove_pod(known)


def start_on_paper(pod: Json, now: float) -> None:
    """Without a kubelet every Pod runs at once."""
    pod["status"] |= {"phase": "Running", "podIP": "10.0.0.1"}
    both = {"containerStatuses": pod["spec"]["containers"], "initContainerStatuses": natives(pod)}
    for statuses, containers in both.items():
        pod["status"][statuses] = [
            {
                "name": one["name"],
                "image": one["image"],
                "imageID": "",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": stamp(now)}},
            }
            for one in containers
        ]


def free(world: KubeWorld, node: str, resource: str) -> float:
    """Return how much of a resource no Pod requests."""
    has = amount(world.store.get("nodes", "", node)["status"]["allocatable"].get(resource))
    pods = [one for one in world.store.list("pods", None) if one["spec"].get("nodeName") == node]
    return has - sum(requests(one)[resource] for one in pods)
