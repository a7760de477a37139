"""The objects of a launch sent to the API server as a dry run: admission decides on them as on real ones, and nothing is created.

So quotas, LimitRanges, PodSecurity, webhooks, and names of service accounts and classes that do not exist are found before anything is
launched. Where the namespace's quota wants limits, they are set as a launch would set them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from provisioners.kubernetes import agent_objects, translate
from provisioners.kubernetes.api import ConflictError, KubeApi
from provisioners.kubernetes.errors import CLOUD, wanted_limits
from provisioners.kubernetes.files import PackedFiles
from provisioners.kubernetes.settings import Cluster
from provisioners.port.agents import AgentRelease
from provisioners.port.base import LaunchOrder
from provisioners.port.errors import ProvisionError, RefusedError

Json = dict[str, Any]
CLAIM = "persistent_volume_claim"
_UID = "00000000-0000-0000-0000-000000000000"


class Rehearsed(NamedTuple):
    """What became of one object: `error` None is accepted. `limited` are the resources whose limits were set for a quota."""

    kind: str
    error: ProvisionError | None = None
    limited: frozenset[str] = frozenset()


def of_replica(
    cluster: Cluster, api: KubeApi, order: LaunchOrder, labels: Iterable[tuple[str, str]]
) -> Iterator[Rehearsed]:
    """Yield what the server says of each object of a replica: its Pod, its Secrets, its Services, and the claims that it names."""
    order = replace(order, token=f"check-{secrets.token_hex(4)}", workdir=None, file_mounts={})
    head, accelerator_labels, files = (
        {"metadata": {"name": order.token, "uid": _UID}},
        list(labels),
        PackedFiles(),
    )
    yield _of_pod(
        api,
        lambda limited: translate.pod_of(
            order, 0, cluster, api.namespace, accelerator_labels, files, limited
        ),
    )
    parts = [
        *(("service", one) for one in translate.services_of(order, head)),
        *(("secret", one) for one in translate.secrets_of(order, head, files)),
    ]
    for kind, body in parts:
        yield _of(api, kind, body)
    pod = translate.pod_of(order, 0, cluster, api.namespace, accelerator_labels, files)
    for volume in pod["spec"]["volumes"]:
        name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if name:
            yield _of_claim(api, str(name), is_shared=volume["name"] == translate.CACHE_VOLUME)


def of_agent(cluster: Cluster, api: KubeApi, order: LaunchOrder) -> Iterator[Rehearsed]:
    """Yield the same of a load balancer: its Deployment and the Pod of that, its PodDisruptionBudget, Service and Secret."""
    order = replace(order, token=f"check-{secrets.token_hex(4)}")
    deployment = agent_objects.deployment_of(order, cluster)
    known = {**deployment, "metadata": {**deployment["metadata"], "uid": _UID}}
    release = AgentRelease("check", ("--port", "8000"), (agent_objects.DEFAULT_PORT,))
    template = agent_objects.with_release(known, release, cluster, "")["spec"]["template"]
    yield _of(api, "deployment", deployment)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": {**template["metadata"], "name": order.token},
    }
    yield _of(api, "pod", pod)
    for kind, body in agent_objects.parts_of(order, known, cluster):
        yield _of(api, kind, body)


def _of_claim(api: KubeApi, name: str, *, is_shared: bool) -> Rehearsed:
    """A server admits a Pod whose claim is not there, and no node ever takes it. A claim that `is_shared` is of all nodes."""
    try:
        found = api.find("persistent_volume_claim", name)
    except ProvisionError as error:
        return Rehearsed(CLAIM, error)
    modes = [] if found is None else (found.get("spec") or {}).get("accessModes") or []
    if found is not None and (not is_shared or "ReadWriteMany" in modes):
        return Rehearsed(CLAIM)
    if found is not None:
        message = (
            f"the PersistentVolumeClaim {name} is {' and '.join(modes)}, so the next replica waits for it on any other node: "
            "for `cache` make one with accessModes: [ReadWriteMany], of a storage class that has it"
        )
        return Rehearsed(CLAIM, RefusedError(message, cloud=CLOUD, code="AccessMode"))
    message = f"there is no PersistentVolumeClaim {name} in the namespace {api.namespace}: make it first"
    return Rehearsed(CLAIM, RefusedError(message, cloud=CLOUD, code="NotFound"))


def _of_pod(api: KubeApi, body_of: Any) -> Rehearsed:
    limited: frozenset[str] = frozenset()
    while True:
        found = _of(api, "pod", body_of(limited))
        wanted = limited | wanted_limits("" if found.error is None else found.error.message)
        if wanted == limited:
            return found._replace(limited=limited)
        limited = wanted


def _of(api: KubeApi, kind: str, body: Json) -> Rehearsed:
    # An owner that does not exist is no matter of admission, but a cluster may look for it.
    meta = {key: value for key, value in body["metadata"].items() if key != "ownerReferences"}
    try:
        api.create(kind, {**body, "metadata": meta}, is_dry=True)
    except ConflictError:
        pass
    except ProvisionError as error:
        return Rehearsed(kind, error)
    return Rehearsed(kind)
