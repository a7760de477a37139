"""What `serve status` and `serve report` show, as JSON: pure functions of rows and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from lb.config.schema import Build
from policies import crashes
from policies.goals import Goal, PlacementGoal
from policies.health import FailedProbe
from policies.history import Load
from policies.model import CapacityType, EndReason, Json, Replica, ReplicaState
from policies.rollout import crash_note, wanted_version
from policies.service_state import service_state
from provisioners.port.base import Instance
from skyserve_cli.controller.balancers.front_address import reach_of
from skyserve_cli.controller.balancers.local_fleet import AgentView
from skyserve_cli.controller.balancers.regional_view import RegionalView
from skyserve_cli.controller.reconcile.leases import lease_view
from skyserve_cli.controller.reconcile.mappers import on_demand_price
from skyserve_cli.output import span
from skyserve_cli.spec.model import ServiceSpec, SloSpec
from skyserve_cli.state.values import DemandRow, ServiceHistory, ServiceRow, Spent

_NOTHING: Mapping[int, str] = MappingProxyType({})
_NO_PROBES: Mapping[int, FailedProbe] = {}
_NOTHING_PRINTED: Mapping[tuple[str, int], str] = MappingProxyType({})
_NO_MACHINES: Mapping[str, Mapping[str, Instance]] = MappingProxyType({})

PRINTS = "it prints: "

#: Failures that say what has to be fixed. Preemptions are expected.
FAILURES = frozenset(EndReason) - {
    *(EndReason.PREEMPTED, EndReason.SCALED_DOWN, EndReason.REPLACED, EndReason.SERVICE_DOWN, EndReason.USER)
}


def service_view(
    row: ServiceRow,
    spec: ServiceSpec,
    goal: Goal,
    *,
    local_agent: AgentView | None,
    agents: Mapping[int, RegionalView],
    load: Load,
    spent: Spent,
    host: str,
    ended: Sequence[Replica],
    num_nodes: Mapping[int, int],
    now: float,
    failure: Replica | None = None,
    logs: Mapping[int, str] = _NOTHING,
    day: Sequence[DemandRow] = (),
    machines: Mapping[str, Mapping[str, Instance]] = _NO_MACHINES,
    failed_probes: Mapping[int, FailedProbe] = _NO_PROBES,
    printed: Mapping[tuple[str, int], str] = _NOTHING_PRINTED,
) -> dict[str, Any]:
    """Return one service.

    Instants are UNIX seconds, money is US dollars; `ended` replicas are listed after the live. `failure` is the last
    replica that failed, while that matters; `logs` are the files of the home that have the end of a replica's log, `machines`
    those with a lease or a message, by cloud and id. `num_nodes` are the nodes of a replica by its version. `agents`
    are the load balancer agents on machines of their own by id. Of the
    hourly costs, `_on_demand` is that of the same replicas on demand, and `_wanted_on_demand` that of as many as are
    wanted. `failed_probes` are the last ones of replicas whose last probe failed, `printed` the last lines of
    those that come up, by service and id. `day` are the minutes of demand of the last 24 hours, of a service with an SLO.
    """
    endpoints = endpoints_of(row, spec, host, is_local=local_agent is not None)
    trial = _trial_view(row, goal, now)
    status = service_state(
        goal, row.attempts if row.down else row.replicas, row.target, row.memory.rollout, now
    )
    stand_ins = _stand_ins(row.replicas, goal.placement)
    return {
        "name": row.name,
        "team": row.team or None,
        "version": row.version,
        "serving_version": serving_version(row),
        "status": status.value,
        "endpoint": endpoints[0] if endpoints else "",
        "endpoints": endpoints,
        "endpoint_reach": reach_of(endpoints[0]) if endpoints else None,
        "wanted": row.wanted,
        "target": row.target,
        "ready": sum(r.state is ReplicaState.READY for r in row.replicas),
        "notes": _notes(row, trial, now),
        "trial": trial,
        "availability": _availability(row, goal.placement, now),
        "created_at": row.created_at,
        "update_mode": row.update_mode.value,
        "failed_versions": list(row.memory.rollout.get("failed", ())),
        "same_versions": sorted(row.same_replicas),
        "load_balancing_policy": spec.load_balancing_policy,
        "load_balancer": None if local_agent is None else _local_agent_view(local_agent),
        "load_balancers": [
            _agent_view(agent, spec, agents[agent.id], _machine_of(agent, machines))
            for agent in row.balancers
        ],
        "load_balancers_wanted": 0 if row.down else spec.regional.count * len(spec.regional.places),
        "load": _load_view(load, row, failed_probes),
        "warming": sorted(load.warming),
        "cost": _cost_view(row, spent),
        "replicas": [
            {
                **replica_view(r, num_nodes[r.version]),
                "message": _message(
                    r, failed_probes, printed.get((row.name, r.id), ""), _machine_of(r, machines)
                ),
                "lease": _lease_view(_machine_of(r, machines)),
                "stands_in": r.id in stand_ins,
                "kept_log": logs.get(r.id),
            }
            for r in (*row.replicas, *ended)
        ],
        "slo": slo_view(spec.slo, row.memory.scaling, day),
        "last_failure": None if failure is None else failure_view(failure),
    }


def _message(replica: Replica, failed: Mapping[int, FailedProbe], line: str, machine: Instance | None) -> str:
    """Return what is known of a replica; of one that comes up also the last `line` that it has printed."""
    if line and replica.state is ReplicaState.PROVISIONING:
        return f"{PRINTS}{line}"  # newer than why it was launched
    said = replica.message or _probe_message(replica, failed)
    if not said and replica.state is ReplicaState.READY and machine is not None:
        return machine.message
    return f"{said}; {PRINTS}{line}" if line and said and replica.state is ReplicaState.STARTING else said


def _probe_message(replica: Replica, failed: Mapping[int, FailedProbe]) -> str:
    """Return what the last probe of a replica met, if it failed."""
    last = failed.get(replica.id)
    if last is not None and replica.state is ReplicaState.STARTING:
        return f"waiting for the readiness probe: {last.why.removeprefix('probe failed: ')}"
    if last is not None and _is_loaded(replica, last):
        return f"loaded: its readiness probe waits behind requests ({last.why})"
    return ""


def _load_view(load: Load, row: ServiceRow, failed: Mapping[int, FailedProbe]) -> dict[str, float | None]:
    return {
        "requests_per_s": load.requests / load.window_s if load.known else None,
        "in_flight": load.in_flight,
        "queued": load.queued,
        "loaded": sum(_is_loaded(replica, failed.get(replica.id)) for replica in row.replicas),
    }


def _is_loaded(replica: Replica, last: FailedProbe | None) -> bool:
    return replica.state is ReplicaState.READY and last is not None and last.timed_out


def _local_agent_view(agent: AgentView) -> dict[str, Any]:
    """Return the agent beside the controller."""
    return {
        "alive": agent.alive,
        "synced": agent.acked,
        "ready_targets": agent.ready_targets,
        "restarts": agent.restarts,
        "build": _build_view(agent.build),
    }


def _build_view(build: Build | None) -> dict[str, Any] | None:
    """Return how an agent runs; None: an older one, or it has not responded yet."""
    return None if build is None else build.to_json()


def _cost_view(row: ServiceRow, spent: Spent) -> dict[str, float]:
    """Return costs in US dollars: per hour now, and since the service is up."""
    billed = [replica.offer for replica in row.replicas if replica.launched_at is not None]
    renting = [agent.offer for agent in row.balancers if agent.launched_at is not None]
    on_demand = [on_demand_price(offer) for offer in billed]
    return {
        "usd_per_hour": round(sum(offer.price_usd_hour for offer in billed), 6),
        "usd_per_hour_load_balancers": round(sum(offer.price_usd_hour for offer in renting), 6),
        "usd_per_hour_on_demand": round(sum(on_demand), 6),
        "usd_per_hour_wanted_on_demand": round(row.wanted * min(on_demand, default=0.0), 6),
        "usd_total": round(spent.usd, 6),
        "usd_on_demand_equivalent": round(spent.usd_on_demand, 6),
    }


def _availability(row: ServiceRow, goal: PlacementGoal, now: float) -> dict[str, Any] | None:
    """Return what RiskHedge was asked for and what came of it; None for other policies and until first complete."""
    budget = row.memory.placement.get("budget")
    if budget is None:
        return None
    from policies.placement.risk_availability import availability  # as late as the policy itself

    found = availability(budget, goal.availability_target, now)
    return None if found is None else found._asdict()


def _trial_view(row: ServiceRow, goal: Goal, now: float) -> dict[str, Any] | None:
    """Return that the wanted version crashes, and when the next replica is tried; None: it does not, or it was given up."""
    memory = row.memory.rollout
    version = wanted_version(goal, memory)
    lives, at = crashes.row(memory, version), memory.get("retry_at", 0.0)
    if not lives or version in memory.get("failed", ()):
        return None
    why, at = crash_note(version, memory), at if at > now else None
    return {"version": version, "short_lives": lives, "message": why, "next_launch_at": at}


def _notes(row: ServiceRow, trial: Mapping[str, Any] | None, now: float) -> str:
    """Return the notes of the tick, and of a trial how long it waits, which the tick does not write down."""
    if trial is None or trial["next_launch_at"] is None:
        return row.notes
    why = trial["message"]
    return row.notes.replace(why, f"{why}, next launch in {span(trial['next_launch_at'] - now)}", 1)


def serving_version(row: ServiceRow) -> int | None:
    """Return the newest version that has a ready replica and was not given up; None if there is none.

    Replicas of an older version that the newest keeps count as its own.
    """
    versions = {
        row.version if replica.version in row.same_replicas else replica.version
        for replica in row.replicas
        if replica.state is ReplicaState.READY
    }
    return max(versions - set(row.memory.rollout.get("failed", ())), default=None)


def is_well(row: ServiceRow) -> bool:
    """As many replicas are ready as are wanted, and of the version that is wanted."""
    ready = sum(replica.state is ReplicaState.READY for replica in row.replicas)
    return ready >= row.wanted and row.version not in row.memory.rollout.get("failed", ())


def last_failure(row: ServiceRow, ended: Sequence[Replica]) -> Replica | None:
    """Return why the service is not well, as far as the end of a replica shows.

    The last one of its version to fail, unless another has become ready since.
    """
    if is_well(row):
        return None
    given_up = row.version in row.memory.rollout.get("failed", ())
    ready = [replica.id for replica in row.replicas if replica.state is ReplicaState.READY]
    first = 0 if given_up else max(ready, default=0)
    failed = [
        replica
        for replica in (*row.replicas, *ended)
        if replica.end_reason in FAILURES
        and replica.id > first
        and (replica.version == row.version or replica.version in row.same_replicas)
    ]
    return max(failed, key=lambda replica: replica.id, default=None)


def failure_view(replica: Replica) -> dict[str, Any]:
    """Return why a replica failed: `reason` for programs, `message` for people."""
    zone, reason = replica.zone, replica.end_reason
    return {
        "replica_id": replica.id,
        "version": replica.version,
        "at": replica.ended_at or replica.since,
        "cloud": zone.cloud,
        "region": zone.region,
        "zone": zone.label,
        "reason": None if reason is None else reason.value,
        "message": replica.message,
    }


def _machine_of(replica: Replica, machines: Mapping[str, Mapping[str, Instance]]) -> Instance | None:
    of_cloud = machines.get(replica.zone.cloud, {})
    return None if replica.instance_id is None else of_cloud.get(replica.instance_id)


def _lease_view(machine: Instance | None) -> dict[str, Any] | None:
    return lease_view(None if machine is None else machine.lease)


def _agent_view(
    agent: Replica, spec: ServiceSpec, seen: RegionalView, machine: Instance | None
) -> dict[str, Any]:
    """Return a load balancer agent on a machine of its own. `version` is of its code; `newest`: it is the one that we have."""
    return {
        **replica_view(agent),
        "lease": _lease_view(machine),
        "endpoint": None if agent.endpoint is None else _with_scheme(agent.endpoint, spec),
        "alive": agent.state is ReplicaState.READY,
        "synced": seen.synced,
        "ready_targets": seen.ready_targets,
        "owned": None if seen.owned is None else list(seen.owned),
        "peers": list(seen.peers),
        "taken_over": list(seen.taken_over),
        "ttft_p50_s": seen.ttft_s[0],
        "ttft_p90_s": seen.ttft_s[1],
        "agent_version": seen.version,
        "newest": seen.newest,
        "starts": seen.starts,
        "build": _build_view(seen.build),
        "message": agent.message or seen.trouble,
        "trouble": seen.trouble,
    }


def endpoints_of(row: ServiceRow, spec: ServiceSpec, host: str, *, is_local: bool) -> list[str]:
    """Return the endpoints of the service, the public one first: its name if it has one, else an agent's."""
    ready = [agent for agent in row.balancers if agent.state is ReplicaState.READY and agent.endpoint]
    ready.sort(key=lambda agent: (_rank(agent, spec), agent.id))
    found = [_with_scheme(agent.endpoint or "", spec) for agent in ready]
    if spec.regional.dns is not None and found:
        port = urlsplit(found[0]).port
        found.insert(0, f"{_scheme(spec)}://{spec.regional.dns.full.removesuffix('.')}:{port}")
    if spec.regional.url is not None and found:
        found.insert(0, spec.regional.url)
    return [*found, endpoint_of(row, spec, host)] if is_local else found


def _rank(agent: Replica, spec: ServiceSpec) -> int:
    """Return where its region stands in the file."""
    here = (agent.zone.cloud, agent.zone.region)
    places = [tuple(place) for place in spec.regional.places]
    return places.index(here) if here in places else len(places)


def _with_scheme(endpoint: str, spec: ServiceSpec) -> str:
    return endpoint.replace("http://", f"{_scheme(spec)}://", 1)


def _scheme(spec: ServiceSpec) -> str:
    return "http" if spec.tls is None else "https"


def _stand_ins(replicas: Sequence[Replica], placement: PlacementGoal) -> frozenset[int]:
    """Return the on-demand replicas that are there because spot ones are missing: all but the oldest ones that are always on demand."""
    if not placement.dynamic_ondemand_fallback:
        return frozenset()
    on_demand = sorted(r.id for r in replicas if r.offer.capacity_type is CapacityType.ON_DEMAND)
    return frozenset(on_demand[placement.base_ondemand_fallback_replicas :])


def endpoint_of(row: ServiceRow, spec: ServiceSpec, host: str) -> str:
    shown = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104 - shown, not bound
    shown = f"[{shown}]" if ":" in shown else shown
    return f"{_scheme(spec)}://{shown}:{row.lb_port}"


def history_view(
    row: ServiceRow,
    placement: PlacementGoal,
    history: ServiceHistory,
    num_nodes: Mapping[int, int],
    now: float,
) -> dict[str, Any]:
    """Return what became of a service.

    Its replicas, and `changes` of their states and of the number wanted (those without a replica), in order. `placement` is
    that of its present version.
    """
    return {
        "name": row.name,
        "version": row.version,
        "down": row.down,
        "created_at": row.created_at,
        "since": history.since,
        "complete_from": history.complete_from,
        "now": now,
        "policy": placement.placer,
        "overprovision": placement.num_overprovision,
        "availability_target": placement.availability_target,
        "replicas": [replica_view(r, num_nodes[r.version]) for r in history.replicas],
        "changes": [change._asdict() for change in history.changes],
    }


def replica_view(replica: Replica, num_nodes: int = 1) -> dict[str, Any]:
    offer = replica.offer
    return {
        "id": replica.id,
        "version": replica.version,
        "state": replica.state.value,
        "cloud": offer.zone.cloud,
        "region": offer.zone.region,
        "zone": offer.zone.label,
        "capacity_type": offer.capacity_type.value,
        "instance_type": offer.instance_type,
        "accelerator": offer.accelerator,
        "accelerator_count": offer.accelerator_count,
        "num_nodes": num_nodes,
        "price_usd_hour": offer.price_usd_hour,
        "on_demand_usd_hour": on_demand_price(offer),
        "endpoint": replica.endpoint,
        "instance_id": replica.instance_id,
        "since": replica.since,
        "created_at": replica.created_at,
        "launched_at": replica.launched_at,
        "ready_at": replica.ready_at,
        "preempt_at": replica.preempt_at,
        "retire_at": replica.retire_at,
        "ended_at": replica.ended_at,
        "end_reason": None if replica.end_reason is None else replica.end_reason.value,
        "message": replica.message,
    }


#: What the scaler saw in the last minute it decided by (`policies.scaling.predictive`), by its name in the view.
_SEEN = {
    "work_per_min": "last",
    "work_per_request": "size",
    "forecast_per_min": "add",
    "forecast_most_per_min": "keep",
    "headroom": "headroom",
    "capacity_qps": "capacity_qps",
    "cold_start_s": "cold_start_s",
    "would_want": "would_want",
}


def slo_view(slo: SloSpec | None, scaling: Json, day: Sequence[DemandRow]) -> dict[str, Any] | None:
    """Return the SLO and how the service keeps it; None where it has none.

    `day` are the minutes of the last 24 hours. `attainment` is the share of their requests in time (null without any),
    `budget_left` the share of the late requests allowed in them that was not used: below 0, the SLO is missed. The other
    figures are null until a minute was decided by; `forecast_per_min` is the busiest minute when a replica launched now would be
    ready. Both and the capacity are work, in requests of the usual size, `work_per_request` of which the last minute's had: null
    where no tokens are known, so that requests are counted. `token_weights` are the work of a request as such, of a token of its
    prompt and of its response. `capacity_learned` means that no number in the file gives the capacity.
    """
    if slo is None:
        return None
    asked, late = sum(row.requests for row in day), sum(row.late for row in day)
    allowed = (1.0 - slo.attainment) * asked
    seen = scaling.get("seen", {})
    last, size = seen.get("last"), seen.get("size")
    return {
        "ttft_ms": slo.ttft_ms,
        "tpot_ms": slo.tpot_ms,
        "attainment_asked": slo.attainment,
        "attainment": max(0.0, 1.0 - late / asked) if asked else None,
        "budget_left": 1.0 - late / allowed if allowed else None,
        "minutes_known": len(day),
        "autoscaler": slo.autoscaler,
        "capacity_learned": slo.capacity_qps is None,
        "requests_per_min": last / size if last and size else last,
        "token_weights": scaling.get("work", {}).get("weights"),
        **{name: seen.get(key) for name, key in _SEEN.items()},
    }
