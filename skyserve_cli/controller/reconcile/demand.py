"""One load of the loads that several agents of a service have seen. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lb.config.schema import Readiness, Stats, Table
from policies.history import Load

SHORTEST_WINDOW_S = 10.0
MANY_TARGETS = 500
RESPONSIVE_S = 30.0  # an agent probes a target that is not ready every few seconds


def slowdown(targets: int) -> float:
    """Return how much rarer an agent of many targets is polled: what it says of a thousand takes 10 ms to read."""
    return max(1.0, targets / MANY_TARGETS)


def load_of(stats: Stats, table: Table | None, elsewhere: frozenset[int] = frozenset()) -> Load:
    """Return what one agent reports, of the `table` that it has. `elsewhere` are draining replicas that are not in it."""
    draining = {t.id for t in table.targets if t.state is Readiness.DRAINING} if table else set()
    draining |= {str(one) for one in elsewhere} if table else set()
    busy = {target.id for target in stats.targets if target.in_flight > 0}
    return Load(
        # An agent that has just been started cannot report more than it has seen.
        window_s=min(stats.window_s, max(SHORTEST_WINDOW_S, stats.uptime_s)),
        requests=stats.requests,
        in_flight=stats.in_flight,
        queued=stats.queued,
        ongoing=stats.ongoing,
        empty=frozenset(int(name) for name in draining - busy),
        responsive=frozenset(
            int(one.id) for one in stats.targets if one.heard_s is not None and one.heard_s <= RESPONSIVE_S
        ),
        warming=frozenset(int(name) for name in stats.warming),
        known=True,
    )


def merged(loads: Sequence[Load]) -> Load:
    """Return the sum. A replica is empty when every agent says so; one that has not said anything has not."""
    if len(loads) == 1:
        return loads[0]
    known = [load for load in loads if load.known]
    if not known:
        return Load()
    window_s = max(load.window_s for load in known)
    return Load(
        window_s=window_s,
        requests=round(sum(load.requests * window_s / load.window_s for load in known)),
        in_flight=sum(load.in_flight for load in known),
        queued=sum(load.queued for load in known),
        ongoing=sum(load.ongoing for load in known),
        empty=frozenset.intersection(*(load.empty for load in loads)),
        responsive=frozenset().union(*(load.responsive for load in known)),
        warming=frozenset().union(*(load.warming for load in known)),
        known=True,
    )
