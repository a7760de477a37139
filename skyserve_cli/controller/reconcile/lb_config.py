"""The table a load balancer should have. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import urlsplit

import orjson

from lb.config.options import Slo
from lb.config.schema import Readiness, Table, Target
from policies import rollout
from policies.goals import Goal
from policies.model import Json, Replica, ReplicaState
from policies.regions.residency import served_zones
from policies.routing.deadlines import Late
from policies.routing.names import DEFAULT_POLICY, NAMES, RETIRED
from policies.throughput import qps_of
from skyserve_cli.spec.model import ServiceSpec

_LEAST_CAPACITY = 1e-6  # that an agent takes
_STATES = {
    ReplicaState.READY: Readiness.READY,
    ReplicaState.NOT_READY: Readiness.UNHEALTHY,
    ReplicaState.DRAINING: Readiness.DRAINING,
}


def table_of(
    service: str,
    spec: ServiceSpec,
    replicas: Sequence[Replica],
    goal: Goal,
    rollout_memory: Json,
    now: float,
    epoch: int = 0,
    targets_ca: str = "",
    tls_name: Callable[[Replica], str] = lambda replica: "",
    loaded: Collection[int] = (),
    known: KnownTargets | None = None,
) -> Table:
    """Return the targets that may serve, and how the service wants its requests treated. `loaded` are ids of replicas.

    `known` has the targets of its last table, and is kept up to date.

    Equal contents have equal revisions within one `epoch` (the term of the controller). The time that is left of a drain goes by without a new one: an agent counts
    it from the push. An instant that moves, as a preemption notice moves it, makes a new revision.
    """
    balancer, limits = spec.load_balancer, spec.load_balancer.limits
    policy = RETIRED.get(spec.load_balancing_policy, spec.load_balancing_policy)
    known = KnownTargets() if known is None else known
    made = known.of(rollout.serving(replicas, goal, rollout_memory), spec, goal, tls_name, loaded)
    has_names = any(one.target.tls_name for one in made)
    table = Table(
        service,
        "-",
        (),
        policy if policy in NAMES else DEFAULT_POLICY,
        replace(
            limits,
            time_to_first_byte_s=_within_a_day(limits.time_to_first_byte_s),
            idle_timeout_s=_within_a_day(limits.idle_timeout_s),
            hold_s=_hold_s(goal, limits.hold_s),
        ),
        balancer.retries,
        balancer.breaker,
        balancer.pushing,
        balancer.continuation,
        balancer.access,
        balancer.cors,
        balancer.trusted_proxies,
        balancer.session,
        metrics=balancer.metrics,
        slo=_slo(spec),
        warming=balancer.warming,
        cache_events=balancer.cache_events,
        targets_ca=targets_ca if has_names else "",
    )
    content = b"".join([_digest(table.to_json()), *[one.digest for one in made]])
    return replace(
        table,
        revision=f"{epoch}.{hashlib.sha256(content).hexdigest()[:16]}",
        epoch=epoch,
        targets=tuple(
            one.target if one.target.drain_deadline_s is None else _counting_down(one.target, now)
            for one in made
        ),
    )


class _Made(NamedTuple):
    """A target, and what it was made of beside the spec and the goal."""

    replica: Replica
    is_loaded: bool
    target: Target
    digest: bytes


class KnownTargets:
    """The targets of one service as last made. A replica that is the same object has the same target."""

    def __init__(self) -> None:
        self._basis: tuple[object, ...] = ()
        self._made: dict[int, _Made] = {}

    def of(
        self,
        serving: Sequence[Replica],
        spec: ServiceSpec,
        goal: Goal,
        tls_name: Callable[[Replica], str],
        loaded: Collection[int],
    ) -> list[_Made]:
        """Return those of the `serving` replicas, in order."""
        basis = (spec, goal.scaling.target_qps_by_accelerator)
        if basis != self._basis:
            self._basis, self._made = basis, {}
        before, made = self._made, []
        for replica in serving:
            was, is_loaded = before.get(replica.id), replica.id in loaded
            if was is None or was.replica is not replica or was.is_loaded is not is_loaded:
                target = _target(replica, spec, goal, tls_name(replica), is_loaded=is_loaded)
                was = _Made(replica, is_loaded, target, _digest(target.to_json()))
            made.append(was)
        self._made = {one.replica.id: one for one in made}
        return made


def _digest(value: object) -> bytes:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).digest()


def _slo(spec: ServiceSpec) -> Slo:
    given = spec.slo
    if given is None:
        return Slo()
    late = Late(given.late or Late.QUEUE)
    return Slo((given.ttft_ms or 0.0) / 1000.0, (given.tpot_ms or 0.0) / 1000.0, given.late is not None, late)


def without_loopback(table: Table, in_clusters: Collection[str] = ()) -> Table:
    """For an agent on another machine: replicas on this one are not reachable from there.

    The targets `in_clusters` are Pods, whose addresses are given by their cluster and never of this machine.
    """
    kept = tuple(
        target for target in table.targets if target.id in in_clusters or not _is_loopback(target.url)
    )
    if len(kept) == len(table.targets):
        return table
    return replace(table, targets=kept, revision=f"{table.revision}-remote")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _target(replica: Replica, spec: ServiceSpec, goal: Goal, tls_name: str, *, is_loaded: bool) -> Target:
    """With the instant of its drain's end in place of the time that is left."""
    # For a sign of life any response will do, so a path that costs the engine nothing: a probe with a payload is
    # real work, and one with a secret in its path is not public.
    plain = spec.probe.method == "GET" and "$" not in spec.probe.path
    rates = goal.scaling.target_qps_by_accelerator
    state = _STATES[replica.state]
    if is_loaded and state is Readiness.READY:
        state = Readiness.LOADED
    return Target(
        id=str(replica.id),
        url=replica.endpoint or "",
        region=replica.zone.region,
        zone=replica.zone.name,
        capacity_type=replica.offer.capacity_type.value,
        accelerator=replica.offer.accelerator or "",
        state=state,
        health_path=spec.probe.path if plain else "/health",
        drain_deadline_s=replica.drain_by if state is Readiness.DRAINING else None,
        capacity=max(_LEAST_CAPACITY, qps_of(replica.offer, rates)) if rates else 1.0,
        price_usd_hour=replica.offer.price_usd_hour,
        tls_name=tls_name,
        zones=served_zones(spec.residency, f"{replica.zone.cloud}/{replica.zone.region}"),
    )


def _counting_down(target: Target, now: float) -> Target:
    if target.drain_deadline_s is None:
        return target
    return replace(target, drain_deadline_s=max(0.0, target.drain_deadline_s - now))


def _hold_s(goal: Goal, plain_s: float) -> float:
    """Return how long a request waits for a replica. A request that wakes a sleeping service waits for the whole start."""
    if goal.down:  # nothing will come up: to hold a request would be to lie to its client
        return 0.0
    if goal.scaling.min_replicas > 0:
        return plain_s
    return _within_a_day(plain_s + goal.initial_delay_s)


def _within_a_day(seconds: float) -> float:
    """Return an agent refuses longer limits than a day, and whole tables with them."""
    return min(86_400.0, max(0.001, seconds))
