"""The families of metrics of the controller: one table of names, meanings, and how each is read from the API's JSON views.

The views are those of `GET /v1/services` and `GET /v1/health`, so a graph shows the numbers that `serve status` prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from policies.model import CapacityType, ReplicaState

View = Mapping[str, Any]
#: The values of a family's labels after `service`, and its value.
Sample = tuple[tuple[str, ...], float]

_SHOWN_STATES = tuple(state.value for state in ReplicaState if state is not ReplicaState.GONE)


class Family(NamedTuple):
    """A family of metrics. `read` returns its samples from one view; none where the value is unknown."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[View], Iterable[Sample]]


def _one(*path: str) -> Callable[[View], Iterable[Sample]]:
    """Return a reader of the number or truth at a path of keys."""

    def read(view: View) -> Iterable[Sample]:
        found: Any = view
        for key in path:
            found = found[key]
        return () if found is None else (((), float(found)),)

    return read


def _replicas(view: View) -> Iterable[Sample]:
    """Yield a sample for each state, zeros too: an alert on a state that has no replica needs a series."""
    found = Counter((replica["state"], replica["capacity_type"]) for replica in view["replicas"])
    for state in _SHOWN_STATES:
        for kind in CapacityType:
            yield (state, kind.value), float(found[state, kind.value])


def _replicas_by_zone(view: View) -> Iterable[Sample]:
    found = Counter(
        (replica["cloud"], replica["region"], replica["zone"])
        for replica in view["replicas"]
        if replica["state"] == ReplicaState.READY.value
    )
    return ((zone, float(count)) for zone, count in sorted(found.items()))


def _given_up(view: View) -> Iterable[Sample]:
    return (((), float(view["version"] in view["failed_versions"])),)


def _agents(view: View) -> Iterable[Sample]:
    return (((), float(sum(agent["alive"] for agent in _all_agents(view)))),)


def _agents_behind(view: View) -> Iterable[Sample]:
    return (((), float(sum(agent["alive"] and not agent["synced"] for agent in _all_agents(view)))),)


def _all_agents(view: View) -> list[View]:
    """Return the load balancer agents in regions, and the one beside the controller if there is to be one."""
    beside = view["load_balancer"]
    return [*view["load_balancers"], *([] if beside is None else [beside])]


def _slo(name: str) -> Callable[[View], Iterable[Sample]]:
    """Return a reader of a number of the SLO; a service without an SLO, and one that has decided nothing yet, has none."""

    def read(view: View) -> Iterable[Sample]:
        slo = view.get("slo") or {}
        return () if slo.get(name) is None else (((), float(slo[name])),)

    return read


def _demand(view: View) -> Iterable[Sample]:
    """Yield work per second: of the last minute, and as forecast."""
    slo = view.get("slo") or {}
    for of, name in (
        ("now", "work_per_min"),
        ("at_launch", "forecast_per_min"),
        ("most", "forecast_most_per_min"),
    ):
        if slo.get(name) is not None:
            yield (of,), float(slo[name]) / 60.0


def _backup(view: View) -> Iterable[Sample]:
    backup = view.get("backup")
    return () if backup is None else (((), float(backup["newest_at"] or 0.0)),)


def _service(
    name: str, kind: str, text: str, read: Callable[[View], Iterable[Sample]], *labels: str
) -> Family:
    return Family(f"skyserve_service_{name}", kind, text, ("service", *labels), read)


def _controller(name: str, text: str, *path: str) -> Family:
    return Family(f"skyserve_controller_{name}", "gauge", text, (), _one(*path))


_LIMITED = ("gpus", "replicas", "usd_hour", "usd_month")


def _team_used(view: View) -> Iterable[Sample]:
    return (((of,), float(view["used"][of])) for of in _LIMITED)


def _team_limits(view: View) -> Iterable[Sample]:
    found = ((of, view["limits"][f"max_{of}"]) for of in _LIMITED)
    return (((of,), float(limit)) for of, limit in found if limit is not None)


def _team_waiting(view: View) -> Iterable[Sample]:
    return (((), float(len(view["waiting"]))),)


#: Read from the views of `GET /v1/teams`.
OF_TEAM = (
    Family(
        "skyserve_team_used",
        "gauge",
        "What the services of the team use: gpus, replicas, US dollars per hour, and in this month.",
        ("team", "of"),
        _team_used,
    ),
    Family(
        "skyserve_team_limit",
        "gauge",
        "What they may use; no series without a limit.",
        ("team", "of"),
        _team_limits,
    ),
    Family(
        "skyserve_team_services_waiting",
        "gauge",
        "Services that want a replica which the limits of the team do not admit.",
        ("team",),
        _team_waiting,
    ),
)

OF_SERVICE = (
    _service("replicas", "gauge", "Replicas that have not ended.", _replicas, "state", "capacity_type"),
    _service(
        "ready_replicas_by_zone",
        "gauge",
        "Ready replicas; zones without one have no series.",
        _replicas_by_zone,
        "cloud",
        "region",
        "zone",
    ),
    _service("ready_replicas", "gauge", "Replicas that are ready.", _one("ready")),
    _service("wanted_replicas", "gauge", "Ready replicas that the autoscaler wants.", _one("wanted")),
    _service(
        "target_replicas", "gauge", "Wanted replicas and those that are overprovisioned.", _one("target")
    ),
    _service("version", "gauge", "The newest version.", _one("version")),
    _service("serving_version", "gauge", "The newest version with a ready replica.", _one("serving_version")),
    _service("version_given_up", "gauge", "1 if the newest version was given up, else 0.", _given_up),
    _service(
        "load_balancers_alive", "gauge", "Load balancer agents that respond to the controller.", _agents
    ),
    _service(
        "load_balancers_behind",
        "gauge",
        "Of these, agents that have not confirmed the newest table.",
        _agents_behind,
    ),
    _service(
        "requests_per_second",
        "gauge",
        "Requests of clients, over the autoscaler's window; no series while it is unknown.",
        _one("load", "requests_per_s"),
    ),
    _service("in_flight_requests", "gauge", "Requests on replicas now.", _one("load", "in_flight")),
    _service(
        "loaded_replicas",
        "gauge",
        "Ready replicas whose readiness probe waits behind requests.",
        _one("load", "loaded"),
    ),
    _service("queued_requests", "gauge", "Requests that wait for a replica now.", _one("load", "queued")),
    _service(
        "usd_per_hour",
        "gauge",
        "US dollars per hour of the machines of replicas.",
        _one("cost", "usd_per_hour"),
    ),
    _service(
        "on_demand_usd_per_hour",
        "gauge",
        "US dollars per hour of the same replicas at on-demand prices.",
        _one("cost", "usd_per_hour_on_demand"),
    ),
    _service(
        "load_balancers_usd_per_hour",
        "gauge",
        "US dollars per hour of the machines of load balancers.",
        _one("cost", "usd_per_hour_load_balancers"),
    ),
    _service(
        "usd", "counter", "US dollars spent since the service was first started.", _one("cost", "usd_total")
    ),
    Family(
        "skyserve_demand_forecast",
        "gauge",
        "Requests of the usual size per second of a service with an SLO: of the last minute (now), forecast for the busiest minute when a replica "
        "launched now would be ready (at_launch), and the most until a terminated one could be replaced (most).",
        ("service", "of"),
        _demand,
    ),
    Family(
        "skyserve_work_per_request",
        "gauge",
        "Work of a request of the last minute by its tokens; 1 is the usual size of the service's requests.",
        ("service",),
        _slo("work_per_request"),
    ),
    Family(
        "skyserve_slo_attainment",
        "gauge",
        "Share of the requests of the last 24 hours within the SLO.",
        ("service",),
        _slo("attainment"),
    ),
    Family(
        "skyserve_slo_attainment_asked",
        "gauge",
        "Share that the SLO asks for.",
        ("service",),
        _slo("attainment_asked"),
    ),
    Family(
        "skyserve_headroom",
        "gauge",
        "Factor by which more is provided for than is forecast, steered by the error budget of the SLO.",
        ("service",),
        _slo("headroom"),
    ),
    _service(
        "on_demand_usd",
        "counter",
        "US dollars that the same replicas would have cost at on-demand prices.",
        _one("cost", "usd_on_demand_equivalent"),
    ),
)

OF_CONTROLLER = (
    _controller("leads", "1 if this controller leads, 0 if it stands by.", "lease", "leads"),
    _controller("lease_epoch", "The epoch of the lease; grows with each change of leader.", "lease", "epoch"),
    _controller("uptime_seconds", "Time since this controller started.", "uptime_s"),
    _controller("store_ok", "1 if the state could be read and written in the last tick.", "store", "ok"),
    _controller(
        "store_good_timestamp_seconds",
        "When the state could last be read and written, in UNIX seconds.",
        "store",
        "since",
    ),
    Family(
        "skyserve_controller_backup_timestamp_seconds",
        "gauge",
        "When the newest backup in the bucket was made, in UNIX seconds, 0 if there is none; no series without "
        "`controller.backup`.",
        (),
        _backup,
    ),
)
