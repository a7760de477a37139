"""The exposition: from the API's JSON views to Prometheus' text format. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skyserve_cli.controller.metrics.families import OF_CONTROLLER, OF_SERVICE, OF_TEAM, Family, View

_KINDS: Mapping[str, type[GaugeMetricFamily] | type[CounterMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


class _Once(Collector):
    """A collector of families that are there already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(health: View, services: Sequence[View] | None, teams: Sequence[View] | None = None) -> bytes:
    """Return the text. `services` and `teams` None: they cannot be read, so their families are not exposed.

    Absent series are better than old ones: Prometheus marks them stale, and `absent()` and
    `skyserve_controller_store_ok == 0` raise an alert.
    """
    families = [_family(each, [((), health)]) for each in OF_CONTROLLER]
    if services is not None:
        views = [((view["name"],), view) for view in services]
        families += [_family(each, views) for each in OF_SERVICE]
    if teams is not None:
        views = [((view["name"],), view) for view in teams]
        families += [_family(each, views) for each in OF_TEAM]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(families))
    return generate_latest(registry)


def _family(family: Family, views: Iterable[tuple[tuple[str, ...], View]]) -> Metric:
    found = _KINDS[family.type](family.name, family.help, labels=family.labels)
    for labels, value in _samples(family, views):
        found.add_metric(labels, value)
    return found


def _samples(
    family: Family, views: Iterable[tuple[tuple[str, ...], View]]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for first, view in views:
        for rest, value in family.read(view):
            yield (*first, *rest), value
