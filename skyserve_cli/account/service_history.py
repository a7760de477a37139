"""What a running service went through, as the run that a simulation would have made of it.

A pure function of what the controller kept: the lives of replicas, what became of them, and how many were wanted.
So `serve report` counts and draws a real market as `serve simulate` does a recorded one. What was ready is what the
controller knew: a replica that died counts until that was noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

from policies.model import EndReason, ReplicaState
from skyserve_cli.account.runs import ON_DEMAND, SPOT, FleetSample, Run, Simulation

TICK_S = 0.1  # as fine as anything is drawn
LEAST_S = 1.0  # a shorter time is no account
_DAY_S, _HOUR_S = 86_400.0, 3600.0
_REFUSALS = (
    EndReason.CAPACITY,
    EndReason.QUOTA,
    EndReason.AUTH,
    EndReason.REFUSED,
    EndReason.CONFIG,
    EndReason.CLOUD_ERROR,
)
#: Ends that are the service's own doing, not the market's.
_CRASHES = (
    EndReason.SETUP_FAILED,
    EndReason.RUN_EXITED,
    EndReason.START_TIMEOUT,
    EndReason.PROBE_FAILED,
    EndReason.ONLY_ERRORS,
)
_WITHOUT_EXTRA = frozenset({"risk_hedge", "on_demand"})  # decide themselves how many there are

Json = Mapping[str, Any]


class NoHistoryError(ValueError):
    """The service has only just started, or nothing of it is kept."""


class Bought(NamedTuple):
    """One capacity type in one zone, over the time that counts. `hours` are those of its replicas together."""

    zone: str
    region: str
    capacity_type: str
    launches: int
    preemptions: int
    failed_launches: int
    crashes: int
    hours: float
    usd: float


@dataclass(frozen=True, slots=True)
class ServiceHistory:
    """`simulation` has one run. It counts from `counted_from` to `counted_to` (UNIX seconds)."""

    simulation: Simulation
    counted_from: float
    counted_to: float
    bought: tuple[Bought, ...]

    @property
    def run(self) -> Run:
        return self.simulation.runs[0]

    @property
    def preemptions(self) -> int:
        return sum(each.preemptions for each in self.bought)

    @property
    def failed_launches(self) -> int:
        return sum(each.failed_launches for each in self.bought)

    @property
    def crashes(self) -> int:
        return sum(each.crashes for each in self.bought)


def service_history(history: Json) -> ServiceHistory:
    """Return the account of a service. `history` is what the controller's API gives.

    It counts from the moment at which as many replicas were ready as were wanted, for the first time in the life
    of the service (a simulation counts from the end of the first cold start), or from where `history` is complete,
    if that is later; if the target was never reached, from the beginning. On demand, a replica costs the least that
    any of these replicas would have cost there. Raises NoHistoryError.
    """
    end = _end(history)
    moments = _moments(history, end)
    begin = _begin(history, moments)
    if not moments or end - begin < LEAST_S:
        raise NoHistoryError(f"nothing to report of {history['name']} yet")
    spans = [_ReplicaSpan.of(replica, begin, end) for replica in history["replicas"]]
    bought = tuple(_bought(spans))
    empty = _simulation(history, begin, end)
    offset = begin - empty.counted_from_s
    run = _run(history, list(_within(moments, begin, end)), bought, offset)
    simulation = replace(empty, n_target=run.n_target, began_at=offset, runs=(run,))
    return ServiceHistory(simulation, begin, end, bought)


# --- lives of replicas --------------------------------------------------------------------------------------


class _ReplicaSpan(NamedTuple):
    """One replica, as far as it counts: `hours` were paid for, and the rest is whether that was in this time."""

    replica: Json
    hours: float
    was_launched: bool
    was_refused: bool
    was_taken: bool
    crashed: bool

    @staticmethod
    def of(replica: Json, begin: float, end: float) -> _ReplicaSpan:
        launched_at, until = replica["launched_at"], replica["ended_at"] or end
        paid_s = 0.0 if launched_at is None else max(0.0, until - max(launched_at, begin))
        counts = until >= begin
        reason = replica["end_reason"]
        spot = replica["capacity_type"] == SPOT
        return _ReplicaSpan(
            replica,
            paid_s / _HOUR_S,
            was_launched=launched_at is not None and launched_at >= begin,
            was_refused=counts and launched_at is None and reason in _REFUSALS,
            was_taken=counts and launched_at is not None and spot and reason == EndReason.PREEMPTED,
            crashed=counts and reason in _CRASHES,
        )

    @property
    def usd(self) -> float:
        price: float = self.replica["price_usd_hour"]
        return self.hours * price


def _bought(spans: Sequence[_ReplicaSpan]) -> Iterator[Bought]:
    groups: dict[tuple[str, str, str], list[_ReplicaSpan]] = {}
    names = _zone_names([life.replica for life in spans])
    for life in spans:
        replica = life.replica
        key = (replica["region"], names[_zone(replica)], replica["capacity_type"])
        groups.setdefault(key, []).append(life)
    for (region, zone, kind), members in sorted(groups.items()):
        found = Bought(
            zone,
            region,
            kind,
            launches=sum(life.was_launched for life in members),
            preemptions=sum(life.was_taken for life in members),
            failed_launches=sum(life.was_refused for life in members),
            crashes=sum(life.crashed for life in members),
            hours=sum(life.hours for life in members),
            usd=sum(life.usd for life in members),
        )
        if found.launches or found.failed_launches or found.preemptions or found.crashes or found.hours:
            yield found


def _zone(replica: Json) -> tuple[str, str, str]:
    return replica["cloud"], replica["region"], replica["zone"]


def _zone_names(replicas: Sequence[Json]) -> dict[tuple[str, str, str], str]:
    """Zones by their own name; with all of it where two have the same."""
    zones = sorted({_zone(replica) for replica in replicas})
    count = Counter(name for _, _, name in zones)
    return {zone: zone[2] if count[zone[2]] == 1 else "/".join(zone) for zone in zones}


# --- what was, and when -------------------------------------------------------------------------------------


class _Moment(NamedTuple):
    """From `at` on, until the next one. `counts` as in `FleetSample`."""

    at: float
    counts: tuple[tuple[str, str, int, int], ...]
    ready: int
    wanted: int


def _moments(history: Json, end: float) -> list[_Moment]:
    """Return everything that changed, in order."""
    replicas: Sequence[Json] = history["replicas"]
    names = _zone_names(replicas)
    states: dict[int, list[Json]] = {}
    for change in history["changes"]:
        if change["replica_id"] is not None:
            states.setdefault(change["replica_id"], []).append(change)
    # at -> what begins or ends there: (zone, market), alive, ready
    turns: dict[float, list[tuple[tuple[str, str], int, int]]] = {history["complete_from"]: []}
    for replica in replicas:
        if replica["launched_at"] is None:
            continue
        group = names[_zone(replica)], replica["capacity_type"]
        until = replica["ended_at"] or end
        turns.setdefault(replica["launched_at"], []).append((group, 1, 0))
        turns.setdefault(until, []).append((group, -1, 0))
        for since, to in _ready_spans(replica, states.get(replica["id"], ()), until):
            turns.setdefault(since, []).append((group, 0, 1))
            turns.setdefault(to, []).append((group, 0, -1))
    sizes = {c["at"]: int(c["state"]) for c in history["changes"] if c["replica_id"] is None}
    moments = []
    alive: Counter[tuple[str, str]] = Counter()
    ready: Counter[tuple[str, str]] = Counter()
    wanted = 0
    for at in sorted({*turns, *sizes}):
        wanted = sizes.get(at, wanted)
        for group, alive_count, ready_count in turns.get(at, ()):
            alive[group] += alive_count
            ready[group] += ready_count
        counts = tuple(sorted((*group, count, ready[group]) for group, count in alive.items() if count > 0))
        moments.append(_Moment(at, counts, ready.total(), wanted))
    return [moment for moment in moments if moment.at < end]


def _ready_spans(replica: Json, changes: Sequence[Json], until: float) -> Iterator[tuple[float, float]]:
    """Yield when it was ready. Where its first changes have been folded away, the row says when that started."""
    first = replica["ready_at"]
    known_from = changes[0]["at"] if changes else until
    since: float | None = first if first is not None and first < known_from else None
    for change in changes:
        if change["state"] == ReplicaState.READY.value:
            since = change["at"] if since is None else since
        elif since is not None:
            yield since, change["at"]
            since = None
    if since is not None:
        yield since, until


def _end(history: Json) -> float:
    """Now; or, where the service is down and nothing of it is left, when the last replica terminated."""
    ends = [replica["ended_at"] for replica in history["replicas"]]
    over = history["down"] and bool(ends) and None not in ends
    end: float = max(ends) if over else history["now"]
    return end


def _begin(history: Json, moments: Sequence[_Moment]) -> float:
    complete_from: float = history["complete_from"]
    if complete_from > history["created_at"]:
        return complete_from
    return next((m.at for m in moments if 0 < m.wanted <= m.ready), complete_from)


def _within(moments: Sequence[_Moment], begin: float, end: float) -> Iterator[tuple[_Moment, float]]:
    """Yield the moments that count, cut to the time that counts, and how long each lasted."""
    for moment, after in pairwise((*moments, _Moment(end, (), 0, 0))):
        if after.at > begin:
            since = max(moment.at, begin)
            yield moment._replace(at=since), after.at - since


# --- what it comes to ---------------------------------------------------------------------------------------


def _simulation(history: Json, begin: float, end: float) -> Simulation:
    replicas: Sequence[Json] = history["replicas"]
    cold_starts = [r["ready_at"] - r["launched_at"] for r in replicas if r["ready_at"] and r["launched_at"]]
    spot = [r["price_usd_hour"] for r in replicas if r["capacity_type"] == SPOT]
    names = _zone_names(replicas)
    return Simulation(
        trace=history["name"],
        n_target=0,
        cold_start_s=median(cold_starts) if cold_starts else 0.0,
        price_ratio=fmean(r["on_demand_usd_hour"] for r in replicas) / fmean(spot) if spot else 1.0,
        tick_s=TICK_S,
        days=(end - begin) / _DAY_S,
        zones=tuple((name, f"{cloud}/{region}") for (cloud, region, _), name in names.items()),
        priced=True,
        runs=(),
    )


def _run(
    history: Json, counted: Sequence[tuple[_Moment, float]], bought: Sequence[Bought], offset: float
) -> Run:
    """`offset` is the instant that the run calls 0."""
    length_s = sum(span_s for _, span_s in counted)
    met_s = sum(span_s for moment, span_s in counted if moment.ready >= moment.wanted)
    served_s = sum(
        span_s * (min(1.0, moment.ready / moment.wanted) if moment.wanted else 1.0)
        for moment, span_s in counted
    )
    on_demand_usd_hour = min((r["on_demand_usd_hour"] for r in history["replicas"]), default=0.0)
    usd_on_demand = on_demand_usd_hour * sum(moment.wanted * span_s for moment, span_s in counted) / _HOUR_S
    usd = sum(each.usd for each in bought)
    usd_there = sum(each.usd for each in bought if each.capacity_type == ON_DEMAND)
    days = length_s / _DAY_S
    policy: str = history["policy"]
    return Run(
        policy=policy,
        overprovision=None if policy in _WITHOUT_EXTRA else history["overprovision"],
        seed=0,
        availability=met_s / length_s,
        capacity_fraction=served_s / length_s,
        cost_relative=usd / usd_on_demand if usd_on_demand else 0.0,
        preemptions_per_day=sum(each.preemptions for each in bought) / days,
        failed_launches_per_day=sum(each.failed_launches for each in bought) / days,
        on_demand_cost_share=usd_there / usd if usd else 0.0,
        days=days,
        usd=usd,
        usd_on_demand=usd_on_demand,
        launches=sum(each.launches for each in bought),
        cpu_s=0.0,
        ticks=len(counted),
        digest="",
        zones="",
        steps=tuple(FleetSample(moment.at - offset, moment.counts) for moment, _ in counted),
        n_target=next((moment.wanted for moment, _ in reversed(counted) if moment.wanted), 0),
        wanted=tuple((moment.at - offset, moment.wanted) for moment, _ in counted),
        availability_target=history["availability_target"] if policy == "risk_hedge" else None,
    )
