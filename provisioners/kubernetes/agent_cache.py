"""What is known of the load balancer agents of one namespace: fed by the watch of Deployments, by that of Pods, and by our own calls.

An object is replaced only by one of a higher resource version. An agent that is gone is kept for an hour, and shown as terminated or preempted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from policies.model import CapacityType, Zone
from provisioners.kubernetes import agent_objects as objects
from provisioners.kubernetes.errors import CLOUD
from provisioners.kubernetes.network import endpoint_of
from provisioners.kubernetes.node_cache import NodeCache
from provisioners.kubernetes.placement import NO_ZONE
from provisioners.kubernetes.pod_state import (
    Verdict,
    is_beyond_reach,
    node_of,
    seen_of,
    unschedulable,
    verdict_of,
)
from provisioners.kubernetes.settings import Cluster
from provisioners.kubernetes.sightings import Instant, Sightings
from provisioners.kubernetes.translate import END_NOTE, PORT_NOTE, ZONE_NOTE
from provisioners.port.agents import AgentProcess
from provisioners.port.base import Instance, InstanceState
from provisioners.port.vm import OWNER_TAG, REPLICA_TAG, SERVICE_TAG, TOKEN_TAG

Json = dict[str, Any]

KEPT_S = 3600.0
_S = InstanceState


@dataclass(slots=True)
class _Agent:
    """What is known of one agent.

    `address` is that of its Service; None while there is no Service, or the Service has no address. `has_service` None: the
    Service was not looked up yet. `has_run`: a Pod of the agent was ready once, so that a failure is not one of its setup.
    `ended_at`: when (steady seconds) it was seen to be gone. `closed_at`: when (UNIX seconds) its deletion was seen.
    """

    deployment: Json
    address: str | None = None
    has_service: bool | None = None
    has_run: bool = False
    ended_at: float | None = None
    closed_at: float | None = None


class AgentCache:
    """What is known of the agents. Thread-safe.

    `changed` is called without the lock when a watch has changed an instance.
    """

    def __init__(self, cluster: Cluster, at: Callable[[], Instant], nodes: NodeCache) -> None:
        self.cluster = cluster
        self.changed: Callable[[], None] = _ignore
        self._at = at
        self._nodes = nodes
        self._agents: dict[str, _Agent] = {}
        self._pods: dict[str, dict[str, Json]] = {}  # by token and uid
        self._seen: dict[str, Sightings] = {}  # by uid of a Pod
        self._closing: frozenset[str] = frozenset()  # nodes that are cordoned
        self._announced: list[Instance] = []
        self._lock = threading.RLock()

    # --- what comes in

    def replace(self, items: Iterable[Json], version: str) -> None:
        """Take a list of all our Deployments. One that is not in it is gone, unless it was made after the list."""
        listed = [one for one in items if objects.is_agent(one)]
        uids = {one["metadata"]["uid"] for one in listed}
        with self._lock:
            for one in listed:
                self._put(one)
            for agent in list(self._agents.values()):
                if agent.deployment["metadata"]["uid"] not in uids and not _is_later(
                    agent.deployment, version
                ):
                    self._end(agent)
        self._announce()

    def apply(self, kind: str, item: Mapping[str, Any]) -> None:
        if not objects.is_agent(item):
            return
        with self._lock:
            if kind != "DELETED":
                self._put(dict(item))
            else:
                agent = self._agents.get(item["metadata"]["name"])
                if agent is not None and agent.deployment["metadata"]["uid"] == item["metadata"]["uid"]:
                    agent.deployment = dict(item)
                    self._end(agent)
        self._announce()

    def replace_pods(self, pods: Iterable[Json]) -> None:
        with self._lock:
            self._pods.clear()
            for pod in pods:
                self._put_pod(pod)
            there = {uid for own in self._pods.values() for uid in own}
            self._seen = {uid: seen for uid, seen in self._seen.items() if uid in there}
        self._announce()

    def apply_pod(self, kind: str, pod: Mapping[str, Any]) -> None:
        with self._lock:
            if kind == "DELETED":
                self._pods.get(_token(pod), {}).pop(pod["metadata"]["uid"], None)
                self._seen.pop(pod["metadata"]["uid"], None)
            else:
                self._put_pod(pod)
        self._announce()

    def take_nodes(self, cordoned: Iterable[str]) -> None:
        with self._lock:
            self._closing = frozenset(cordoned)

    def take_service(self, token: str, service: Json | None) -> None:
        with self._lock:
            agent = self._agents.get(token)
            if agent is not None:
                agent.has_service = service is not None
                agent.address = None if service is None else _address(service)

    def gone(self, token: str) -> None:
        """Note that the API has no such Deployment."""
        with self._lock:
            agent = self._agents.get(token)
            if agent is not None:
                self._end(agent)

    # --- what goes out

    def instances(self, owner: str) -> list[Instance]:
        limit = self._at().steady - KEPT_S
        with self._lock:
            for token, agent in list(self._agents.items()):
                if agent.ended_at is not None and agent.ended_at < limit:
                    del self._agents[token]
            found = [self._shown(agent) for agent in self._agents.values()]
        return [one for one in found if one.owner == owner]

    def instance(self, token: str) -> Instance | None:
        with self._lock:
            agent = self._agents.get(token)
            return None if agent is None else self._shown(agent)

    def deployment(self, token: str) -> Json | None:
        """Return the Deployment, if it exists as far as is known."""
        with self._lock:
            agent = self._agents.get(token)
            return None if agent is None or agent.ended_at is not None else agent.deployment

    def has(self, token: str) -> bool:
        with self._lock:
            return token in self._agents

    def newest_pod(self, token: str) -> Mapping[str, Any] | None:
        """Return the Pod whose log is that of the agent."""
        pods = self.pods_of(token)
        return pods[-1] if pods else None

    def without_address(self, owner: str) -> list[str]:
        """Return the tokens of live agents that have no address yet, so that their Services must be looked up."""
        with self._lock:
            return [
                token
                for token, agent in self._agents.items()
                if agent.address is None
                and agent.ended_at is None
                and not is_ours(agent.deployment)
                and agent.deployment["metadata"]["labels"].get(OWNER_TAG) == owner
            ]

    def moved_from(self, token: str, deployment: Json) -> str:
        """Return the MOVED_NOTE that the template should have: a new one if its Pod is on a cordoned node, else the present one."""
        now = notes_of(deployment["spec"]["template"]["metadata"])[1]
        pods = self.pods_of(token)
        newest = pods[-1] if pods else None
        if newest is None or _notes(newest)[1] != now:
            return now  # a roll-out is under way
        node = (newest.get("spec") or {}).get("nodeName")
        with self._lock:
            return f"{node}/{newest['metadata']['uid']}" if node in self._closing else now

    def beyond_reach(self, token: str) -> list[Json]:
        """Return the Pods of an agent that are on lost nodes, so that nothing there will remove them."""
        now = self._at().steady
        with self._lock:
            return [
                pod
                for uid, pod in self._pods.get(token, {}).items()
                if is_beyond_reach(self._seen.get(uid, {}), now, self._nodes.fate(node_of(pod)))
            ]

    def processes(self, token: str) -> list[AgentProcess]:
        with self._lock:
            return [self._process(pod) for pod in self.pods_of(token)]

    def pods_of(self, token: str) -> list[Json]:
        """Return the Pods of an agent that have not ended, the oldest first."""
        with self._lock:
            agent = self._agents.get(token)
            newest = {} if agent is None else agent.deployment["spec"]["template"]["metadata"]
            pods = [
                pod
                for pod in self._pods.get(token, {}).values()
                if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
            ]
        return sorted(
            pods,
            key=lambda pod: (_notes(pod) == notes_of(newest), pod["metadata"].get("creationTimestamp")),
        )

    # --- inside

    def _announce(self) -> None:
        """Call `changed` if an instance differs from before."""
        with self._lock:
            shown = [self._shown(agent) for agent in self._agents.values()]
            is_news, self._announced = shown != self._announced, shown
        if is_news:
            self.changed()

    # --- inside, with the lock held

    def _process(self, pod: Json) -> AgentProcess:
        meta, status = pod["metadata"], pod.get("status") or {}
        containers = status.get("containerStatuses") or ()
        is_running = any((one.get("state") or {}).get("running") for one in containers)
        address = endpoint_of(status.get("podIP"), objects.ADMIN_PORT) if is_running else None
        release = _notes(pod)[0]
        waiting = unschedulable(self._seen.get(meta["uid"], {}))
        held = [(one.get("state") or {}).get("waiting") or {} for one in containers]
        why = "" if waiting is None else waiting.text
        why = why or next((f"{one.get('reason')}: {one.get('message') or ''}" for one in held if one), "")
        is_leaving = bool(meta.get("deletionTimestamp"))
        return AgentProcess(
            meta["uid"], release, address, is_leaving, why.rstrip(": "), _is_ready(status) and not is_leaving
        )

    def _put(self, deployment: Json) -> None:
        deployment["metadata"].pop("managedFields", None)
        token = _token(deployment)
        known = self._agents.get(token)
        if known is None:
            self._agents[token] = _Agent(deployment)
        elif _is_later(deployment, _version(known.deployment)):
            if known.deployment["metadata"]["uid"] != deployment["metadata"]["uid"]:
                self._agents[token] = _Agent(deployment)
            elif known.ended_at is None:
                known.deployment = deployment
        agent = self._agents[token]
        if agent.closed_at is None and agent.deployment["metadata"].get("deletionTimestamp"):
            agent.closed_at = self._at().unix

    def _put_pod(self, pod: Mapping[str, Any]) -> None:
        own = self._pods.setdefault(_token(pod), {})
        known = own.get(pod["metadata"]["uid"])
        if known is None or _is_later(pod, _version(known)):
            uid = pod["metadata"]["uid"]
            own[uid] = dict(pod)
            self._seen[uid] = seen_of(pod, self._seen.get(uid, {}), self._at())
        agent = self._agents.get(_token(pod))
        if agent is not None and _is_ready(pod.get("status") or {}):
            agent.has_run = True

    def _end(self, agent: _Agent) -> None:
        if agent.ended_at is None:
            agent.ended_at = self._at().steady

    def _shown(self, agent: _Agent) -> Instance:
        meta = agent.deployment["metadata"]
        labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
        made = Instance(
            id=meta["uid"],
            token=labels.get(TOKEN_TAG, meta["name"]),
            owner=labels.get(OWNER_TAG, ""),
            service=labels.get(SERVICE_TAG, ""),
            replica_id=int(labels.get(REPLICA_TAG, "0")),
            zone=Zone(CLOUD, self.cluster.region, notes.get(ZONE_NOTE, NO_ZONE)),
            capacity_type=CapacityType.ON_DEMAND,
            state=_S.PENDING,
        )
        if agent.ended_at is not None:
            return replace(made, state=_S.TERMINATED if is_ours(agent.deployment) else _S.PREEMPTED)
        if is_ours(agent.deployment):
            return replace(made, state=_S.STOPPING)
        if agent.has_service is not True:
            return made if agent.has_service is None else replace(made, state=_S.UNSUPERVISED)
        failed = None if agent.has_run else self._failure(made.token)
        if failed is not None:
            return replace(made, state=failed.state, message=failed.message, refusal=failed.refusal)
        endpoint = endpoint_of(agent.address, int(notes.get(PORT_NOTE) or objects.DEFAULT_PORT))
        return replace(
            made,
            state=_S.SETUP if endpoint is None else _S.RUNNING,
            endpoint=endpoint,
            preempt_at=agent.closed_at,
        )

    def _failure(self, token: str) -> Verdict | None:
        """Return the state of the agent's only Pod, if no node takes it, or its image cannot be pulled."""
        pods = self.pods_of(token)
        if len(pods) != 1:
            return None
        (pod,) = pods
        seen, fate = self._seen.get(pod["metadata"]["uid"], {}), self._nodes.fate(node_of(pod))
        shown = verdict_of(pod, seen, self._at().steady, self.cluster.schedule_wait_s, fate)
        return shown if shown.state in (_S.BROKEN, _S.SETUP_FAILED) else None


def _address(service: Mapping[str, Any]) -> str | None:
    spec = service.get("spec") or {}
    if spec.get("type") != "LoadBalancer":
        found = spec.get("clusterIP")
        return None if found in (None, "", "None") else str(found)
    ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()
    return next((one.get("ip") or one.get("hostname") for one in ingress), None)


def _notes(pod: Mapping[str, Any]) -> tuple[str, str]:
    return notes_of(pod["metadata"])


def notes_of(meta: Mapping[str, Any]) -> tuple[str, str]:
    """Return the release of a Pod or a template, and from which node it was moved."""
    notes = meta.get("annotations") or {}
    return str(notes.get(objects.RELEASE_NOTE) or ""), str(notes.get(objects.MOVED_NOTE) or "")


def is_ours(deployment: Mapping[str, Any]) -> bool:
    """Return whether we requested the deletion of a Deployment, as for Pods (`pod_state.is_ours`)."""
    return END_NOTE in (deployment["metadata"].get("annotations") or {})


def _is_ready(status: Mapping[str, Any]) -> bool:
    """Return whether Services lead to the Pod of that status."""
    conditions = status.get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _token(item: Mapping[str, Any]) -> str:
    return str((item["metadata"].get("labels") or {}).get(TOKEN_TAG, item["metadata"]["name"]))


def _version(item: Mapping[str, Any]) -> str:
    return str(item["metadata"].get("resourceVersion", ""))


def _number(item: Mapping[str, Any]) -> int:
    return int(_version(item)) if _version(item).isdigit() else 0


def _is_later(item: Mapping[str, Any], version: str) -> bool:
    return _number(item) > (int(version) if version.isdigit() else 0)


def _ignore() -> None:
    """Do nothing: the callback before one is set."""
