"""What must hold between keys. Each rule looks only at keys that are right in themselves (`Sound`)."""

from collections.abc import Iterator, Sequence

from lb.config.schema import WireError
from policies.goals import AcceleratorQps
from skyserve_cli.spec import residency
from skyserve_cli.spec.candidates import ParsedAlternatives
from skyserve_cli.spec.check import Sound
from skyserve_cli.spec.front_door import cors
from skyserve_cli.spec.infra import KUBERNETES
from skyserve_cli.spec.model import BUCKETS_BY_NAME, EVERYWHERE, ResourceChoice, ServiceSpec
from skyserve_cli.spec.problems import Problem, SpecWarning, dotted, shown
from skyserve_cli.spec.regional import AT, is_ambiguous
from skyserve_cli.spec.schema import ReplicaPolicySection, ScheduleSection, ServiceFile, ServiceSection

MAX_ALTERNATIVES = 1000
MAX_HEDGED = 1000  # replicas whose places risk_hedge finds within a second or two
_POLICY = "service.replica_policy"
_BALANCER = "service.load_balancer"
#: The placers whose on-demand replicas the file may request.
_FALL_BACK = ("auto", "dynamic_fallback", "risk_hedge", "spothedge_literal")
_TARGETS = f"{_POLICY}.target_qps_per_replica"
_ONGOING = f"{_POLICY}.target_ongoing_requests_per_replica"
_QUEUE, _KV_USAGE = f"{_POLICY}.target_queue_length", f"{_POLICY}.target_kv_cache_usage"


def spot_knob(policy: ReplicaPolicySection | None) -> str | None:
    """Return the key of the policy that only makes sense with spot replicas, if one is used: it implies `use_spot`."""
    if policy is None:
        return None
    used = {
        "spot_placer": policy.spot_placer is not None,
        "availability_target": policy.availability_target is not None,
        "dynamic_ondemand_fallback": bool(policy.dynamic_ondemand_fallback),
        "base_ondemand_fallback_replicas": policy.base_ondemand_fallback_replicas > 0,
    }
    return next((f"{_POLICY}.{key}" for key, is_used in used.items() if is_used), None)


def problems(file: ServiceFile, candidates: ParsedAlternatives, sound: Sound) -> Iterator[Problem]:
    if file.run is None and sound("run"):
        yield Problem("run", "is missing: the commands that start the server")
    yield from _images(candidates)
    yield from _mounts(file, sound)
    if file.cache is not None and sound("cache"):
        from skyserve_cli.spec import cache_rules

        yield from cache_rules.problems(file.cache, file.envs or (), file.secrets or (), candidates.choices)
    if len(candidates.choices) > MAX_ALTERNATIVES:
        message = f"names {len(candidates.choices):,} alternatives; {MAX_ALTERNATIVES:,} are the most"
        yield Problem("resources", message)
    if file.service is None:
        if sound("service"):
            hint = "write `service: {}` to take every default"
            yield Problem("service", "is missing: this file describes no service", hint=hint)
        return
    yield from _size(file.service, sound)
    yield from _placement(file.service.replica_policy, sound)
    yield from _load_balancing(file.service, sound)
    yield from _pushing(file.service, sound)
    yield from _cors(file.service, sound)
    yield from _regional(file.service, sound)
    yield from _residency(file.service, candidates, sound)
    yield from _update(file.service, sound)
    if sound.everywhere("ports"):
        yield from _ports(file.service.ports, candidates)


def _images(candidates: ParsedAlternatives) -> Iterator[Problem]:
    """Yield a machine's image belongs to a cloud, on AWS to a region; a container's runs anywhere."""
    for choice, origin in candidates.origins.items():
        path = origin["image_id"]
        if not choice.places():
            where = "/".join(filter(None, (choice.cloud, choice.region)))
            yield Problem(path, f"has no image for {where}", dict(choice.images))
        for place, image in choice.images:
            if image.startswith("docker:"):
                continue
            if place == EVERYWHERE and choice.cloud is None:
                hint = "name the cloud in infra, or an image for each: {aws: …, gcp: …}"
                yield Problem(path, f"is an image of one cloud (got {shown(image)})", image, hint)
            elif place in (EVERYWHERE, "aws") and choice.region is None and image.startswith("ami-"):
                hint = "name the region in infra, or an image for each: {us-east-1: ami-…}"
                yield Problem(path, f"is an image of one region (got {shown(image)})", image, hint)


def _mounts(file: ServiceFile, sound: Sound) -> Iterator[Problem]:
    for path, mount in (file.file_mounts or {}).items() if sound("file_mounts") else ():
        at = dotted(("file_mounts", path))
        if mount.source:
            continue
        if mount.name is None:
            yield Problem(at, "has neither a source nor the name of a bucket")
        elif mount.store is not None and mount.store.lower() not in BUCKETS_BY_NAME:
            kinds = ", ".join(BUCKETS_BY_NAME)
            message = f"a bucket in {mount.store} needs its URL as source (by name: {kinds})"
            yield Problem(at, message, mount.store)


def _size(service: ServiceSection, sound: Sound) -> Iterator[Problem]:
    policy = service.replica_policy
    if policy is None:
        return
    if service.replicas is not None:
        message = "cannot stand next to replica_policy; a fixed size is replicas alone, or min_replicas alone"
        yield Problem("service.replicas", f"{message} (got {service.replicas})", service.replicas)
    at = ("service", "replica_policy")
    rated, ongoing = policy.target_qps_per_replica is not None, policy.target_ongoing_requests_per_replica
    if rated and ongoing is not None:
        message = f"cannot stand next to target_qps_per_replica: choose one of the two (got {ongoing:g})"
        yield Problem(_ONGOING, message, ongoing)
    kv_usage = policy.target_kv_cache_usage
    if policy.target_queue_length is not None and not rated and ongoing is None and kv_usage is None:
        message = "needs another target beside it, because a queue never says that a fleet is too large"
        hint = "add target_kv_cache_usage, target_ongoing_requests_per_replica or target_qps_per_replica"
        yield Problem(_QUEUE, message, policy.target_queue_length, hint)
    yield from _slo(policy, sound)
    if not (sound(*at, "min_replicas") and sound(*at, "max_replicas")):
        return
    low, high = policy.min_replicas, policy.max_replicas
    top = low if high is None else high
    if top < low:
        yield Problem(f"{_POLICY}.max_replicas", f"must be >= min_replicas (got {top} < {low})", top)
    rated = rated or kv_usage is not None or policy.target_queue_length is not None
    if high is None and low == 0 and sound(*at, "schedule") and not any(map(_can_wake, policy.schedule)):
        message = "needs max_replicas: without it the size is fixed at 0, and no request can launch a replica (got 0)"
        scaled = rated or ongoing is not None or policy.slo is not None
        load = "" if scaled else " and target_ongoing_requests_per_replica: 32"
        yield Problem(f"{_POLICY}.min_replicas", message, 0, f"write max_replicas: 1{load}")
    unsaid = sound(*_TARGETS.split(".")) and sound(*_ONGOING.split("."))
    if top > low and not rated and ongoing is None and policy.slo is None and unsaid and sound(*at, "slo"):
        message = f"is needed to choose between {low} and {top} replicas"
        hint = "or slo, or target_ongoing_requests_per_replica, to scale by concurrency"
        yield Problem(_TARGETS, message, hint=hint)
    base = policy.base_ondemand_fallback_replicas
    if base > max(top, low) and sound(*at, "base_ondemand_fallback_replicas"):
        key = "max_replicas" if high is not None else "min_replicas, the fixed size,"
        message = f"must be <= {key} (got {base} > {top})"
        yield Problem(f"{_POLICY}.base_ondemand_fallback_replicas", message, base)


def _can_wake(entry: ScheduleSection) -> bool:
    """Return whether there may be replicas while the entry of the schedule lasts."""
    return bool(entry.min_replicas or entry.max_replicas)


def _slo(policy: ReplicaPolicySection, sound: Sound) -> Iterator[Problem]:
    """An SLO fixes what a target would only guess."""
    at = ("service", "replica_policy")
    if not sound(*at, "slo"):
        return
    if policy.slo is None:
        if policy.autoscaler is not None:
            message = f"needs slo, which says what to scale for (got {policy.autoscaler})"
            yield Problem(f"{_POLICY}.autoscaler", message, policy.autoscaler)
    else:
        if policy.slo.ttft_ms is None and policy.slo.tpot_ms is None:
            yield Problem(f"{_POLICY}.slo", "needs ttft_ms or tpot_ms: when is a request late?")
        for path, given in (
            (_TARGETS, policy.target_qps_per_replica),
            (_ONGOING, policy.target_ongoing_requests_per_replica),
            (_QUEUE, policy.target_queue_length),
            (_KV_USAGE, policy.target_kv_cache_usage),
        ):
            if given is not None:
                hint = "leave the target out: what a replica carries is learned, or set slo.capacity_qps"
                key = path.rpartition(".")[2]
                yield Problem(path, f"cannot stand next to slo: choose {key} or slo", given, hint)
        if policy.availability_target is not None:
            message = "cannot stand next to slo: both would steer by a budget; choose availability_target or slo.attainment"
            yield Problem(f"{_POLICY}.availability_target", message, policy.availability_target)
    for index, entry in enumerate(policy.schedule):
        path = f"{_POLICY}.schedule[{index}]"
        if entry.min_replicas is None and entry.max_replicas is None:
            yield Problem(path, "needs min_replicas or max_replicas: it changes nothing")
        least = policy.min_replicas if entry.min_replicas is None else entry.min_replicas
        if entry.max_replicas is not None and entry.max_replicas < least:
            message = f"must be >= min_replicas (got {entry.max_replicas} < {least})"
            yield Problem(f"{path}.max_replicas", message, entry.max_replicas)


def _placement(policy: ReplicaPolicySection | None, sound: Sound) -> Iterator[Problem]:
    """risk_hedge aims at an availability and chooses the rest; the others do what their knobs say."""
    if policy is None or not sound("service", "replica_policy", "spot_placer"):
        return
    placer, aim = policy.spot_placer, policy.availability_target
    if aim is not None and placer not in (None, "auto", "risk_hedge"):
        message = f"is for spot_placer: risk_hedge; {placer} cannot aim (got {aim:g})"
        yield Problem(f"{_POLICY}.availability_target", message, aim)
    elif policy.num_overprovision and (aim is not None or placer == "risk_hedge"):
        message = f"is chosen by risk_hedge itself (got {policy.num_overprovision})"
        hint = "leave it out, or use spot_placer: dynamic_fallback without availability_target"
        yield Problem(f"{_POLICY}.num_overprovision", message, policy.num_overprovision, hint)
    yield from _hedged(policy)
    if placer is None or placer in _FALL_BACK:
        return
    given = {
        "dynamic_ondemand_fallback": policy.dynamic_ondemand_fallback or None,
        "base_ondemand_fallback_replicas": policy.base_ondemand_fallback_replicas or None,
    }
    for key, value in given.items():
        if value is not None:
            message = f"is not for spot_placer: {placer}, which has its own rule for on-demand replicas"
            yield Problem(f"{_POLICY}.{key}", message, value)


def _hedged(policy: ReplicaPolicySection) -> Iterator[Problem]:
    """What risk_hedge computes grows with the number of replicas; other services wait for it."""
    chooses = policy.spot_placer == "auto" and not policy.num_overprovision
    if not (policy.spot_placer == "risk_hedge" or chooses or policy.availability_target is not None):
        return
    for path, count in (
        ("min_replicas", policy.min_replicas),
        ("max_replicas", policy.max_replicas),
        *((f"schedule[{index}].min_replicas", one.min_replicas) for index, one in enumerate(policy.schedule)),
        *((f"schedule[{index}].max_replicas", one.max_replicas) for index, one in enumerate(policy.schedule)),
    ):
        if count is not None and count > MAX_HEDGED:
            message = f"must be at most {MAX_HEDGED} for risk_hedge (got {count})"
            yield Problem(f"{_POLICY}.{path}", message, count, "or choose spot_placer: dynamic_fallback")


def _load_balancing(service: ServiceSection, sound: Sound) -> Iterator[Problem]:
    targets = service.replica_policy.target_qps_per_replica if service.replica_policy else None
    if not sound(*_TARGETS.split(".")) or isinstance(targets, tuple):
        return
    if service.load_balancing_policy == "instance_aware_least_load":
        message = "must be a mapping from accelerator to number for instance_aware_least_load"
        yield Problem(_TARGETS, message, targets)


def _pushing(service: ServiceSection, sound: Sound) -> Iterator[Problem]:
    balancer = service.load_balancer
    cap = balancer.max_concurrency_per_replica
    if cap is not None and balancer.pushing != "fixed_cap" and sound(*_BALANCER.split("."), "pushing"):
        message = f"is for pushing: fixed_cap; {balancer.pushing} has no such bound (got {cap})"
        yield Problem(f"{_BALANCER}.max_concurrency_per_replica", message, cap)
    breaker = balancer.circuit_breaker
    if breaker.max_timeout_seconds < breaker.timeout_seconds and sound(
        *_BALANCER.split("."), "circuit_breaker"
    ):
        message = (
            f"must be >= timeout_seconds (got {breaker.max_timeout_seconds:g} < {breaker.timeout_seconds:g})"
        )
        path = f"{_BALANCER}.circuit_breaker.max_timeout_seconds"
        yield Problem(path, message, breaker.max_timeout_seconds)


def _cors(service: ServiceSection, sound: Sound) -> Iterator[Problem]:
    if not sound(*_BALANCER.split("."), "cors"):
        return
    try:
        cors(service.load_balancer.cors)
    except WireError as error:
        yield Problem(f"{_BALANCER}.cors.{error.path}", str(error).partition(": ")[2])


def _regional(service: ServiceSection, sound: Sound) -> Iterator[Problem]:
    section = service.load_balancers
    if section is None or not sound("service", "load_balancers"):
        return
    if is_ambiguous(section):
        clouds = sorted({place.cloud for place in section.regions})
        hint = f"write {{{', '.join(f'{cloud}: …' for cloud in clouds)}}}"
        yield Problem(
            f"{AT}.instance_type", f"must be by cloud: regions are on {' and '.join(clouds)}", hint=hint
        )

    if section.dns is not None and any(place.cloud == KUBERNETES for place in section.regions):
        hint = "leave dns out, and lead a name to the address of the Service that `serve status` shows"
        yield Problem(f"{AT}.dns", "cannot lead to load balancers in a cluster", hint=hint)


def _residency(service: ServiceSection, candidates: ParsedAlternatives, sound: Sound) -> Iterator[Problem]:
    if sound("service", "residency") and sound("service", "load_balancer", "api_keys"):
        keys = [key.residency for key in service.load_balancer.api_keys or ()]
        yield from residency.problems(service.residency, keys, candidates.choices)


def _update(service: ServiceSection, sound: Sound) -> Iterator[Problem]:
    if sound("service", "update") and service.update.max_surge == service.update.max_unavailable == 0:
        yield Problem(
            "service.update.max_surge", "must be above 0 when max_unavailable is 0: no replica could move"
        )


def _ports(main: int | None, candidates: ParsedAlternatives) -> Iterator[Problem]:
    """Requests go to one port, the same on every alternative."""
    if main is not None:
        for path, ports in candidates.ports:
            if ports and main not in ports:
                yield Problem("service.ports", f"must be one of the ports of {path} (got {main})", main)
        return
    several = next(((path, ports) for path, ports in candidates.ports if len(ports) > 1), None)
    if several is not None:
        hint = "name the one that requests go to in service.ports"
        yield Problem(several[0], f"opens {len(several[1])} ports", list(several[1]), hint)
        return
    distinct = sorted({ports for _, ports in candidates.ports})
    if len(distinct) > 1:
        said = " and ".join(str(ports[0]) if ports else "none" for ports in distinct[:2])
        yield Problem("resources.ports", f"must be the same for every alternative (got {said})")


def warnings(spec: ServiceSpec) -> Iterator[SpecWarning]:
    """Yield warnings about values that are allowed and may not do what was meant."""
    policy = spec.scaling
    for path, target in (
        (_TARGETS, policy.target_qps_per_replica),
        (_ONGOING, policy.target_ongoing_requests_per_replica),
        (_QUEUE, policy.target_queue_length),
        (_KV_USAGE, policy.target_kv_cache_usage),
    ):
        if target is not None and not policy.autoscaling:
            message = f"has no effect: the size is fixed at {policy.min_replicas} until max_replicas is above min_replicas"
            yield SpecWarning(path, message)
    if policy.target_qps_by_accelerator:
        yield from _mismatches(policy.target_qps_by_accelerator, spec.resources)
    if spec.cache is not None and spec.pod is not None:
        from skyserve_cli.spec import cache_rules

        yield from cache_rules.warnings(spec.cache, spec.pod)
    if spec.load_balancer.cache_events.enabled:
        from skyserve_cli.spec import cache_events

        yield from cache_events.warnings(spec.run, spec.load_balancing_policy, spec.resources)
    asks = any(name.lower() == "authorization" for name, _ in spec.probe.headers)
    access = spec.load_balancer.access
    if asks and (access.keys or access.keys_file):
        message = "replicas do not get the Authorization header of requests then; their probe says that they want one"
        yield SpecWarning(f"{_BALANCER}.{'api_keys' if access.keys else 'api_keys_file'}", message)


def _mismatches(
    targets: Sequence[AcceleratorQps], choices: Sequence[ResourceChoice]
) -> Iterator[SpecWarning]:
    """Yield a target for an accelerator that is not requested, or none for one that is. SkyPilot allows both."""
    offered = {(choice.accelerator, choice.accelerator_count) for choice in choices}
    served = set()
    for target in targets:
        fits = {
            (name, count)
            for name, count in offered
            if (name or "").lower() == target.accelerator.lower() and target.count in (None, count)
        }
        if not fits:
            key = target.accelerator if target.count is None else f"{target.accelerator}:{target.count:g}"
            message = f"names {shown(key)}, which is not among the accelerators of resources"
            yield SpecWarning(_TARGETS, message)
        served |= fits
    for name, count in sorted(offered - served, key=str):
        missing = "no accelerator" if name is None else f"{name}:{count:g}"
        message = f"has no value for {missing}, which resources allows: the smallest value counts for it"
        yield SpecWarning(_TARGETS, message)
