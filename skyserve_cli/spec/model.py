"""`ServiceSpec`: what the rest of the product knows of a service. Values only; everything is decided.

Every number carries its unit in its name. Secrets are present by name: their values travel beside the spec,
so that a spec may be printed, stored and compared.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from lb.config.cors import Cors
from lb.config.options import (
    Access,
    Breaker,
    CacheEvents,
    Continuation,
    Limits,
    MetricsOptions,
    Pushing,
    Retries,
    Session,
    Warming,
)
from lb.config.workers import AUTO
from policies.goals import AgentRegion, PlacementGoal, ScalingGoal
from policies.regions.names import DEFAULT_REGION_POLICY
from policies.regions.residency import ResidencyZone
from policies.routing.names import SERVICE_POLICY
from skyserve_cli.spec.infra import is_cloud
from skyserve_cli.spec.references import substitute

Pairs = tuple[tuple[str, str], ...]

#: Kinds of buckets that a name is enough for, and how their URLs begin. One of Azure's has an account as well.
BUCKETS_BY_NAME = MappingProxyType({"s3": "s3", "gcs": "gs"})
EVERYWHERE = "*"  # the place of an image that is for all regions


@dataclass(frozen=True, slots=True)
class Probe:
    """The readiness probe. `post_data` is JSON text and makes the probe a POST.

    Path, headers and post_data may hold ``$NAME`` references to secrets; `resolved` fills them in.
    """

    path: str = "/"
    post_data: str | None = None
    headers: Pairs = ()
    initial_delay_s: float = 1200.0
    """How long a replica may take to respond for the first time."""
    timeout_s: float = 15.0
    interval_s: float = 10.0
    failure_threshold_s: float = 180.0
    """A replica that was ready and then fails for this long is replaced."""

    @property
    def method(self) -> str:
        return "GET" if self.post_data is None else "POST"

    def resolved(self, secret_values: Mapping[str, str]) -> "Probe":
        """The probe as it is sent, with the secrets inside: never to be stored or printed."""
        return replace(
            self,
            path=substitute(self.path, secret_values),
            headers=tuple((name, substitute(value, secret_values)) for name, value in self.headers),
            post_data=None
            if self.post_data is None
            else substitute(self.post_data, secret_values, quote=json_inner),
        )


def json_inner(text: str) -> str:
    """`text` as it stands between the quotes of a JSON string."""
    return json.dumps(text)[1:-1]


@dataclass(frozen=True, slots=True)
class SloSpec:
    """The share `attainment` of the requests is to have its first byte and its tokens in time.

    `capacity_qps` is what one replica carries so, per second; None: it is learned. `autoscaler` is `predictive`, `reactive`
    or `forecast_only`. `response_weight` is the work of a response token in prompt tokens, until it is learned. `late` is what becomes of requests that cannot keep it, `queue` or `shed`; None: they are as others.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    attainment: float = 0.99
    capacity_qps: float | None = None
    autoscaler: str = "predictive"
    late: str | None = None
    response_weight: float | None = None


@dataclass(frozen=True, slots=True)
class ScheduledSize:
    """Other limits of the size for `duration_s` from each instant of `cron` in `timezone`; None: as at other times."""

    cron: str
    timezone: str
    duration_s: float
    min_replicas: int | None = None
    max_replicas: int | None = None


@dataclass(frozen=True, slots=True)
class LoadBalancerSpec:
    """Configuration of the load balancer agents, in their own types.

    `host` and `port` None: an agent takes an address of its own choice. Of API keys it knows the digests only.
    """

    limits: Limits = field(default_factory=Limits)
    host: str | None = None
    port: int | None = None
    retries: Retries = field(default_factory=Retries)
    breaker: Breaker = field(default_factory=Breaker)
    pushing: Pushing = field(default_factory=Pushing)
    continuation: Continuation = field(default_factory=Continuation)
    access: Access = field(default_factory=Access)
    cors: Cors = field(default_factory=Cors)
    trusted_proxies: tuple[str, ...] = ()
    session: Session = field(default_factory=Session)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    warming: Warming = field(default_factory=Warming)
    cache_events: CacheEvents = field(default_factory=CacheEvents)
    workers: int = AUTO  # cores that move chunks (see `lb.agent.server_options`)


@dataclass(frozen=True, slots=True)
class DnsName:
    """`name` in the hosted `zone`, which ends in a dot; an empty name is the zone's own.

    `health_check`: Route 53 checks the load balancers that the name means.
    """

    zone: str
    name: str
    health_check: bool = True

    @property
    def full(self) -> str:
        """Return the whole name: ``chat.example.com.``."""
        return f"{self.name}.{self.zone}" if self.name else self.zone


@dataclass(frozen=True, slots=True)
class RegionalAgents:
    """Load balancer agents on machines of their own, `count` in each of `places`.

    Without places there is one, beside the controller. `instance_types` are by cloud, "*" standing for all. `port` None:
    one of the machine's choice. `spill` is a policy of `policies.regions.registry`. `usd_per_second` is what a second of a user's
    waiting is worth; None: what traffic between regions costs does not count. `url` is what clients call instead of them.
    """

    places: tuple[AgentRegion, ...] = ()
    count: int = 1
    instance_types: Pairs = ()
    port: int | None = None
    dns: DnsName | None = None
    spill: str = DEFAULT_REGION_POLICY
    usd_per_second: float | None = None
    url: str | None = None

    def instance_type(self, cloud: str) -> str | None:
        types = dict(self.instance_types)
        return types.get(cloud, types.get("*"))


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """How an update replaces replicas: how many may exist above the target, or be missing below it."""

    mode: str = "rolling"
    max_surge: int = 1
    max_unavailable: int = 0


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificate and key (paths) the load balancer shows to clients."""

    keyfile: str
    certfile: str


@dataclass(frozen=True, slots=True)
class GitSource:
    """A working directory that is a git repository; `ref` None means its default branch.

    Both may hold ``$NAME`` references to secrets, as a token in the URL.
    """

    url: str
    ref: str | None = None


@dataclass(frozen=True, slots=True)
class FileMount:
    """`path` on the replica, filled from `sources` (local paths or bucket URLs) or from a named bucket."""

    path: str
    sources: tuple[str, ...] = ()
    mode: str = "copy"
    store: str | None = None
    bucket: str | None = None
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Folders that outlive replicas, one for each of `variables`, which name them: of the node, or (`pvc`) in a `claim` of Kubernetes."""

    kind: str = "node"
    variables: tuple[str, ...] = ("HF_HOME",)
    claim: str | None = None


@dataclass(frozen=True, slots=True)
class ResourceChoice:
    """One way to get a node. None means "any"; `accelerator` None means a node without one.

    `cpus` and `memory` (GB) keep their ``4+`` form: a bare number is exact, a plus means "at least".
    `images` are pairs of a region, or a cloud, and the image there; ``*`` stands for all. Without `disk_size_gb` the
    user's settings count, or else a default.
    """

    cloud: str | None = None
    region: str | None = None
    zone: str | None = None
    accelerator: str | None = None
    accelerator_count: float = 0.0
    use_spot: bool = False
    instance_type: str | None = None
    cpus: str | None = None
    memory: str | None = None
    disk_size_gb: int | None = None
    disk_tier: str | None = None
    network_tier: str | None = None
    local_disk: str | None = None
    images: Pairs = ()
    labels: Pairs = ()
    max_usd_hour: float | None = None
    reservation: str | None = None

    def places(self) -> list[tuple[str | None, str | None]]:
        """Cloud and region where it may be: one place, or those of its images if these are by place."""
        keys = [key for key, _ in self.images]
        if not keys or EVERYWHERE in keys:
            return [(self.cloud, self.region)]
        of_clouds = [(key, self.region) for key in keys if is_cloud(key) and self.cloud in (None, key)]
        regions = [key for key in keys if not is_cloud(key) and self.region in (None, key)]
        return [*of_clouds, *((self.cloud, region) for region in regions)]


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One version of one service, complete.

    `scaling` and `placement` are what policies get: `goal_of` adds to them what follows from `resources`, from `slo` (None:
    the service has none) and from `schedule`, of whose entries that overlap the last counts. The load is the mean over the
    last `load_window_s`; `max_usd_hour` is what the replicas may cost together, None: no limit. `team` is
    whose quota the service uses; None: the team of its author.
    `resources` are alternatives: in order of preference if `resources_ordered`, else the cheapest first.
    `pod` is a patch over the Pod of a replica in Kubernetes, as JSON. `port` is the one requests go to; None means the replica listens where ``$SKYSERVE_REPLICA_PORT`` says.
    """

    name: str
    run: str
    setup: str | None = None
    probe: Probe = Probe()
    scaling: ScalingGoal = field(default_factory=ScalingGoal)
    placement: PlacementGoal = field(default_factory=PlacementGoal)
    load_window_s: float = 60.0
    max_usd_hour: float | None = None
    team: str | None = None
    slo: SloSpec | None = None
    schedule: tuple[ScheduledSize, ...] = ()
    load_balancing_policy: str = SERVICE_POLICY
    load_balancer: LoadBalancerSpec = LoadBalancerSpec()
    regional: RegionalAgents = RegionalAgents()
    residency: tuple[ResidencyZone, ...] = ()
    update: UpdateSpec = UpdateSpec()
    drain_timeout_s: float = 120.0
    notice_drain_s: float = 30.0
    tls: Tls | None = None
    ports: tuple[int, ...] = ()
    port: int | None = None
    envs: Pairs = ()
    secrets: tuple[str, ...] = ()
    workdir: str | None = None
    workdir_git: GitSource | None = None
    file_mounts: tuple[FileMount, ...] = ()
    num_nodes: int = 1
    resources: tuple[ResourceChoice, ...] = (ResourceChoice(),)
    resources_ordered: bool = False
    event_callback: str | None = None
    pod: str | None = None
    cache: CacheSpec | None = None

    @property
    def autoscaling(self) -> bool:
        """Return whether the size may change: with demand, or by the schedule."""
        return self.scaling.autoscaling or bool(self.schedule)

    def replica_hash(self, content_digest: str = "") -> str:
        """Equal hashes mean that a running replica of one spec may serve the other.

        Covers what a replica is made of and nothing of the `service` section. `content_digest` stands for what
        the spec only names: the bytes of the working directory, the values of the secrets.
        """
        choices = [json.dumps(_made_of(choice), sort_keys=True) for choice in self.resources]
        made_of = {
            "setup": self.setup,
            "run": self.run,
            "envs": sorted(self.envs),
            "secrets": sorted(self.secrets),
            "workdir": [self.workdir, asdict(self.workdir_git) if self.workdir_git else None],
            "file_mounts": sorted(json.dumps(asdict(mount), sort_keys=True) for mount in self.file_mounts),
            "num_nodes": self.num_nodes,
            "ports": sorted(self.ports),
            "port": self.port,
            "resources": choices if self.resources_ordered else sorted(choices),
            "ordered": self.resources_ordered,
            "content": content_digest,
            **({} if self.pod is None else {"pod": json.loads(self.pod)}),
            **({} if self.cache is None else {"cache": asdict(self.cache)}),
        }
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def _made_of(choice: ResourceChoice) -> dict[str, Any]:
    """Return what files had no word for when hashes were first stored is left out where it is not used."""
    fields = asdict(choice)
    return {key: value for key, value in fields.items() if key != "reservation" or value is not None}
