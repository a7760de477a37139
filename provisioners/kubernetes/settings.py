"""What config.yaml says about clusters, as values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from provisioners.port.lease import LEASE_S

DEFAULT_IMAGE = "python:3.12-slim"
CACHE_PATH = "/var/lib/skyserve/cache"
SCHEDULE_WAIT_S = 10.0
GRACE_S = 30


@dataclass(frozen=True, slots=True)
class NodePrice:
    """USD per hour of one accelerator, or of one Pod without any."""

    usd_hour: float = 0.0
    spot_usd_hour: float | None = None


@dataclass(frozen=True, slots=True)
class NodePool:
    """Nodes that exist only while something needs them, so that the cluster does not list them.

    `accelerators` is one kind and how many a node has; `labels` are those of its nodes.
    """

    zone: str
    accelerator: str | None = None
    count: int = 0
    cpus: float = 4.0
    memory_gb: float = 16.0
    spot: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """One namespace of one cluster. `region` is our name of it, `context` that of the kubeconfig (None: the current one).

    `namespace` None is that of the context. `schedule_wait_s` is how long a Pod may be unschedulable before the zone counts
    as having no room: seconds where the number of nodes is fixed, minutes where an autoscaler adds some.
    `agent_image` is that of load balancer agents, which cannot be here without; clients come to a Service of `service_type`.
    Below `cache_path` of the nodes are the folders that outlive replicas.
    `pod` is a patch over the Pods of replicas, `agent_pod` over those of load balancers (`pod_rules`).
    With `reaper_account` Pods that no controller has visited for `dead_man_s` are deleted by a CronJob of that service account.
    """

    region: str
    context: str | None = None
    namespace: str | None = None
    is_first: bool = True
    schedule_wait_s: float = SCHEDULE_WAIT_S
    image: str = DEFAULT_IMAGE
    pools: Sequence[NodePool] = ()
    prices: Mapping[str, NodePrice] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    gpu_resource: str = ""
    service_account: str | None = None
    priority_class: str | None = None
    runtime_class: str | None = None
    reaper_account: str | None = None
    reaper_image: str = DEFAULT_IMAGE
    agent_image: str | None = None
    service_type: str = "ClusterIP"
    service_annotations: Mapping[str, str] = field(default_factory=dict)
    dead_man_s: int = LEASE_S
    pod: Mapping[str, Any] = field(default_factory=dict)
    agent_pod: Mapping[str, Any] = field(default_factory=dict)
    cache_path: str = CACHE_PATH

    def is_meant(self, region: str | None) -> bool:
        """Return whether a service file that names `region` means this namespace.

        A context alone means the first of its namespaces.
        """
        if region is None or region == "*":
            return self.is_first
        if region == self.region:
            return True
        return self.namespace is not None and region == f"{self.region}:{self.namespace}"
