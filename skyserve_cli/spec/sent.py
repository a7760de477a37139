"""A spec that another program sends: checked as if it stood in a service file.

What the controller's API takes is the JSON of `codec`, from any program. It is written as the file that would say the same
(`_as_file`), and goes the way of every file: the same types, ranges and rules, so there is no second list of them. What the file then
means must be what was sent; anything else cannot be said in a file, and is refused. Problems are by the paths of the JSON.
"""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from skyserve_cli.spec.balancer import MIB
from skyserve_cli.spec.build import build
from skyserve_cli.spec.codec import LIMITS, spec_from_json, spec_to_json
from skyserve_cli.spec.json_text import insist_on_usable
from skyserve_cli.spec.model import ServiceSpec
from skyserve_cli.spec.placement import ALIASES
from skyserve_cli.spec.problems import Loc, Problem, SpecError, dotted
from skyserve_cli.spec.variables import gather
from skyserve_cli.spec.whole_file import checked_file, service_name

#: By the keys of the JSON those of a file. `file_key` has the rule for the others.
_KEYS: Mapping[str, str] = {
    "name": "name",
    "run": "run",
    "setup": "setup",
    "num_nodes": "num_nodes",
    "event_callback": "event_callback",
    "pod": "kubernetes.pod",
    "cache": "cache",
    "workdir": "workdir.path",
    "workdir_git": "workdir",
    "secrets": "secrets",
    "envs": "envs",
    "file_mounts": "file_mounts",
    "resources": "resources",
    "ports": "resources.ports",
    "port": "service.ports",
    "probe": "service.readiness_probe",
    "probe.interval_s": "service.readiness_probe.endpoint_probe_interval_seconds",
    "probe.failure_threshold_s": "service.readiness_probe.consecutive_failure_threshold_timeout",
    "replica_policy.slo.autoscaler": "service.replica_policy.autoscaler",
    "regional": "service.load_balancers",
    "regional.places": "service.load_balancers.regions",
    "regional.instance_types": "service.load_balancers.instance_type",
    "load_balancer.max_body_bytes": "service.load_balancer.max_body_mb",
    "load_balancer.queue_size": "service.load_balancer.queue.size",
    "load_balancer.queue_timeout_s": "service.load_balancer.queue.timeout_seconds",
    "load_balancer.retries.budget_ratio": "service.load_balancer.retries.budget_percent",
    "load_balancer.breaker": "service.load_balancer.circuit_breaker",
    "load_balancer.breaker.failures": "service.load_balancer.circuit_breaker.failure_threshold",
    "load_balancer.breaker.errors_in_row": "service.load_balancer.circuit_breaker.error_threshold",
    "load_balancer.breaker.first_s": "service.load_balancer.circuit_breaker.timeout_seconds",
    "load_balancer.breaker.longest_s": "service.load_balancer.circuit_breaker.max_timeout_seconds",
    "load_balancer.pushing.mode": "service.load_balancer.pushing",
    "load_balancer.pushing.cap": "service.load_balancer.max_concurrency_per_replica",
    "load_balancer.continuation.mode": "service.load_balancer.continuation",
    "load_balancer.access.keys": "service.load_balancer.api_keys",
    "load_balancer.access.keys_file": "service.load_balancer.api_keys_file",
    "load_balancer.access.overrides": "service.load_balancer.allow_policy_override",
    "load_balancer.access.strict_json": "service.load_balancer.strict_json",
    "load_balancer.access.keys_in_query": "service.load_balancer.api_key_in_query",
    "load_balancer.cache_events.enabled": "service.load_balancer.cache_events",
    "load_balancer.access.prices": "service.load_balancer.prices",
}
#: The values that are written as they are, by section.
_PLAIN: Mapping[str, str] = {
    "": "name run setup num_nodes event_callback pod team load_balancing_policy drain_timeout_s notice_drain_s "
    "workdir ports port secrets workdir_git.url workdir_git.ref tls.keyfile tls.certfile "
    "cache.kind cache.variables cache.claim",
    "probe": "path post_data initial_delay_s timeout_s interval_s failure_threshold_s",
    "replica_policy": "min_replicas max_replicas target_ongoing_requests_per_replica target_queue_length "
    "target_kv_cache_usage upscale_delay_s downscale_delay_s "
    "num_overprovision price_band spot_price_cap spread_again_after_s load_window_s max_usd_hour slo.ttft_ms slo.tpot_ms "
    "slo.attainment slo.capacity_qps slo.autoscaler slo.late slo.response_weight schedule",
    "update": "mode max_surge max_unavailable",
    "load_balancer": "host port trusted_proxies "
    "retries.max_worker_retries retries.max_total_retries breaker.failures breaker.errors_in_row breaker.first_s "
    "breaker.longest_s pushing.mode continuation.mode access.overrides access.strict_json access.keys_in_query "
    "access.prices cors.origins cors.methods cors.headers cors.exposed_headers cors.max_age_s cors.credentials "
    "session.cookie session.fields metrics.target_label warming.seconds cache_events.enabled "
    + " ".join(LIMITS),
    "regional": "count port spill usd_per_second url",
}
_ON_SPOT = ("dynamic_ondemand_fallback", "base_ondemand_fallback_replicas", "availability_target")
#: Names of one resource choice that are others in a file.
_CHOICE: Mapping[str, str] = {
    "disk_size_gb": "disk_size",
    "max_usd_hour": "max_hourly_cost",
    "images": "image_id",
    "accelerator": "accelerators",
}
#: What is counted in another unit in a file.
_UNITS: Mapping[str, str] = {
    "load_balancer.max_body_bytes": "in MiB, ",
    "load_balancer.retries.budget_ratio": "in percent, ",
}


def sent_spec(document: Mapping[str, Any]) -> ServiceSpec:
    """Return the spec in the JSON that another program sent. Raises SpecError with the paths of the JSON."""
    insist_on_usable(document)
    spec = spec_from_json(document)
    sent = spec_to_json(spec)
    differing = list(_differing(document, sent, ()))
    if differing:
        raise SpecError(differing)
    file, paths = _as_file(sent)
    variables = gather(file, {}, {}, {})
    checked = checked_file(file, variables, {})
    problems = [*variables.problems, *checked.problems]
    name = service_name(spec.name, checked, problems)
    if problems or checked.file is None or checked.file.service is None:
        raise SpecError(_translated(each, paths) for each in problems)
    read = build(checked.file, checked.file.service, name, checked.candidates, variables, checked.keys.keys)
    differing = list(_differing(sent, spec_to_json(read), ()))
    if differing:
        raise SpecError(differing)
    return spec


def _differing(given: object, kept: object, loc: Loc) -> Iterator[Problem]:
    """Yield what is not kept as it was given. What is absent from `given` is the default."""
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key, value in given.items():
            if key not in kept:
                hint = "a newer program may have sent it: upgrade the controller first"
                yield Problem(dotted((*loc, key)), "unknown key", hint=hint)
            elif loc != ("replica_policy",) or key not in ("spot_placer", "dynamic_ondemand_fallback"):
                yield from _differing(value, kept[key], (*loc, key))
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _differing(one, other, (*loc, index))
    elif not _same(given, kept):
        yield Problem(dotted(loc), "cannot be kept as it is: no service file means this")


def _same(one: object, other: object) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other or math.isclose(one, other, rel_tol=1e-12)
    return one == other


def _as_file(sent: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tree of the service file that says what the JSON does, and by its paths those of the JSON."""
    file = _File(sent)
    for section, keys in _PLAIN.items():
        for key in keys.split():
            path = f"{section}.{key}" if section else key
            file.put(path, file.value(path))
    file.put("envs", dict(sent["envs"]))
    file.put("probe.headers", dict(sent["probe"]["headers"]) or None)
    _put_policy(file, sent)
    _put_balancer(file, sent["load_balancer"])
    _put_regional(file, sent)
    for index, mount in enumerate(sent["file_mounts"]):
        own = {"source": mount["sources"] or None, "name": mount["bucket"]}
        file.put_at(
            ("file_mounts", mount["path"]),
            ("file_mounts", index),
            own | {key: mount[key] for key in ("mode", "store", "persistent")},
        )
    key = "ordered" if sent["resources_ordered"] else "any_of"
    file.put_at(("resources", key), ("resources",), [_choice(each) for each in sent["resources"]])
    for index in range(len(sent["resources"])):
        for ours, theirs in _CHOICE.items():
            file.put_at(("resources", key, index, theirs), ("resources", index, ours), None)
    return file.tree, file.paths


class _File:
    """A tree that is written key by key, with where each came from."""

    def __init__(self, sent: Mapping[str, Any]) -> None:
        self.tree: dict[str, Any] = {"service": {}}
        self.paths: dict[str, str] = {"service": ""}
        self._sent = sent

    def value(self, path: str) -> Any:
        """Return the value in the JSON; None if it, or what it is in, is null."""
        found: Any = self._sent
        for key in path.split("."):
            found = None if found is None else found[key]
        return found

    def put(self, path: str, value: object) -> None:
        """Write what is at this path of the JSON; None is the default."""
        self.put_at(tuple(file_key(path).split(".")), tuple(path.split(".")), value)

    def put_at(self, loc: Loc, path: Loc, value: object) -> None:
        self.paths[dotted(loc)] = dotted(path)
        if value is None:
            return
        tree: Any = self.tree
        for step in loc[:-1]:
            tree = tree.setdefault(step, {})
        tree[loc[-1]] = value


def file_key(path: str) -> str:
    """Return the key of a service file for one of the JSON: `probe.timeout_s` is `service.readiness_probe.timeout_seconds`."""
    if path in _KEYS:
        return _KEYS[path]
    parent, _, key = path.rpartition(".")
    for short, long in (("_per_s", "_per_second"), ("_s", "_seconds")):
        if key.endswith(short):
            key = f"{key.removesuffix(short)}{long}"
            break
    return f"{file_key(parent) if parent else 'service'}.{key}"


def _translated(problem: Problem, paths: Mapping[str, str]) -> Problem:
    """Return the problem by the path of the JSON: that of the longest part of its own that is known, and the rest."""
    path = problem.path
    known = [each for each in paths if path == each or path.startswith((f"{each}.", f"{each}["))]
    longest = max(known, key=len, default="")
    path = (paths.get(longest, "") + path[len(longest) :]).removeprefix(".")
    return Problem(path, _UNITS.get(path, "") + problem.message, hint=problem.hint)


def _put_policy(file: _File, sent: Mapping[str, Any]) -> None:
    policy = sent["replica_policy"]
    at, by_accelerator = "replica_policy.", policy["target_qps_by_accelerator"]
    rates = {_accelerator(each["accelerator"], each["count"]): each["qps"] for each in by_accelerator}
    file.put(f"{at}target_qps_per_replica", rates or policy["target_qps_per_replica"])
    file.put(
        f"{at}schedule",
        [
            {"duration" if key == "duration_s" else key: value for key, value in entry.items()}
            for entry in policy["schedule"]
        ],
    )
    if any(choice["use_spot"] for choice in sent["resources"]):
        for key in _ON_SPOT:
            file.put(f"{at}{key}", policy[key])
        names = {placer: name for name, placer in ALIASES.items()}
        placer = policy["spot_placer"]
        # Without any of these keys it is "spread", which takes machines that are no spot machines too.
        file.put(f"{at}spot_placer", None if placer == "spread" else names.get(placer, placer))


def _accelerator(name: str, count: float | None) -> str:
    return name if count is None else f"{name}:{count!r}"


def _put_balancer(file: _File, balancer: Mapping[str, Any]) -> None:
    at, body = "load_balancer.", balancer["max_body_bytes"] / MIB
    file.put(f"{at}max_body_bytes", int(body) if body.is_integer() else body)
    # Of the decimal fraction: which is what a file has as a percentage.
    file.put(f"{at}retries.budget_ratio", float(100 * Decimal(repr(balancer["retries"]["budget_ratio"]))))
    pushing = balancer["pushing"]
    file.put(f"{at}pushing.cap", pushing["cap"] if pushing["mode"] == "fixed_cap" else None)
    file.put(f"{at}workers", balancer["workers"] or None)
    access = balancer["access"]
    file.put(f"{at}access.keys_file", access["keys_file"] or None)
    keys = [{name: value for name, value in key.items() if value} for key in access["keys"]]
    for key in keys:
        models = key.get("models", {}).items()
        key["models"] = {model: {name: n for name, n in limits.items() if n} for model, limits in models}
    file.put(f"{at}access.keys", keys or None)


def _put_regional(file: _File, sent: Mapping[str, Any]) -> None:
    regional = sent["regional"]
    if not regional["places"]:
        file.tree["service"].pop("load_balancers", None)  # what else is said of them must be the default
    else:
        file.put("regional.places", [f"{cloud}/{region}" for cloud, region in regional["places"]])
        types = dict(regional["instance_types"])
        file.put("regional.instance_types", (types["*"] if set(types) == {"*"} else types) or None)
        dns = regional["dns"]
        file.put("regional.dns", None if dns is None else {**dns, "name": dns["name"] or "@"})
    for index, zone in enumerate(sent["residency"]):
        own = {"served_in": zone["served_in"], "entered_in": zone["entered_in"] or None}
        file.put_at(("service", "residency", zone["name"]), ("residency", index), own)


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    written = {_CHOICE.get(key, key): value for key, value in choice.items()}
    name, count = choice["accelerator"], written.pop("accelerator_count")
    written["accelerators"] = None if name is None else {name: count}
    written["image_id"] = dict(choice["images"]) or None
    written["labels"] = dict(choice["labels"]) or None
    return written
