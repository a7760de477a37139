"""The sections of a service file. The JSON Schema for editors comes from these classes and nothing else (`editor_schema`).

A section defines which keys exist, of which kind, within which bounds, and their defaults. What several keys mean
together is in `rules` and `candidates`. The text under each key is its description in the JSON Schema; the long
form, with examples, is `reference.yaml`.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from policies.routing.names import SERVICE_POLICY
from skyserve_cli.spec.accelerators import AcceleratorsValue, TargetQps
from skyserve_cli.spec.balancer import LoadBalancerSection
from skyserve_cli.spec.cache import CacheSection
from skyserve_cli.spec.fields import (
    AboveZero,
    AnyText,
    Attainment,
    Autoscaler,
    Availability,
    Count,
    Cpus,
    CronText,
    DiskSize,
    DiskTier,
    Duration,
    Fraction,
    Headers,
    ImageValue,
    LateRequests,
    LbPolicy,
    Memory,
    Money,
    MountMode,
    NetworkTier,
    Nodes,
    PodPatch,
    Port,
    PortsValue,
    PostData,
    PriceCap,
    ProbePath,
    ProbeSeconds,
    Seconds,
    Share,
    SomeSeconds,
    Sources,
    SpotPlacer,
    TeamName,
    Text,
    TimeZone,
    UpdateMode,
    WindowSeconds,
)
from skyserve_cli.spec.regional import LoadBalancersSection
from skyserve_cli.spec.residency import ResidencySection, ZoneName
from skyserve_cli.spec.section import Section, Shorthand, Words, word_as


class ProbeSection(Section):
    path: ProbePath
    """Path of the probe; status 200 means ready."""
    initial_delay_seconds: Seconds = 1200.0
    """How long a replica may take, from its launch, to respond for the first time."""
    timeout_seconds: SomeSeconds = 15.0
    """Of one probe."""
    endpoint_probe_interval_seconds: ProbeSeconds = 10.0
    """Between two probes of a replica, 0.1 at the least."""
    consecutive_failure_threshold_timeout: Seconds = 180.0
    """A replica that was ready and then fails for this long is replaced."""
    post_data: PostData | None = None
    """JSON to POST; without it the probe is a GET."""
    headers: Headers | None = None
    """Headers to send. A secret is referred to as $NAME."""


class SloSection(Section):
    ttft_ms: AboveZero | None = None
    """A request is late if its first byte comes later than this."""
    tpot_ms: AboveZero | None = None
    """A request is late if each token after the first takes longer than this, on the mean."""
    attainment: Attainment = 0.99
    """The share of requests that should be in time, such as 99.5%."""
    capacity_qps: AboveZero | None = None
    """Requests per second that one replica carries so. Default: learned from the service's own traffic."""
    response_weight: AboveZero | None = None
    """Work of a response token in prompt tokens (`serve profile --with`), to start from. Default: 1."""
    late: LateRequests | None = None
    """Each request has ttft_ms and tpot_ms as its deadline. One that cannot keep it goes last (queue) or gets 429 (shed)."""


class ScheduleSection(Section):
    cron: CronText
    """When the entry begins: minute, hour, day of the month, month, day of the week."""
    timezone: TimeZone = "UTC"
    """Time zone of cron, such as Europe/Berlin."""
    duration: Duration
    """How long the entry lasts, such as 10h; up to a week."""
    min_replicas: Count | None = None
    """In place of min_replicas meanwhile."""
    max_replicas: Count | None = None
    """In place of max_replicas meanwhile."""


class ReplicaPolicySection(Section):
    refused: ClassVar[Words] = {
        "auto_restart": "has no meaning here: replicas that die are always replaced",
    }
    renamed: ClassVar[Words] = {
        "init_replicas": "min_replicas",
        "min_on_demand_replicas": "base_ondemand_fallback_replicas",
        "extra_on_demand_replicas": "base_ondemand_fallback_replicas",
        "on_demand_fallback": "dynamic_ondemand_fallback",
        "spot_mixer": "dynamic_ondemand_fallback",
        "spot_policy": "spot_placer and dynamic_ondemand_fallback",
        "spot_zones": "resources.any_of, with one infra for each zone",
        "qps_upper_threshold": "target_qps_per_replica",
        "qps_lower_threshold": "target_qps_per_replica",
    }

    min_replicas: Count = 1
    """The service never has fewer. 0, with a max_replicas above it, lets it sleep when there are no requests."""
    max_replicas: Count | None = None
    """The autoscaler never requests more. Default: min_replicas, a fixed size."""
    target_qps_per_replica: TargetQps | None = None
    """Requests per second one replica should carry; one number, or one for each accelerator."""
    target_ongoing_requests_per_replica: AboveZero | None = None
    """Requests at a time one replica should carry, running or waiting; instead of target_qps_per_replica."""
    target_queue_length: AboveZero | None = None
    """Requests that may wait in the engine of a replica; beside another target. The engines report it."""
    target_kv_cache_usage: Share | None = None
    """How full the KV cache of a replica's engine should be, above 0 and at most 1; alone or beside another target."""
    load_window_seconds: WindowSeconds = 60.0
    """The load is the mean over this long."""
    num_overprovision: Count = 0
    """Replicas kept beyond the target, so that a preemption is not felt."""
    dynamic_ondemand_fallback: bool | None = None
    """Stand-in on-demand replicas while spot ones are missing. Implies spot. Default: as risk_hedge needs, else no."""
    base_ondemand_fallback_replicas: Count = 0
    """How many replicas are on-demand at all times. Implies spot for the others."""
    spot_placer: SpotPlacer | None = None
    """Who decides zones and capacity of replicas. Implies spot."""
    availability_target: Availability | None = None
    """The part of the time in which all wanted replicas should be ready, for risk_hedge. Implies spot."""
    price_band: Fraction = 0.1
    """On-demand replicas are spread over offers that cost at most this fraction more than the cheapest."""
    spot_price_cap: PriceCap = 2.0
    """No spot replica costs more than this many times the cheapest spot offer. Not for risk_hedge."""
    max_usd_hour: Money | None = None
    """What the replicas may cost together, USD per hour. Beyond it none is launched; none is terminated for it."""
    spread_again_after_seconds: Seconds = 1800.0
    """Spot replicas that have all been in one zone for this time are spread again, one at a time. 0: never."""
    upscale_delay_seconds: Seconds = 300.0
    """More load must last this long before replicas are added."""
    downscale_delay_seconds: Seconds = 1200.0
    """Less load must last this long before replicas are removed."""
    slo: SloSection | None = None
    """Which requests are in time, and which share should be: the size follows from it. Instead of target_*."""
    autoscaler: Autoscaler | None = None
    """With slo. predictive: size for the demand expected when a replica would be ready; reactive: for the present one;
    forecast_only: for the present one, and say what the forecast would want. Default: predictive."""
    schedule: tuple[ScheduleSection, ...] = ()
    """Other limits at certain times, such as more replicas on weekday mornings."""


class UpdateSection(Section):
    mode: UpdateMode = "rolling"
    """rolling: replica by replica; blue_green: all new ones first, then the switch."""
    max_surge: Count = 1
    """How many replicas may exist above the target during a rolling update."""
    max_unavailable: Count = 0
    """How many may be missing below the target during a rolling update."""


class TlsSection(Section):
    keyfile: Text
    """Path of the private key, PEM."""
    certfile: Text
    """Path of the certificate chain, PEM."""


class ServiceSection(Section):
    refused: ClassVar[Words] = {
        "external_load_balancers": "load_balancers puts load balancers of ours into regions",
        "pool": "pools are not offered: they run batch jobs, this runs services",
        "workers": "pools are not offered: they run batch jobs, this runs services",
    }
    renamed: ClassVar[Words] = {
        "https": "tls",
        "auth_token": "readiness_probe.headers",
        "load_balancer_type": "load_balancing_policy",
    }

    readiness_probe: Annotated[ProbeSection | None, Shorthand({"type": "string"}), word_as("path")] = None
    """How a replica shows that it is ready: a path, or a mapping. Default: GET /."""
    replicas: Count | None = None
    """A fixed number of replicas; use this or replica_policy."""
    replica_policy: ReplicaPolicySection | None = None
    """How many replicas, and on which capacity."""
    team: TeamName | None = None
    """Whose quota it uses: a team of config.yaml. Only the owner and admins may choose another than their own."""
    load_balancing_policy: LbPolicy = SERVICE_POLICY
    """How a request finds its replica."""
    load_balancer: LoadBalancerSection = LoadBalancerSection()
    """What the endpoint does with requests, and where it listens."""
    load_balancers: LoadBalancersSection | None = None
    """Load balancers on machines of their own. Default: one, beside the controller."""
    residency: dict[ZoneName, ResidencySection] = Field(default_factory=dict)
    """Zones by name: requests of a zone are served in its regions and nowhere else."""
    ports: Port | None = None
    """The main port, when resources.ports opens several."""
    tls: TlsSection | None = None
    """Certificate of the endpoint: HTTPS from clients to the load balancer."""
    drain_timeout_seconds: Seconds = 120.0
    """How long a draining replica may finish the requests it has."""
    notice_drain_seconds: Seconds = 30.0
    """A replica with a preemption notice takes requests until this long before its end, then it drains."""
    update: UpdateSection = UpdateSection()
    """How an update replaces replicas."""


class AlternativeSection(Section):
    """One entry of `any_of` or `ordered`: laid over what `resources` itself says."""

    refused: ClassVar[Words] = {
        "job_recovery": "has no meaning for a service: replicas that die are always replaced",
    }
    renamed: ClassVar[Words] = {
        "ephemeral_storage": "disk_size",
    }

    infra: Text | None = None
    """cloud[/region[/zone]], or kubernetes[/context[/namespace[/zone]]], with * for any. Use this or cloud, region and zone."""
    cloud: Text | None = None
    """local, ssh, aws, gcp, azure or kubernetes."""
    region: Text | None = None
    """Name of a region, as the cloud writes it."""
    zone: Text | None = None
    """Name of a zone, as the cloud writes it."""
    accelerators: AcceleratorsValue | None = None
    """L4, L4:2, a list in order of preference, or a mapping of which the cheapest is taken."""
    gpus: AcceleratorsValue | None = None
    """Another name for accelerators."""
    accelerator_args: dict[str, Any] | None = None
    """Settings of TPUs."""
    instance_type: Text | None = None
    """Instance type, as the cloud writes it."""
    cpus: Cpus | None = None
    """Number of virtual CPUs; 4+ means at least 4."""
    memory: Memory | None = None
    """Memory in GB, or with a unit; 16+ means at least 16."""
    use_spot: bool | None = None
    """Spot instances: cheap, and taken back at any moment."""
    reservation: Text | None = None
    """Name of reserved capacity in config.yaml: no other is used; none: nothing reserved is. Default: what fits comes first."""
    ports: PortsValue | None = None
    """Ports the replica listens on: a number, a range like "8000-8010", or a list."""
    disk_size: DiskSize | None = None
    """GB, or with a unit. Default: 256."""
    disk_tier: DiskTier | None = None
    """Speed of the disk."""
    network_tier: NetworkTier | None = None
    """Speed of the network."""
    local_disk: Text | None = None
    """Disks that are part of the machine."""
    image_id: ImageValue | None = None
    """Machine image, docker:IMAGE, or a mapping from region to image."""
    labels: dict[str, AnyText] | None = None
    """Labels (tags) of the instances; those of an alternative are added."""
    max_hourly_cost: Money | None = None
    """US dollars per hour a node may cost."""
    autostop: Any = None
    """A cluster's setting; a service ends with `down`."""
    priority: int | None = None
    """A scheduling setting of SkyPilot."""
    priority_class: Text | None = None
    """A scheduling setting of SkyPilot."""
    volumes: list[Any] | None = None
    """Disks to attach."""


class ResourcesSection(AlternativeSection):
    any_of: list[AlternativeSection] | None = None
    """Alternatives, the cheapest first."""
    ordered: list[AlternativeSection] | None = None
    """Alternatives, in order of preference."""


class StorageSection(Section):
    """What a path of `file_mounts` is filled from, when it is more than a path or a URL."""

    name: Text | None = None
    """Name of the bucket."""
    source: Sources | None = None
    """Local paths or a bucket URL."""
    store: Text | None = None
    """Kind of bucket: s3, gcs, azure, r2."""
    persistent: bool = True
    """Whether the bucket stays when the service is taken down."""
    mode: MountMode | None = None
    """copy, mount or mount_cached."""
    type: Text | None = None
    """A setting of SkyPilot."""
    mount_options: Text | None = None
    """Options of the mount program."""
    config: dict[str, Any] | None = None
    """Settings of the mount program."""


Mount = Annotated[StorageSection, Shorthand({"type": "string"}), word_as("source")]


class WorkdirSection(Section):
    path: Text | None = None
    """A local folder."""
    url: Text | None = None
    """A git repository to check out."""
    ref: Text | None = None
    """Branch, tag or commit. Default: the repository's own default branch."""


class KubernetesSection(Section):
    """Only for replicas in Kubernetes."""

    pod: PodPatch | None = None
    """What to change in the Pods of replicas: a strategic merge patch over the Pod that is made otherwise."""


class ServiceFile(Section):
    """A whole file."""

    refused: ClassVar[Words] = {
        "pool": "pools are not offered: they run batch jobs, this runs services",
    }

    name: Text | None = None
    """Name of the service. Default: the name of the file."""
    service: ServiceSection | None = None
    """What makes this file a service; `service: {}` takes every default."""
    resources: ResourcesSection = ResourcesSection()
    """What one node of a replica needs, and where it may be."""
    num_nodes: Nodes = 1
    """Nodes in one replica; requests go to the first."""
    workdir: Annotated[WorkdirSection | None, Shorthand({"type": "string"}), word_as("path")] = None
    """Folder (or git repository) that is copied to the replica and in which setup and run start."""
    setup: AnyText | None = None
    """Shell commands that prepare a node, once."""
    run: Text | None = None
    """Shell commands that start the server. Required."""
    envs: dict[str, Any] | None = None
    """Environment variables. An empty one is taken from --env or from your own environment."""
    secrets: dict[str, Any] | list[Any] | None = None
    """As envs, but never shown or stored in the clear."""
    file_mounts: dict[str, Mount] | None = None
    """Path on the replica: local path, bucket URL, or a mapping."""
    volumes: dict[str, Any] | None = None
    """Path on the replica: volume to mount there."""
    cache: Annotated[CacheSection | None, Shorthand({"type": "string"}), word_as("kind")] = None
    """Folders that outlive the replica: the next one on the same node finds the weights of its model there."""
    managed_secrets: dict[str, Any] | list[Any] | None = None
    """Secrets kept by a SkyPilot API server."""
    config: dict[str, Any] | None = None
    """SkyPilot's own configuration."""
    kubernetes: KubernetesSection = KubernetesSection()
    """Settings of replicas in Kubernetes."""
    event_callback: Text | None = None
    """Command that the controller runs for each event of the service."""
    inputs: dict[str, Any] | None = None
    """SkyPilot's estimate of input data."""
    outputs: dict[str, Any] | None = None
    """SkyPilot's estimate of output data."""
    api_server_access: bool | dict[str, Any] | None = None
    """A setting of SkyPilot's API server."""
