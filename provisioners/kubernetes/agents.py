"""The load balancer agents of one namespace: launched, given their release, and deleted.

An agent is a Deployment whose name is its token, so that launching it twice is one. A node that is cordoned cannot be drained while the only
Pod of an agent is on it, as the PodDisruptionBudget has it: the agent is rolled out again, so that its next Pod is ready elsewhere
before this one goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from policies.model import Zone
from provisioners.kubernetes import agent_objects as objects
from provisioners.kubernetes.agent_cache import AgentCache, is_ours, notes_of
from provisioners.kubernetes.api import ConflictError, KubeApi
from provisioners.kubernetes.errors import CLOUD
from provisioners.kubernetes.quantities import rfc3339
from provisioners.kubernetes.settings import Cluster
from provisioners.port.agents import AgentProcess, AgentRelease
from provisioners.port.base import Instance, InstanceState, LaunchOrder
from provisioners.port.errors import ProvisionError, RefusedError, TransientError
from provisioners.port.vm import OWNER_TAG

Json = dict[str, Any]

_TRIES = 5


class RegionAgents:
    """Thread-safe. `cache` learns of everything that a call returns."""

    def __init__(self, cluster: Cluster, api: KubeApi, cache: AgentCache, now: Callable[[], float]) -> None:
        self.cluster = cluster
        self.api = api
        self.cache = cache
        self._now = now

    def launch(self, order: LaunchOrder) -> Instance:
        known = self.cache.instance(order.token)
        if known is not None and (known.state.is_gone or known.state is InstanceState.STOPPING):
            return known
        deployment = self._create(order)
        for kind, body in objects.parts_of(order, deployment, self.cluster):
            made = self._ensure(kind, body, order.offer.zone)
            if kind == "service":
                self.cache.take_service(order.token, made)
        found = self.cache.instance(order.token)
        if found is None:
            raise TransientError(
                f"the Deployment {order.token} is just being deleted", cloud=CLOUD, zone=order.offer.zone
            )
        return found

    def look_up_services(self, owner: str) -> None:
        """Find the addresses of agents that have none yet. Raises ProvisionError."""
        for token in self.cache.without_address(owner):
            self.cache.take_service(token, self.api.find("service", objects.service_name(token)))

    def run(self, instance: Instance, release: AgentRelease) -> Sequence[AgentProcess]:
        deployment = self._known(instance)
        for _ in range(_TRIES):
            moved_from = self.cache.moved_from(instance.token, deployment)
            found = notes_of(deployment["spec"]["template"]["metadata"])
            if found == (release.name, moved_from) and deployment["spec"].get("replicas") == 1:
                break
            files = objects.files_of(release, deployment)
            if files is not None:
                self._ensure("secret", files, instance.zone)
            wanted = objects.with_release(deployment, release, self.cluster, moved_from)
            replaced = self._replace(deployment, wanted)
            if replaced is None:
                raise _gone(instance)
            deployment = replaced
        return self.cache.processes(instance.token)

    def terminate(self, instance: Instance) -> bool:
        """Return whether it is an agent: then all of it goes."""
        deployment = self.api.find("deployment", instance.token)
        for _ in range(_TRIES):
            if deployment is None or not objects.is_of(instance, deployment):
                if deployment is None:
                    self.cache.gone(instance.token)
                return self.cache.has(instance.token)
            if is_ours(deployment):
                break
            wanted = objects.ended(deployment, rfc3339(self._now()))
            deployment = self._replace(deployment, wanted)
        if deployment is not None:
            self.api.delete("deployment", instance.token, deployment["metadata"]["uid"], after_parts=True)
        for pod in self.cache.beyond_reach(instance.token):
            self.api.delete("pod", pod["metadata"]["name"], pod["metadata"]["uid"], at_once=True)
        return True

    # --- inside

    def _create(self, order: LaunchOrder) -> Json:
        zone = order.offer.zone
        try:
            found: Json | None = self.api.create(
                "deployment", objects.deployment_of(order, self.cluster), zone
            )
        except ConflictError:
            found = self.api.find("deployment", order.token, zone)
        if found is None:
            raise TransientError(
                f"the Deployment {order.token} is just being deleted", cloud=CLOUD, zone=zone
            )
        if found["metadata"].get("labels", {}).get(OWNER_TAG) != order.owner:
            raise RefusedError(
                f"there is a Deployment {order.token} in {zone.region} that is not ours",
                cloud=CLOUD,
                code="NotOurs",
                zone=zone,
            )
        self.cache.apply("MODIFIED", found)
        return found

    def _ensure(self, kind: str, body: Json, zone: Zone) -> Json:
        """Return the object, which exists then and belongs to the same Deployment."""
        name = body["metadata"]["name"]
        try:
            return self.api.create(kind, body, zone)
        except ConflictError:
            if kind == "pod_disruption_budget":
                return body  # nothing reads it, and its name is the token's
            found = self.api.find(kind, name, zone)
        owners = [] if found is None else found["metadata"].get("ownerReferences") or []
        if found is None or [one.get("uid") for one in owners] != [
            one["uid"] for one in body["metadata"]["ownerReferences"]
        ]:
            raise TransientError(
                f"the {kind} {name} of an earlier agent is not gone yet",
                cloud=CLOUD,
                zone=zone,
                retry_after_s=5.0,
            )
        return found

    def _replace(self, before: Json, wanted: Json) -> Json | None:
        """Return the Deployment as it is then: another one than `wanted` if it had changed meanwhile."""
        name = str(before["metadata"]["name"])
        try:
            found = self.api.replace("deployment", name, wanted)
        except ConflictError:
            found = self.api.find("deployment", name)
        if found is not None:
            self.cache.apply("MODIFIED", found)
        return found

    def _known(self, instance: Instance) -> Json:
        found = self.cache.deployment(instance.token) or self.api.find("deployment", instance.token)
        if found is None or not objects.is_of(instance, found) or is_ours(found):
            raise _gone(instance)
        return found


def _gone(instance: Instance) -> ProvisionError:
    return TransientError(
        f"the Deployment {instance.token} does not exist any more", cloud=CLOUD, zone=instance.zone
    )
