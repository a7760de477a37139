"""A checked file -> `ServiceSpec`. Everything is right by now; this only gives it its final shape."""

from collections.abc import Sequence

from lb.config.options import ApiKey
from policies.goals import PlacementGoal, ScalingGoal
from skyserve_cli.spec.balancer import load_balancer
from skyserve_cli.spec.candidates import ParsedAlternatives
from skyserve_cli.spec.model import (
    CacheSpec,
    FileMount,
    GitSource,
    Probe,
    ResourceChoice,
    ScheduledSize,
    ServiceSpec,
    SloSpec,
    Tls,
    UpdateSpec,
)
from skyserve_cli.spec.placement import placement_of
from skyserve_cli.spec.regional import regional_agents
from skyserve_cli.spec.residency import residency_zones
from skyserve_cli.spec.schema import (
    ProbeSection,
    ReplicaPolicySection,
    ServiceFile,
    ServiceSection,
    StorageSection,
)
from skyserve_cli.spec.variables import Variables


def build(
    file: ServiceFile,
    service: ServiceSection,
    name: str,
    found: ParsedAlternatives,
    variables: Variables,
    keys: Sequence[ApiKey],
) -> ServiceSpec:
    """`service` is the file's own section, known to be there; `keys` are those of its load balancer."""
    own = () if service.ports is None else (service.ports,)
    ports = tuple(sorted({*own, *(port for _, opened in found.ports for port in opened)}))
    workdir = file.workdir
    policy = service.replica_policy or ReplicaPolicySection()
    return ServiceSpec(
        name=name,
        run=_run(file, service),
        setup=file.setup or None,
        probe=_probe(service.readiness_probe),
        scaling=_scaling(service),
        placement=_placement(policy, found.choices),
        load_window_s=policy.load_window_seconds,
        max_usd_hour=policy.max_usd_hour,
        team=service.team,
        slo=_slo(policy),
        schedule=_schedule(policy),
        load_balancing_policy=service.load_balancing_policy,
        load_balancer=load_balancer(service.load_balancer, keys),
        regional=regional_agents(service.load_balancers),
        residency=residency_zones(service.residency),
        update=UpdateSpec(service.update.mode, service.update.max_surge, service.update.max_unavailable),
        drain_timeout_s=service.drain_timeout_seconds,
        notice_drain_s=service.notice_drain_seconds,
        tls=Tls(service.tls.keyfile, service.tls.certfile) if service.tls else None,
        ports=ports,
        port=service.ports or (ports[0] if ports else None),
        envs=tuple(variables.envs.items()),
        secrets=variables.secret_names,
        workdir=workdir.path if workdir else None,
        workdir_git=GitSource(workdir.url, workdir.ref) if workdir and workdir.url else None,
        file_mounts=tuple(_file_mount(path, mount) for path, mount in (file.file_mounts or {}).items()),
        num_nodes=file.num_nodes,
        resources=tuple(found.choices),
        resources_ordered=found.ordered,
        event_callback=file.event_callback or None,
        pod=file.kubernetes.pod,
        cache=CacheSpec(file.cache.kind, file.cache.variables, file.cache.claim) if file.cache else None,
    )


def _probe(section: ProbeSection | None) -> Probe:
    if section is None:
        return Probe()
    return Probe(
        path=section.path,
        post_data=section.post_data,
        headers=section.headers or (),
        initial_delay_s=section.initial_delay_seconds,
        timeout_s=section.timeout_seconds,
        interval_s=section.endpoint_probe_interval_seconds,
        failure_threshold_s=section.consecutive_failure_threshold_timeout,
    )


def _scaling(service: ServiceSection) -> ScalingGoal:
    section = service.replica_policy
    if section is None:
        size = 1 if service.replicas is None else service.replicas
        return ScalingGoal(min_replicas=size, max_replicas=size)
    target = section.target_qps_per_replica
    return ScalingGoal(
        min_replicas=section.min_replicas,
        max_replicas=section.min_replicas if section.max_replicas is None else section.max_replicas,
        target_qps_per_replica=min(each.qps for each in target) if isinstance(target, tuple) else target,
        target_qps_by_accelerator=target if isinstance(target, tuple) else (),
        target_ongoing_requests_per_replica=section.target_ongoing_requests_per_replica,
        target_queue_length=section.target_queue_length,
        target_kv_cache_usage=section.target_kv_cache_usage,
        upscale_delay_s=section.upscale_delay_seconds,
        downscale_delay_s=section.downscale_delay_seconds,
    )


def _slo(section: ReplicaPolicySection) -> SloSpec | None:
    slo = section.slo
    if slo is None:
        return None
    scaler, weight = section.autoscaler or "predictive", slo.response_weight
    return SloSpec(slo.ttft_ms, slo.tpot_ms, slo.attainment, slo.capacity_qps, scaler, slo.late, weight)


def _schedule(section: ReplicaPolicySection) -> tuple[ScheduledSize, ...]:
    return tuple(
        ScheduledSize(one.cron, one.timezone, one.duration, one.min_replicas, one.max_replicas)
        for one in section.schedule
    )


def _placement(section: ReplicaPolicySection, resources: Sequence[ResourceChoice]) -> PlacementGoal:
    return placement_of(
        PlacementGoal(
            num_overprovision=section.num_overprovision,
            base_ondemand_fallback_replicas=section.base_ondemand_fallback_replicas,
            availability_target=section.availability_target,
            price_band=section.price_band,
            spot_price_cap=section.spot_price_cap,
            spread_again_after_s=section.spread_again_after_seconds,
        ),
        resources,
        spot_placer=section.spot_placer,
        dynamic_ondemand_fallback=section.dynamic_ondemand_fallback,
    )


def _file_mount(path: str, mount: StorageSection) -> FileMount:
    return FileMount(
        path=path,
        sources=mount.source or (),
        # A named bucket is mounted, a plain path is copied, as in SkyPilot.
        mode=mount.mode or ("mount" if mount.name else "copy"),
        store=mount.store.lower() if mount.store else None,
        bucket=mount.name,
        persistent=mount.persistent,
    )


def _run(file: ServiceFile, service: ServiceSection) -> str:
    run = file.run or ""
    if not service.load_balancer.cache_events:
        return run
    from skyserve_cli.spec import cache_events

    return cache_events.with_options(run)
