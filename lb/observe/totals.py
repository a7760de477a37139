"""From counters to what a controller reads of them (`lb.config.totals`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lb.config.totals import Tally, Totals
from lb.observe.counters import TIME_TO_FIRST_BYTE_S, Counts, TargetCounts


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
