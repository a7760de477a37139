"""Prometheus metrics of one agent.

Names are `skyserve_lb_<noun>_<unit>[_total]`. Labels are bounded by construction: service, region, zone,
capacity_type, policy, and on a few families one more with a closed set of values (`kind` of a failure, `reason`
of a refused continuation, `health` of a target). None grows with traffic. Of request metrics `region` is the
agent's own, of target metrics the target's. Targets (`lb.config.options.MetricsOptions.target_label`) and owners of API
keys have series of their own up to a bound (`lb.observe.label_slots`).

Counting is `lb.observe.counters`; here the numbers get their names at a scrape. Gauges are read off the table then.
The process' CPU time, memory, start time and open files come as `process_*`, as Prometheus' clients name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lb.config.schema import Build, Table
from lb.config.totals import Tally, Totals
from lb.core.targets import Health, TargetTable
from lb.observe.counters import (
    LOOP_LAG_S,
    TIME_TO_FIRST_BYTE_S,
    Counts,
    Histogram,
    KeyCounts,
    KeyModelCounts,
    TargetCounts,
)
from lb.observe.families import (
    AGENT_COUNTERS,
    AGENT_HELP,
    OF_AGENT,
    OF_KEY,
    OF_KEY_AND_MODEL,
    OF_TARGET,
    Family,
)
from lb.observe.key_usage import UsageSum
from lb.observe.label_slots import OTHER, LabelSlots
from lb.observe.peer_metrics import PeerMetrics

__all__ = ["CONTENT_TYPE", "Counts", "Histogram", "Metrics", "TargetCounts"]

#: The label of what targets without a place counted; in no series of its own.
GONE = "(gone)"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOTHING: Mapping[str, float] = MappingProxyType({})

_PREFIX = "skyserve_lb_"
_AGENT = ("service", "region", "policy")
_TARGET = ("service", "region", "zone", "capacity_type", "policy")


_KEY = ("service", "region", "key")
_BUILD_HELP = (
    "1. `kind` is native or interpreted; `fast_path` is true with the helper in C, plain if it cannot do TLS."
)
_MOST_MODELS = 20  # that have series of their own, of each key


class Labelled(Protocol):
    """A `lb.config.schema.Target`, or a policy's view of one."""

    @property
    def id(self) -> str: ...
    @property
    def region(self) -> str: ...
    @property
    def zone(self) -> str: ...
    @property
    def capacity_type(self) -> str: ...


class Metrics:
    """Owns the counts.

    `counts` is replaced when the policy changes, and so is what `of` returns: a caller that keeps them reads them again
    after each change of the table. Needs `use_policy` before anything is counted.
    """

    def __init__(self, service: str, region: str) -> None:
        self._service = service
        self._region = region
        self._policy = ""
        self._agents: dict[str, Counts] = {}
        # By labels, those without a series of their own among them: the last label is the target.
        self._targets: dict[tuple[str, ...], TargetCounts] = {}
        self._keys: dict[str, KeyCounts] = {}
        self._used: dict[tuple[str, str], KeyModelCounts] = {}  # by the labels of key and model
        self._models: set[str] = set()
        self._target_slots = LabelSlots(self._drop_target)
        self._key_slots = LabelSlots(self._drop_key)
        self._by_target = False
        self._process = ProcessCollector(registry=None)
        self.counts = Counts()
        self.peers = PeerMetrics()
        self.loop_lag = Histogram(LOOP_LAG_S)
        self.build: Build | None = None

    def use_policy(self, name: str) -> None:
        """Label what follows with this policy. Its families appear at once, with zeros."""
        self._policy = name
        self.counts = self._agents.setdefault(name, Counts())

    def use_table(self, table: Table) -> None:
        """Another table is in force."""
        self.use_policy(table.policy)
        self._by_target = table.metrics.target_label
        self._target_slots.retain({target.id for target in table.targets})
        self._key_slots.retain({key.name for key in table.access.keys})
        peers = () if table.regions is None else table.regions.peers
        self.peers.retain([peer.id for peer in peers])

    def of_key(self, name: str) -> KeyCounts:
        """Return the counts of the owner of an API key."""
        counts = self._keys.get(name)
        if counts is None:
            counts = self._keys.setdefault(self._key_slots[name], KeyCounts())
        return counts

    def used(self, more: UsageSum) -> None:
        """Add what requests of a key and model have used. Without a key the label is empty."""
        key, model = more.key, more.model
        if model not in self._models and len(self._models) < _MOST_MODELS:
            self._models.add(model)
        labels = self._key_slots[key] if key else key, model if model in self._models else OTHER
        counts = self._used.get(labels)
        if counts is None:
            counts = self._used[labels] = KeyModelCounts()
        counts.requests += more.requests
        counts.tokens_in += more.tokens_in
        counts.tokens_out += more.tokens_out

    def served(self) -> int:
        """Responses to clients of 2xx and 3xx."""
        return sum(counts.responses[2] + counts.responses[3] for counts in self._agents.values())

    def of(self, target: Labelled) -> TargetCounts:
        """Return the counts of the target, under the policy in force.

        Not for every request: keep it with the target until the table changes.
        """
        key = (*self._labels(target), self._target_slots[target.id])
        counts = self._targets.get(key)
        if counts is None:
            counts = self._targets[key] = TargetCounts()
        return counts

    def expose(
        self,
        table: TargetTable,
        queued: int,
        now: float,
        policy_gauges: Mapping[str, float] = _NOTHING,
        agent_gauges: Mapping[str, float] = _NOTHING,
        regions: Mapping[str, Any] = _NOTHING,
    ) -> bytes:
        """Return the text exposition format.

        `policy_gauges` are the routing policy's own (the size of its tree ...), `agent_gauges` the agent's, by name as in
        `AGENT_HELP`. `regions` is what is known of peers, as `/-/regions` shows it.
        """
        agents = [((self._service, self._region, policy), one) for policy, one in self._agents.items()]
        keys = [((self._service, self._region, name), one) for name, one in self._keys.items()]
        used = [((self._service, self._region, *labels), one) for labels, one in self._used.items()]
        families = [
            *_responses(agents),
            *_counted(OF_AGENT, _AGENT, agents),
            *_counted(OF_TARGET, self._target_names, self._exposed_targets()),
            *_counted(OF_KEY, _KEY, keys),
            *_counted(OF_KEY_AND_MODEL, (*_KEY, "model"), used),
            *self._agent_gauges(table, queued, policy_gauges),
            *self._process_wide(agent_gauges),
            *self._target_gauges(table, now),
            *self.peers.families((self._service, self._region), regions),
            *self._process.collect(),
        ]
        return generate_latest(_MetricSnapshot(families))

    def totals(self, uptime_s: float, in_flight: int, queued: int, busy: Mapping[str, int]) -> Totals:
        """Return what was counted, of the agent and of each target; `busy` are the requests in flight by target."""
        targets: dict[str, list[TargetCounts]] = {}
        for labels, counts in self._targets.items():
            if labels[-1] not in (OTHER, GONE):
                targets.setdefault(labels[-1], []).append(counts)
        return totals(uptime_s, in_flight, queued, self._agents.values(), targets, busy)

    def _exposed_targets(self) -> Iterable[tuple[tuple[str, ...], TargetCounts]]:
        """Return the counts by the labels of their series."""
        if self._by_target:
            return [(labels, counts) for labels, counts in self._targets.items() if labels[-1] != GONE]
        sums: dict[tuple[str, ...], TargetCounts] = {}
        for labels, counts in self._targets.items():
            sums.setdefault(labels[:-1], TargetCounts()).add(counts)
        return sums.items()

    @property
    def _target_names(self) -> tuple[str, ...]:
        return (*_TARGET, "target") if self._by_target else _TARGET

    def _labels(self, target: Labelled) -> tuple[str, ...]:
        return self._service, target.region, target.zone, target.capacity_type, self._policy

    def _series_of(self, target: Labelled) -> tuple[str, ...]:
        labels = self._labels(target)
        return (*labels, self._target_slots[target.id]) if self._by_target else labels

    def _drop_target(self, target_id: str) -> None:
        """Its series go; the sums over all targets of the same labels keep what it counted."""
        for labels in [labels for labels in self._targets if labels[-1] == target_id]:
            kept = self._targets.setdefault((*labels[:-1], GONE), TargetCounts())
            kept.add(self._targets.pop(labels))

    def _drop_key(self, key: str) -> None:
        self._keys.pop(key, None)
        self._used = {labels: used for labels, used in self._used.items() if labels[0] != key}

    def _agent_gauges(
        self, table: TargetTable, queued: int, of_policy: Mapping[str, float]
    ) -> Iterator[Metric]:
        agent = (self._service, self._region, self._policy)
        yield _gauge("held_requests", "Requests waiting for a target now.", _AGENT, {agent: queued})
        yield _gauge("bookings", "Attempts on targets that have not ended.", _AGENT, {agent: table.in_flight})
        for name, value in of_policy.items():
            yield _gauge(f"policy_{name}", "Of the routing policy.", _AGENT, {agent: value})

    def _process_wide(self, gauges: Mapping[str, float]) -> Iterator[Metric]:
        agent = (self._service, self._region)
        for name, value in gauges.items():
            family = CounterMetricFamily if name in AGENT_COUNTERS else GaugeMetricFamily
            metric = family(_PREFIX + name, AGENT_HELP[name], labels=_AGENT[:2])
            metric.add_metric(agent, value)
            yield metric
        lag = HistogramMetricFamily(
            _PREFIX + "loop_lag_seconds", "How late the event loop ran its timers.", labels=_AGENT[:2]
        )
        lag.add_metric(agent, self.loop_lag.cumulative(), self.loop_lag.sum)
        yield lag
        if self.build is not None:
            fast_path = "plain" if self.build.slow_tls else str(self.build.fast_path).lower()
            labels = (*agent, self.build.kind.value, fast_path)
            yield _gauge("build_info", _BUILD_HELP, (*_AGENT[:2], "kind", "fast_path"), {labels: 1})

    def _target_gauges(self, table: TargetTable, now: float) -> Iterator[Metric]:
        """Targets with the same labels are one row: their counts are added up, their cache usage is averaged."""
        sums = _Sums()
        for (target, health, _), view in zip(table.rows(now), table.views(now), strict=True):
            labels = self._series_of(target)
            sums.add("in_flight", labels, view.in_flight)
            sums.add("waiting", labels, view.waiting)
            sums.add("targets", labels, 1)
            sums.add("good", labels, 1 if health.is_good else 0)
            for one in Health:
                sums.add("standing", (*labels, one.value), 1 if one is health else 0)
            if view.running is not None or view.pending is not None:
                sums.add("telling", labels, 1)
            sums.add("running", labels, view.running)
            sums.add("pending", labels, view.pending)
            sums.add("kv_usage", labels, view.kv_usage)
            sums.add("kv_telling", labels, None if view.kv_usage is None else 1)
        usage, telling = sums["kv_usage"], sums["kv_telling"]
        kv_usage = {labels: total / telling[labels] for labels, total in usage.items()}
        for name, help_text, rows in (
            ("in_flight_requests", "Requests on targets now.", sums["in_flight"]),
            ("waiting_requests", "Those among them without a first byte.", sums["waiting"]),
            ("targets", "Targets in the table.", sums["targets"]),
            ("good_targets", "Targets in good standing: ready and not ejected.", sums["good"]),
            ("telling_targets", "Targets whose engine reports its load.", sums["telling"]),
            ("engine_running_requests", "As the engines report.", sums["running"]),
            ("engine_pending_requests", "As the engines report, with what was sent since.", sums["pending"]),
            ("engine_kv_usage_ratio", "Mean share of the KV cache in use, as the engines report.", kv_usage),
        ):
            yield _gauge(name, help_text, self._target_names, rows)
        yield _gauge(
            "targets_by_standing",
            "Targets by their health, from the breaker and the controller.",
            (*self._target_names, "standing"),
            sums["standing"],
        )


class _Sums:
    """Sums by name and labels; None is unknown and adds nothing, not even a row."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[tuple[str, ...], float]] = {}

    def __getitem__(self, name: str) -> Mapping[tuple[str, ...], float]:
        return self._sums.get(name, {})

    def add(self, name: str, labels: tuple[str, ...], value: float | None) -> None:
        if value is not None:
            rows = self._sums.setdefault(name, {})
            rows[labels] = rows.get(labels, 0.0) + value


class _MetricSnapshot(Collector):
    """Families that have been read already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(
    name: str, help_text: str, labels: tuple[str, ...], rows: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_PREFIX + name, help_text, labels=labels)
    for values, number in rows.items():
        family.add_metric(values, number)
    return family


def _responses(agents: Iterable[tuple[tuple[str, ...], Counts]]) -> Iterator[Metric]:
    for hundred in range(1, 6):
        family = CounterMetricFamily(
            f"{_PREFIX}responses_{hundred}xx",
            f"Answers to clients with a status of {hundred}xx.",
            labels=_AGENT,
        )
        for values, counts in agents:
            family.add_metric(values, counts.responses[hundred])
        yield family


def _counted(
    families: Iterable[Family],
    labels: tuple[str, ...],
    rows: Iterable[tuple[tuple[str, ...], Counts | TargetCounts | KeyCounts | KeyModelCounts]],
) -> Iterator[Metric]:
    rows = list(rows)
    for of in families:
        read = [(values, getattr(counts, of.attribute)) for values, counts in rows]
        if not read:
            continue
        if isinstance(read[0][1], Histogram):
            histogram = HistogramMetricFamily(_PREFIX + of.name, of.help, labels=labels)
            for values, observed in read:
                histogram.add_metric(values, observed.cumulative(), observed.sum)
            yield histogram
            continue
        counter = CounterMetricFamily(
            _PREFIX + of.name, of.help, labels=(*labels, of.kind) if of.kind else labels
        )
        for values, counted in read:
            if of.kind:
                for kind, number in counted.items():
                    counter.add_metric((*values, _text(kind)), number)
            else:
                counter.add_metric(values, counted)
        yield counter


def _text(kind: str | int) -> str:
    return str(kind.value) if isinstance(kind, Enum) else str(kind)


def totals(
    uptime_s: float,
    in_flight: int,
    queued: int,
    agents: Iterable[Counts],
    targets: Mapping[str, Iterable[TargetCounts]],
    busy: Mapping[str, int],
) -> Totals:
    """Return the sums over policies of the agent's counts and of those of each target by its id.

    `busy` are the requests in flight by target.
    """
    return Totals(
        uptime_s,
        TIME_TO_FIRST_BYTE_S,
        _of_agent(in_flight, queued, list(agents)),
        {name: _of_target(busy.get(name, 0), list(counts)) for name, counts in targets.items()},
    )


def _of_agent(in_flight: int, queued: int, counts: list[Counts]) -> Tally:
    return Tally(
        in_flight,
        queued,
        sum(one.requests for one in counts),
        sum(one.responses[5] + one.cut for one in counts),
        sum(one.tokens_in for one in counts),
        sum(one.tokens_out for one in counts),
        sum(one.prompt_bytes for one in counts),
        sum(one.matched_bytes for one in counts),
        _added(one.ttft.counts for one in counts),
    )


def _of_target(in_flight: int, counts: list[TargetCounts]) -> Tally:
    return Tally(
        in_flight,
        0,
        sum(one.attempts for one in counts),
        sum(sum(one.failures.values()) for one in counts),
        sum(one.tokens_in for one in counts),
        sum(one.tokens_out for one in counts),
        0,
        0,
        _added(one.ttfb.counts for one in counts),
    )


def _added(buckets: Iterable[list[int]]) -> tuple[int, ...]:
    found = list(buckets)
    return tuple(map(sum, zip(*found, strict=True))) if found else (0,) * (len(TIME_TO_FIRST_BYTE_S) + 1)
