"""The Omniscient policy: what the trace would have cost with knowledge of the future.

Equations 1-5 of SkyServe (Mao et al., EuroSys '25), solved exactly as a linear or mixed integer program by
HiGHS. Per zone z and time t, S(z, t) spot replicas are alive and S_r(z, t) of them ready; O and O_r likewise
for on-demand:

    minimise  sum over t of  sum over z of S(z, t)  +  k O(t)                                   (1)
    M(t) in {0, 1},  sum over t of M(t) >= availability * T                                     (2)
    S(z, t) <= C(z, t)                                                                          (3)
    S_r(z, t) <= S(z, t'),  O_r(t) <= O(t')   for every t' from t - D to t                      (4)
    sum over z of S_r(z, t) + O_r(t) >= N M(t)                                                  (5)

At an availability of 1 every M is 1 and nothing is left that must be whole: the optimum of the linear program
is integral on every trace we have met. It is checked, and where it is not, the program is solved again in
whole replicas.

Where we deviate. Equation 4 is per zone, so that a replica which moves starts cold; and it is not written out.
Who is alive and serves no purpose costs money, so S(z, t) is S_r(z, t) plus those that become ready within D,
and the unknowns are S_r and its rises: a program a third as large, with the same optimum. Of (5) only the half
that binds is kept. The time axis is compressed to segments between capacity changes, shifted by up to
two cold starts either way. A replica has a reason to start or to end at such a point only: it starts with
capacity, or a cold start before it is needed, and ends with capacity, or when the one that relieves it is
ready. At an availability of 1 the compressed optimum equals that of the full grid (the tests compare them);
below 1 an outage may want to end between two points, and the result is an upper bound, off by about as much
as the solver's own tolerance where we compared the two.

The books are the simulator's: a replica is ready once it has been alive for D = round(cold start / tick)
whole ticks; costs and availability count from tick D on, before which nothing can be ready. Long traces are
solved in chunks, which follow each other without gaps. Each chunk starts with D ticks without cost, as the
trace itself does, and keeps the availability by itself, which costs more than a whole trace's promise would:
0.35 points for a week in chunks of 2 days.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import process_time

import numpy as np

from skyserve_cli.controller.reconcile.clock import steady_source
from skyserve_cli.sim.omniscient_program import WHOLE, ChunkSolution, Ints, Task, solve_chunk
from skyserve_cli.sim.trace import Steps, Trace

CHUNK_S = 10 * 86400.0
_seconds = steady_source().read
TIME_LIMIT_S = 50.0  # of all chunks together, by the wall clock: the solver looks at it now and then


@dataclass(frozen=True, slots=True)
class OmniscientResult:
    """The cheapest plan. `cost_relative` is to `n_target` on-demand replicas all the time.

    The step functions are in ticks of the trace, for pictures; they count replicas that are alive, in `ready` those
    that serve. `status` is "optimal", or what stopped the solver in some chunk; the optimum, over plans on these
    segments, lies between `cost_bound` and `cost_relative`. `seconds` is CPU time.
    """

    cost_relative: float
    cost_bound: float
    availability: float
    on_demand_cost_share: float
    spot: Mapping[str, Steps[int]]  # by zone
    on_demand: Steps[int]
    ready: Steps[int]
    status: str
    chunks: int
    segments: int
    seconds: float


def solve(
    trace: Trace,
    *,
    n_target: int,
    cold_start_s: float,
    price_ratio: float,
    availability: float = 1.0,
    spot_prices: Mapping[str, float] | None = None,
    full_grid: bool = False,
    chunk_s: float = CHUNK_S,
    time_limit_s: float = TIME_LIMIT_S,
    stopwatch: Callable[[], float] = _seconds,
    progress: Callable[[int, int], None] = lambda done, chunks: None,
) -> OmniscientResult:
    """The cheapest way to have `n_target` replicas ready for the given share of time.

    `price_ratio` is the price of an on-demand replica, `spot_prices` are those of spot replicas by zone, all in units
    of a spot replica's usual price, which is what a zone that is not named costs. `full_grid` gives every tick a
    segment of its own: exact below an availability of 1, too, and slow. `progress` is called after each chunk with how many of
    how many are done. After `time_limit_s` the best plan found so far counts: at worst on-demand replicas alone. Raises
    ValueError for arguments that make no sense.
    """
    cold_ticks = max(1, round(cold_start_s / trace.tick_s))
    if n_target < 1 or price_ratio <= 0 or not 0 < availability <= 1:
        raise ValueError("n_target is at least 1, price_ratio above 0, availability above 0 and at most 1")
    if trace.n_ticks <= cold_ticks:
        raise ValueError(f"{trace.name} is over before a cold start of {cold_start_s:g} s is")
    prices = [(spot_prices or {}).get(zone.name, 1.0) for zone in trace.zones]
    task = Task(n_target, cold_ticks, (*prices, price_ratio), availability)
    edges = _chunk_edges(cold_ticks, trace.n_ticks, chunk_s / trace.tick_s)
    started, ends_at = process_time(), stopwatch() + time_limit_s
    plans = []
    for number, (start, end) in enumerate(pairwise(edges), 1):
        chunk = trace.cut(start - cold_ticks, end - start + cold_ticks, trace.name)
        until = stopwatch() + (ends_at - stopwatch()) / (len(edges) - number)
        plans.append(solve_chunk(chunk, task, full_grid, partial(_left_s, until, stopwatch)))
        progress(number, len(edges) - 1)
    return _joined(trace, plans, task, process_time() - started)


def _left_s(until: float, stopwatch: Callable[[], float]) -> float:
    return until - stopwatch()


def _chunk_edges(first: int, last: int, chunk_ticks: float) -> list[int]:
    """Cuts [first, last) into equal parts of about `chunk_ticks`."""
    chunks = max(1, round((last - first) / chunk_ticks))
    return [first + (last - first) * number // chunks for number in range(chunks + 1)]


# --- the books ----------------------------------------------------------------------------------------------


def _joined(trace: Trace, plans: Sequence[ChunkSolution], task: Task, seconds: float) -> OmniscientResult:
    """Return the chunks' books added up, and their plans put one behind the other."""
    ticks = sum(int(plan.grid.billed.sum()) for plan in plans)
    in_full = task.prices[-1] * task.n_target * ticks
    alive_ticks = sum(
        (plan.alive @ plan.grid.billed for plan in plans), np.zeros(len(task.prices), dtype=np.int64)
    )
    by_zone = alive_ticks * np.array(task.prices)
    served = sum(int(plan.grid.billed[plan.ready.sum(axis=0) >= task.n_target].sum()) for plan in plans)
    statuses = {plan.status for plan in plans} - {"optimal"}
    return OmniscientResult(
        cost_relative=float(by_zone.sum()) / in_full,
        cost_bound=sum(plan.bound for plan in plans) / in_full,
        availability=served / ticks,
        on_demand_cost_share=float(by_zone[-1]) / max(float(by_zone.sum()), WHOLE),
        spot={
            zone.name: _steps(plans, task.cold_ticks, [plan.alive[index] for plan in plans])
            for index, zone in enumerate(trace.zones)
        },
        on_demand=_steps(plans, task.cold_ticks, [plan.alive[-1] for plan in plans]),
        ready=_steps(plans, task.cold_ticks, [plan.ready.sum(axis=0) for plan in plans]),
        status="; ".join(sorted(statuses)) or "optimal",
        chunks=len(plans),
        segments=sum(len(plan.grid.starts) for plan in plans),
        seconds=seconds,
    )


def _steps(plans: Sequence[ChunkSolution], cold_ticks: int, counts: Sequence[Ints]) -> Steps[int]:
    """Return one step function over the whole trace.

    Of all chunks but the first, the ticks before the books open are another chunk's.
    """
    points: list[tuple[int, int]] = []
    begins = 0
    for plan, count in zip(plans, counts, strict=True):
        opens = begins + cold_ticks if points else 0
        points += [
            (max(begins + start, opens), value)
            for start, value, end in zip(
                plan.grid.starts.tolist(), count.tolist(), [*plan.grid.starts[1:].tolist(), None], strict=True
            )
            if end is None or begins + end > opens
        ]
        begins += int(plan.grid.billed.sum())
    return Steps.of(iter(points))
