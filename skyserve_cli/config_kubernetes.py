"""The section `clouds.kubernetes` of `config.yaml`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from provisioners.kubernetes.pod_patch import laid_over
from provisioners.kubernetes.pod_rules import AGENT, REPLICA, Own, problems
from provisioners.kubernetes.pod_schema import misfits
from provisioners.kubernetes.settings import (
    CACHE_PATH,
    DEFAULT_IMAGE,
    SCHEDULE_WAIT_S,
    Cluster,
    NodePool,
    NodePrice,
)
from skyserve_cli.config_section import CloudConfig, Strict

_DNS = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_FOLDER = re.compile(
    r"/(?!(bin|boot|dev|etc|lib[0-9x]*|proc|root|run|sbin|sys|tmp|usr)/)[A-Za-z0-9_-][A-Za-z0-9._-]*"
    r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*){1,20}"
)
_CURRENT = "default"  # our name of the cluster if config.yaml names none


def _fits(own: Own) -> Callable[[object], object]:
    def check(patch: object) -> object:
        for problem in problems(patch, own):
            raise ValueError(str(problem))
        return patch

    return check


Pod = Annotated[dict[str, Any], BeforeValidator(_fits(REPLICA))]
AgentPod = Annotated[dict[str, Any], BeforeValidator(_fits(AGENT))]
_POD = "what to change in the Pods of replicas, a strategic merge patch; a service file cannot undo it"
_AGENT_POD = "the same for the Pods of load balancers"


class PriceConfig(Strict):
    usd_hour: float = Field(
        default=0.0, ge=0, le=10_000, description="of one accelerator, or of a Pod without any"
    )
    spot_usd_hour: float | None = Field(default=None, ge=0, le=10_000, description="the same on spot nodes")


class PoolConfig(Strict):
    """Nodes that exist only while something needs them."""

    zone: str = Field(description="value of the label topology.kubernetes.io/zone of its nodes")
    accelerators: dict[str, int] = Field(
        default={}, max_length=1, description="one kind, and how many of it a node has, like {L4: 1}"
    )
    cpus: float = Field(default=4.0, gt=0, le=1024, description="of a node, that Pods may request")
    memory_gb: float = Field(default=16.0, gt=0, le=32_768, description="of a node, that Pods may request")
    spot: bool = Field(default=False, description="whether its nodes are spot nodes")
    labels: dict[str, str] = Field(
        default={}, description="of its nodes; of a pool with accelerators those that name them"
    )

    @field_validator("accelerators")
    @classmethod
    def _whole(cls, accelerators: dict[str, int]) -> dict[str, int]:
        if any(count < 1 for count in accelerators.values()):
            raise ValueError("must count whole accelerators, like {L4: 1}")
        return accelerators


class ContextConfig(Strict):
    """One cluster."""

    context: str | None = Field(
        default=None, description="of the kubeconfig; by default the one of this name"
    )
    namespaces: tuple[str, ...] = Field(
        default=(), description="in which replicas may be, the usual one first; by default the context's"
    )
    schedule_wait_seconds: float = Field(
        default=SCHEDULE_WAIT_S,
        gt=0,
        le=3600,
        description="how long a Pod may find no node until the zone counts as full; 600 where an autoscaler adds nodes",
    )
    pools: tuple[PoolConfig, ...] = Field(
        default=(), description="nodes that do not exist until they are needed"
    )
    prices: dict[str, PriceConfig] = Field(
        default={}, description="by accelerator, `cpu` for a Pod without any; what is not named is free"
    )
    node_selector: dict[str, str] = Field(default={}, description="labels of the only nodes to use")
    tolerations: tuple[dict[str, Any], ...] = Field(
        default=(), description="of Pods, beside those of GPU and spot nodes"
    )
    gpu_resource: str = Field(
        default="", description="by which nodes offer GPUs, if not the vendor's usual one"
    )
    service_account: str | None = Field(
        default=None, description="of Pods, whose token they get; by default they get none"
    )
    priority_class: str | None = Field(default=None, description="of Pods")
    reaper_service_account: str | None = Field(
        default=None,
        description="of a CronJob that deletes Pods whose controller is gone; `serve check --policy kubernetes-reaper` prints it",
    )
    reaper_image: str = Field(default=DEFAULT_IMAGE, description="image of that CronJob, with python3")
    dead_man_minutes: int = Field(
        default=4320,
        ge=10,
        le=43200,
        description="how long Pods may be without a controller, with a reaper_service_account",
    )
    runtime_class: str | None = Field(default=None, description="of Pods")
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(
        default="ClusterIP",
        description="of the Services of load balancers; with LoadBalancer they have an address outside the cluster",
    )
    service_annotations: dict[str, str] = Field(
        default={}, description="of these Services, by which vendors choose the kind of load balancer"
    )

    cache_path: str = Field(
        default=CACHE_PATH, description="folder of the nodes that `cache: node` of service files uses"
    )
    pod: Pod = Field(default={}, description=f"{_POD}. Laid over `clouds.kubernetes.pod`")
    agent_pod: AgentPod = Field(default={}, description=_AGENT_POD)

    @field_validator("cache_path")
    @classmethod
    def _is_a_folder(cls, path: str) -> str:
        if not _FOLDER.fullmatch(path):
            raise ValueError(
                f"{path!r} is no folder for this: two names or more, such as /mnt/disks/cache, none of the system's"
            )
        return path

    @field_validator("namespaces")
    @classmethod
    def _are_names(cls, namespaces: tuple[str, ...]) -> tuple[str, ...]:
        for name in namespaces:
            if not re.fullmatch(_DNS, name):
                raise ValueError(f"{name!r} is no name of a namespace")
        return namespaces

    @field_validator("tolerations")
    @classmethod
    def _are_tolerations(cls, tolerations: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for problem in misfits(list(tolerations), "[Toleration]"):
            raise ValueError(str(problem))
        return tolerations


class KubernetesConfig(CloudConfig):
    kubeconfig: str | None = Field(
        default=None, description="file with the contexts; by default $KUBECONFIG, then ~/.kube/config"
    )
    image: str = Field(default=DEFAULT_IMAGE, description="of a replica whose service file names none")
    contexts: dict[str, ContextConfig] = Field(
        default={},
        description="clusters, by names of your own; by default the current context of the kubeconfig",
    )
    labels: dict[str, str] = Field(default={}, description="labels of all Pods")
    pod: Pod = Field(default={}, description=_POD)
    agent_pod: AgentPod = Field(default={}, description=_AGENT_POD)
    agent_image: str | None = Field(
        default=None,
        description="image of load balancers (packaging/Containerfile, target agent), for `load_balancers.regions`. null: none here",
    )

    @field_validator("contexts")
    @classmethod
    def _are_regions(cls, contexts: dict[str, ContextConfig]) -> dict[str, ContextConfig]:
        for name in contexts:
            if not name or "/" in name or ":" in name or name == "*":
                raise ValueError(
                    f"{name!r} cannot be a name in infra: choose one without / and :, and set its `context`"
                )
        return contexts

    def clusters(self) -> list[Cluster]:
        """Return a cluster for each namespace."""
        named = self.contexts or {_CURRENT: ContextConfig()}
        return [
            cluster
            for name, section in named.items()
            for cluster in self._clusters(name, section, is_named=bool(self.contexts))
        ]

    def _clusters(self, name: str, section: ContextConfig, *, is_named: bool) -> Iterator[Cluster]:
        prices = {key: _price(price) for key, price in section.prices.items()}
        pools = tuple(_pool(one) for one in section.pools)
        pod = laid_over(self.pod, section.pod)
        wanted = pod.get("spec") or {}  # what it says of nodes decides which are offered, too
        for index, namespace in enumerate(section.namespaces or (None,)):
            yield Cluster(
                region=name if index == 0 else f"{name}:{namespace}",
                context=section.context or (name if is_named else None),
                namespace=namespace,
                is_first=index == 0,
                schedule_wait_s=section.schedule_wait_seconds,
                image=self.image,
                pools=pools,
                prices=prices,
                labels=self.labels,
                node_selector=section.node_selector | (wanted.get("nodeSelector") or {}),
                tolerations=(*section.tolerations, *(wanted.get("tolerations") or ())),
                gpu_resource=section.gpu_resource,
                service_account=section.service_account,
                priority_class=section.priority_class,
                runtime_class=section.runtime_class,
                reaper_account=section.reaper_service_account,
                reaper_image=section.reaper_image,
                agent_image=self.agent_image,
                service_type=section.service_type,
                service_annotations=section.service_annotations,
                dead_man_s=section.dead_man_minutes * 60,
                pod=pod,
                agent_pod=laid_over(self.agent_pod, section.agent_pod),
                cache_path=section.cache_path,
            )


def _price(section: PriceConfig) -> NodePrice:
    return NodePrice(section.usd_hour, section.spot_usd_hour)


def _pool(section: PoolConfig) -> NodePool:
    accelerator, count = next(iter(section.accelerators.items()), (None, 0))
    return NodePool(
        section.zone, accelerator, count, section.cpus, section.memory_gb, section.spot, section.labels
    )
