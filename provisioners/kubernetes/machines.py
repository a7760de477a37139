"""The Pods of one namespace: launched whole or not at all, found, and deleted.

A launch creates the Pod of the head, then what belongs to it, then the Pods of the other nodes. Every name follows from the
token, so that doing it again finds what there is. It waits a moment for the scheduler, because a zone without room is known
within milliseconds, and then everything is deleted again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from provisioners.clock import unix_now
from provisioners.kubernetes import placement, translate
from provisioners.kubernetes.agent_objects import is_agent
from provisioners.kubernetes.api import ConflictError, Json, KubeApi
from provisioners.kubernetes.containers import Pod
from provisioners.kubernetes.errors import CLOUD, wanted_limits
from provisioners.kubernetes.files import PackedFiles, packed
from provisioners.kubernetes.pod_cache import PodCache
from provisioners.kubernetes.pod_state import is_ours, is_over, node_of, was_placed
from provisioners.kubernetes.quantities import rfc3339
from provisioners.kubernetes.settings import Cluster
from provisioners.multi_node import for_each
from provisioners.port.base import Instance, InstanceState, LaunchOrder
from provisioners.port.errors import CapacityError, ProvisionError, RefusedError, TransientError
from provisioners.port.vm import OWNER_TAG, SERVICE_TAG, TOKEN_TAG, machine_token

_AT_ONCE = 8
_LOOK_S = 0.25  # between two looks at the scheduler's decision
_MOST_WAIT_S = 15.0  # in a launch; what needs longer is seen by the watch


class RegionPods:
    """Thread-safe. `cache` learns of everything that a call returns."""

    def __init__(
        self,
        cluster: Cluster,
        api: KubeApi,
        cache: PodCache,
        now: Callable[[], float] = unix_now,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.cluster = cluster
        self.api = api
        self.cache = cache
        self._now = now
        self._sleep = sleep
        self._limited: frozenset[str] = frozenset()  # resources of which the namespace wants limits
        self._warm_nodes = WarmNodes()

    def launch(
        self, order: LaunchOrder, accelerator_labels: Iterable[tuple[str, str]], *, has_node: bool = True
    ) -> Instance:
        """`has_node`: a node that is ready could hold the Pod, as far as is known. Offers may be minutes old."""
        ended = self._ended(order)
        if ended is not None:
            return ended
        if not has_node and self.cluster.schedule_wait_s <= _MOST_WAIT_S and not self._listed(order.token):
            raise CapacityError(
                f"{order.offer.zone} has no node that is ready and takes such a Pod",
                cloud=CLOUD,
                code="NoNode",
                zone=order.offer.zone,
            )
        files = packed(order)
        labels = list(accelerator_labels)
        self.cache.launching(order.token, 1)
        try:
            return self._launch(order, labels, files)
        finally:
            self.cache.launching(order.token, -1)

    def terminate(self, instance: Instance) -> None:
        """Delete the Pods, each marked before as ours to end."""
        pods = {pod["metadata"]["name"]: pod for pod in self.cache.pods(instance.token).values()}
        if not pods:
            pods = {pod["metadata"]["name"]: pod for pod in self._listed(instance.token)}
        self._warm_nodes.note(pods.values())
        heads = [pod["metadata"]["uid"] for pod in pods.values() if pod["metadata"]["name"] == instance.token]
        if instance.id and heads and instance.id not in heads:
            return  # another one of that name
        for_each(_AT_ONCE, self._end, list(pods.values()))

    def pod(self, instance: Instance, rank: int) -> Mapping[str, Any] | None:
        """Return the Pod of a node of the instance, if it exists."""
        found = self.cache.pods(instance.token).get(rank)
        return found if found is not None else self.api.find("pod", machine_token(instance.token, rank))

    def list_owner(self, owner: str) -> None:
        """List the owner's Pods now."""
        found = self.api.list("pod", {OWNER_TAG: owner})
        replicas = [pod for pod in found.items if not is_agent(pod)]
        self.cache.replace(replicas, found.version, owner)

    # --- inside

    def _ended(self, order: LaunchOrder) -> Instance | None:
        """Return the instance if it is gone, or we requested its end: nothing is created by that token again."""
        for pod in self.cache.pods(order.token).values():
            if is_ours(pod) and self.api.find("pod", pod["metadata"]["name"], order.offer.zone) is None:
                self.cache.apply("DELETED", pod)
        known = self.cache.instance(order.token)
        is_ended = known is not None and (known.state.is_gone or known.state is InstanceState.STOPPING)
        return known if is_ended else None

    def _launch(self, order: LaunchOrder, labels: list[tuple[str, str]], files: PackedFiles) -> Instance:
        head = self._create(order, 0, labels, files)
        if is_over(head) or is_ours(head) or head["metadata"].get("deletionTimestamp"):
            return self._shown(order)
        try:
            self._create_parts(order, head, files)
            others = range(1, order.num_nodes)
            for_each(_AT_ONCE, lambda rank: self._create(order, rank, labels, files), others)
            if translate.has_parts(order, files) and translate.COMPLETE_NOTE not in _notes(head):
                self._note(head, translate.COMPLETE_NOTE)
            self._await_places(order)
        except TransientError:
            raise  # the same order again finds what there is
        except ProvisionError as error:
            self._give_back(order, error)
            raise
        return self._shown(order)

    def _create(
        self, order: LaunchOrder, rank: int, labels: list[tuple[str, str]], files: PackedFiles
    ) -> Json:
        zone = order.offer.zone
        name = machine_token(order.token, rank)
        try:
            pod = self._create_limited(order, rank, labels, files)
        except ConflictError:
            found = self.api.find("pod", name, zone)
            if found is None:
                raise TransientError(
                    f"the Pod {name} is just being deleted", cloud=CLOUD, zone=zone
                ) from None
            pod = found
            if (pod["metadata"].get("labels") or {}).get(OWNER_TAG) != order.owner:
                raise RefusedError(
                    f"there is a Pod {name} in {zone.region} that is not ours",
                    cloud=CLOUD,
                    code="NotOurs",
                    zone=zone,
                ) from None
        self.cache.apply("MODIFIED", pod)
        return pod

    def _create_limited(
        self, order: LaunchOrder, rank: int, labels: list[tuple[str, str]], files: PackedFiles
    ) -> Json:
        """Create a Pod. Where the namespace's quota wants limits that it lacks, they are set to what it requests, from then on."""
        while True:
            namespace, limited = self.api.namespace, self._limited
            body = translate.pod_of(order, rank, self.cluster, namespace, labels, files, limited)
            if order.cache is not None and order.cache.claim is None:
                pods = self.cache.of_service(order.owner, order.service)
                placement.prefer(body["spec"], self._warm_nodes.free(order.owner, order.service, pods))
            try:
                return self.api.create("pod", body, order.offer.zone)
            except RefusedError as error:
                wanted = limited | wanted_limits(error.message)
                if wanted == limited:
                    raise
                self._limited = wanted

    def _create_parts(self, order: LaunchOrder, head: Mapping[str, Any], files: PackedFiles) -> None:
        if translate.COMPLETE_NOTE in _notes(head):
            return
        parts = [
            *(("service", one) for one in translate.services_of(order, head)),
            *(("secret", one) for one in translate.secrets_of(order, head, files)),
        ]
        for kind, body in parts:
            try:
                self.api.create(kind, body, order.offer.zone)
            except ConflictError:
                self._check_owner(kind, body, order)

    def _check_owner(self, kind: str, body: Json, order: LaunchOrder) -> None:
        """What exists was made for this very Pod, or is the rest of an earlier one that is just being deleted."""
        name = body["metadata"]["name"]
        found = self.api.find(kind, name, order.offer.zone)
        owners = [] if found is None else found["metadata"].get("ownerReferences") or []
        if [one.get("uid") for one in owners] != [body["metadata"]["ownerReferences"][0]["uid"]]:
            raise TransientError(
                f"the {kind} {name} of an earlier Pod is not gone yet",
                cloud=CLOUD,
                zone=order.offer.zone,
                retry_after_s=5.0,
            )

    def _await_places(self, order: LaunchOrder) -> None:
        """Return once all Pods are on nodes, or after a while. Raises CapacityError if one finds none."""
        until = self._now() + min(_MOST_WAIT_S, self.cluster.schedule_wait_s + 4 * _LOOK_S)
        waiting = [machine_token(order.token, rank) for rank in range(order.num_nodes)]
        while True:
            waiting = [name for name in waiting if not self._has_place(name, order)]
            if not waiting or self._now() >= until:
                return
            self._sleep(_LOOK_S)

    def _has_place(self, name: str, order: LaunchOrder) -> bool:
        pod = self.api.find("pod", name, order.offer.zone)
        if pod is None:
            return True  # deleted meanwhile, which the watch shows
        self.cache.apply("MODIFIED", pod)
        found = self.cache.waits_s(pod)
        if found is not None and found[0] >= self.cluster.schedule_wait_s:
            raise CapacityError(
                f"{order.offer.zone} has no room for the Pod: {found[1]}",
                cloud=CLOUD,
                code="Unschedulable",
                zone=order.offer.zone,
            )
        if found is not None and self.cluster.schedule_wait_s > _MOST_WAIT_S:
            return True  # an autoscaler needs minutes; the watch shows what comes of it
        return was_placed(pod) or is_over(pod) or self.cache.is_gated(pod)

    def _give_back(self, order: LaunchOrder, error: ProvisionError) -> None:
        """Delete what there is of a replica that cannot be launched."""
        try:
            pods = self._listed(order.token)
            if any(was_placed(pod) for pod in pods):
                for_each(_AT_ONCE, self._end, pods)
                return
            for_each(_AT_ONCE, self._delete, pods)
        except ProvisionError as stuck:
            raise TransientError(
                f"{error.message}; what was launched of it is not deleted yet: {stuck.message}",
                cloud=CLOUD,
                zone=order.offer.zone,
                retry_after_s=5.0,
            ) from stuck
        self.cache.forget(order.token)

    def _listed(self, token: str) -> list[Json]:
        return [pod for pod in self.api.list("pod", {TOKEN_TAG: token}).items if not is_agent(pod)]

    def _end(self, pod: Mapping[str, Any]) -> None:
        if not is_ours(pod) and self._note(pod, translate.END_NOTE) is None:
            self.cache.apply("DELETED", pod)
            return
        self._delete(pod)

    def _note(self, pod: Mapping[str, Any], note: str) -> Json | None:
        """Set an annotation; None if the Pod is gone."""
        meta = pod["metadata"]
        body = {"metadata": {"uid": meta["uid"], "annotations": {note: rfc3339(self._now())}}}
        found = self.api.patch("pod", meta["name"], body)
        if found is not None:
            self.cache.apply("MODIFIED", found)
        return found

    def _delete(self, pod: Mapping[str, Any]) -> None:
        """Request its deletion; a Pod on a lost node is gone then, with all that it owns."""
        meta = pod["metadata"]
        is_forced = self.cache.is_beyond_reach(pod)
        found = self.api.delete("pod", meta["name"], meta["uid"], at_once=is_forced)
        if found is not None and found.get("kind") == "Pod":
            self.cache.apply("MODIFIED", found)

    def _shown(self, order: LaunchOrder) -> Instance:
        found = self.cache.instance(order.token)
        if found is None:
            raise TransientError(
                f"the Pod {order.token} was deleted while it was launched", cloud=CLOUD, zone=order.offer.zone
            )
        return found


def _notes(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod["metadata"].get("annotations") or {}


# On which nodes replicas of a service have been, so that a successor is put where weights are.
#
# It is a preference: a node that is full, cordoned or gone stands in no Pod's way. A node on which a replica of the service stays is not
# preferred, as two on one node are lost together. Known is what this process has seen.

MOST = 16  # nodes of a service, the last ones


class WarmNodes:
    """Of one namespace. Thread-safe."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str], dict[str, None]] = {}  # by owner and service, the last one last
        self._lock = threading.Lock()

    def note(self, pods: Iterable[Pod]) -> None:
        """Remember the nodes of these Pods."""
        with self._lock:
            for pod in pods:
                labels, node = pod["metadata"].get("labels") or {}, node_of(pod)
                if node:
                    nodes = self._nodes.setdefault(
                        (labels.get(OWNER_TAG, ""), labels.get(SERVICE_TAG, "")), {}
                    )
                    nodes.pop(node, None)
                    nodes[node] = None
                    for old in list(nodes)[:-MOST]:
                        del nodes[old]

    def free(self, owner: str, service: str, pods: Sequence[Pod]) -> list[str]:
        """Return the nodes that replicas of the service have left; `pods` are all of it that exist."""
        self.note(pods)
        staying = {
            node_of(pod) for pod in pods if not is_over(pod) and not pod["metadata"].get("deletionTimestamp")
        }
        with self._lock:
            return [node for node in self._nodes.get((owner, service), ()) if node not in staying]
