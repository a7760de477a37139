"""What load balancer agents report of the work of replicas, and which probes that spares the controller.

A replica that has just given a client a response of 2xx is alive, on the path that matters. An agent reports how long ago that
was, so the controller does not have to find it out a second time: the response counts as a probe that passed then. The
next probe of the controller is due one interval after the later of the two, and `WITNESSED_INTERVALS` intervals (or `LONGEST_S`)
after its own last probe at the latest, because only its own probes are the test that the user described.

A replica that fails is found as soon as without this. It serves nothing after its death, so the next probe starts at most one
interval after its death, as it does where every probe is the controller's. The same holds where agents die with it, are frozen
or cannot be reached: what they reported last only gets older. A replica that goes on serving its clients while its probe
fails is found at most that many intervals later.

Responses count for nothing where they say less than the probe:
 * before a replica is READY, and after a probe that failed;
 * while replicas of another version live: an update compares versions by their probes;
 * for a probe with a body or headers: clients send others, and the health checks of agents send neither;
 * while any agent has ejected the replica, or has seen an attempt on it fail in its window;
 * the health checks of agents themselves: an agent takes any response as a sign of life, a probe only 200.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lb.config.schema import Stats, TargetHealth, TargetStats
from policies.health import Work
from policies.model import Replica, ReplicaState
from skyserve_cli.spec.model import Probe
from skyserve_cli.state.values import ServiceRow

WITNESSED_INTERVALS = 4
WORK_KEPT_S = 600.0  # of an agent that does not respond
LONGEST_S = 60.0
NEVER = -math.inf


def next_probe_at(probed_at: float, served_at: float, interval_s: float) -> float:
    """Return when a replica whose last probe passed at `probed_at` is to be probed again.

    It last served a client at `served_at`.
    """
    longest_s = max(interval_s, min(WITNESSED_INTERVALS * interval_s, LONGEST_S))
    return min(max(probed_at, served_at) + interval_s, probed_at + longest_s)


def counts_served(replica: Replica, probe: Probe) -> bool:
    """Return whether responses to clients count as probes of the replica, in a service that `has_one_version`."""
    return replica.state is ReplicaState.READY and probe.method == "GET" and not probe.headers


def has_one_version(row: ServiceRow, replicas: Iterable[Replica]) -> bool:
    """Return whether all replicas are of the newest version, or are kept by it."""
    return {one.version for one in replicas} <= {row.version, *row.same_replicas}


class ServedReport(NamedTuple):
    """Of one agent. The replicas in `served` served a client at that instant or later; those in `troubled` failed one.

    `work` has those that had anything to do, as it was at the instant `at`.
    """

    served: Mapping[int, float]
    troubled: frozenset[int]
    work: Mapping[int, Work] = {}
    at: float = NEVER


def served_report(stats: Stats, asked_at: float) -> ServedReport:
    """`asked_at` is when the request for the stats was sent: a report that comes late makes no replica look livelier."""
    served, troubled, work = {}, [], {}
    for one in stats.targets:
        if one.health is not None:
            work[int(one.id)] = _work(one, one.health, asked_at)
        if one.ejected or one.errors:
            troubled.append(int(one.id))
        elif one.served_s is not None and one.served_s < LONGEST_S:
            served[int(one.id)] = asked_at - one.served_s
    return ServedReport(served, frozenset(troubled), work, asked_at)


def _work(one: TargetStats, health: TargetHealth, asked_at: float) -> Work:
    return Work(
        at=NEVER if health.worked_s is None else asked_at - health.worked_s,
        errors=health.errors,
        first_error_at=asked_at - health.first_error_s if health.errors else math.inf,
        last_error_at=asked_at - health.last_error_s if health.errors else NEVER,
        waiting=max(one.in_flight, health.running or 0),
        queued=health.queued,
        kv_usage=health.kv_usage,
    )


def _past(work: Mapping[int, Work]) -> Mapping[int, Work]:
    """Return what stays true of work once it is not reported any more."""
    return {number: Work(one.at) for number, one in work.items()}


def merged_report(reports: Sequence[ServedReport]) -> ServedReport:
    """Return one report of the processes of one agent."""
    served: dict[int, float] = {}
    for report in reports:
        for number, at in report.served.items():
            served[number] = max(at, served.get(number, at))
    troubled = frozenset[int]().union(*(report.troubled for report in reports))
    return ServedReport(
        served, troubled, together([report.work for report in reports]), max(report.at for report in reports)
    )


def together(works: Sequence[Mapping[int, Work]]) -> Mapping[int, Work]:
    """Return the work that several agents know of. Errors count as far as no agent has seen a response since."""
    if len(works) == 1:
        return works[0]
    sums: dict[int, Work] = {}
    for number in {number for work in works for number in work}:
        known = [work[number] for work in works if number in work]
        at = max(one.at for one in known)
        rows = [one for one in known if one.first_error_at > at and one.errors]
        sums[number] = Work(
            at,
            sum(one.errors for one in rows),
            min((one.first_error_at for one in rows), default=math.inf),
            max((one.last_error_at for one in rows), default=NEVER),
            sum(one.waiting for one in known),
            max((one.queued for one in known if one.queued is not None), default=None),
            max((one.kv_usage for one in known if one.kv_usage is not None), default=None),
        )
    return sums


class ServedReplicas:
    """The last report of each agent that responds, in instants of the event loop. Used on that loop only, but for `work`.

    When an agent does not respond, what it knew of past responses is kept for a while: that it restarts says nothing of the replicas.
    """

    def __init__(self) -> None:
        self._reports: dict[str, dict[int, ServedReport]] = {}
        self._work: dict[tuple[str, int], ServedReport] = {}

    def reported(self, service: str, agent: int, report: ServedReport) -> None:
        """`agent` is its number within the service."""
        self._reports.setdefault(service, {})[agent] = report
        for key in [key for key, old in self._work.items() if report.at - old.at > WORK_KEPT_S]:
            del self._work[key]
        self._work[service, agent] = report

    def work(self, service: str) -> Mapping[int, Work]:
        """Return what agents know of the replicas' work. Safe from any thread."""
        present = self._reports.get(service, {})
        known = [(agent, report) for (name, agent), report in list(self._work.items()) if name == service]
        works = [report.work if agent in present else _past(report.work) for agent, report in known]
        return together(works or [{}])

    def silent(self, service: str, agent: int) -> None:
        """The agent does not respond, or is gone."""
        reports = self._reports.get(service, {})
        reports.pop(agent, None)
        if not reports:
            self._reports.pop(service, None)

    def last(self, service: str, replica_id: int) -> float:
        """Return when the replica last served a client, as far as no agent has had trouble with it; else NEVER."""
        latest = NEVER
        for report in self._reports.get(service, {}).values():
            if replica_id in report.troubled:
                return NEVER
            latest = max(latest, report.served.get(replica_id, NEVER))
        return latest
