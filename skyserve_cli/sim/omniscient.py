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
from dataclasses import dataclass, replace
from itertools import pairwise
from time import process_time

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from skyserve_cli.sim.trace import Steps, Trace

CHUNK_S = 10 * 86400.0
MIP_GAP = 1e-3  # relative; where replicas must be whole, a solution this close to the bound is good enough
TIME_LIMIT_S = 60.0  # per chunk, and again for each way out where it is reached

_WHOLE = 1e-6
_REACH = (-2, -1, 0, 1, 2)  # cold starts by which a capacity change is felt earlier or later

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class SolverError(RuntimeError):
    """HiGHS ended without a plan; the text is its reason."""


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
    progress: Callable[[int, int], None] = lambda done, chunks: None,
) -> OmniscientResult:
    """The cheapest way to have `n_target` replicas ready for the given share of time.

    `price_ratio` is the price of an on-demand replica, `spot_prices` are those of spot replicas by zone, all in units
    of a spot replica's usual price, which is what a zone that is not named costs. `full_grid` gives every tick a
    segment of its own: exact below an availability of 1, too, and slow. `progress` is called after each chunk with how many of
    how many are done. Raises ValueError for arguments that make no sense, and SolverError where there is no plan
    within `time_limit_s` per chunk.
    """
    cold_ticks = max(1, round(cold_start_s / trace.tick_s))
    if n_target < 1 or price_ratio <= 0 or not 0 < availability <= 1:
        raise ValueError("n_target is at least 1, price_ratio above 0, availability above 0 and at most 1")
    if trace.n_ticks <= cold_ticks:
        raise ValueError(f"{trace.name} is over before a cold start of {cold_start_s:g} s is")
    prices = [(spot_prices or {}).get(zone.name, 1.0) for zone in trace.zones]
    task = _Task(n_target, cold_ticks, (*prices, price_ratio), availability, time_limit_s)
    edges = _chunk_edges(cold_ticks, trace.n_ticks, chunk_s / trace.tick_s)
    started = process_time()
    plans = []
    for number, (start, end) in enumerate(pairwise(edges), 1):
        chunk = trace.cut(start - cold_ticks, end - start + cold_ticks, trace.name)
        plans.append(_solve_chunk(chunk, task, full_grid))
        progress(number, len(edges) - 1)
    return _joined(trace, plans, task, process_time() - started)


@dataclass(frozen=True, slots=True)
class _Task:
    """The parameters of every chunk.

    `prices` are the zones' and, last, on-demand's: on-demand is one more zone, with room for everything.
    """

    n_target: int
    cold_ticks: int
    prices: tuple[float, ...]
    availability: float
    time_limit_s: float


@dataclass(frozen=True, slots=True)
class _Grid:
    """A chunk, segment by segment.

    Ticks count from the chunk's first; arrays of two dimensions are by zone (on-demand last) and segment.

    `billed` is how many of a segment's ticks are on the books. Ready in segment i is who is alive in all segments
    that meet [starts[i] - D, ends[i]), which are reach[i]..i; there can be at most that number.
    """

    starts: Ints
    billed: Ints
    room: Ints
    reach: Ints
    can_be_ready: Ints


@dataclass(frozen=True, slots=True)
class _ChunkSolution:
    """A chunk's solution. `bound` is the least cost, in spot replica ticks, that the solver has not excluded."""

    grid: _Grid
    alive: Ints
    ready: Ints
    bound: float
    status: str


def _chunk_edges(first: int, last: int, chunk_ticks: float) -> list[int]:
    """Cuts [first, last) into equal parts of about `chunk_ticks`."""
    chunks = max(1, round((last - first) / chunk_ticks))
    return [first + (last - first) * number // chunks for number in range(chunks + 1)]


def _segments(chunk: Trace, cold_ticks: int, full_grid: bool) -> Ints:
    """Return the ticks at which segments start."""
    if full_grid:
        return np.arange(chunk.n_ticks)
    starts = {0, cold_ticks, 2 * cold_ticks}
    for change in chunk.changes():
        starts.update(change + shift * cold_ticks for shift in _REACH)
    return np.array(sorted(tick for tick in starts if 0 <= tick < chunk.n_ticks), dtype=np.int64)


def _grid(chunk: Trace, task: _Task, full_grid: bool) -> _Grid:
    starts = _segments(chunk, task.cold_ticks, full_grid)
    ends = np.append(starts[1:], chunk.n_ticks)
    spot_room = [[zone.capacity.at(tick) for tick in starts.tolist()] for zone in chunk.zones]
    room = np.minimum(np.array([*spot_room, [task.n_target] * len(starts)], dtype=np.int64), task.n_target)
    on_the_books = starts >= task.cold_ticks
    reach = np.searchsorted(ends, starts - task.cold_ticks, side="right")
    return _Grid(
        starts,
        billed=np.where(on_the_books, ends - starts, np.maximum(ends - task.cold_ticks, 0)),
        room=room,
        reach=reach,
        can_be_ready=np.where(on_the_books, _least(room, reach), 0),
    )


def _least(room: Ints, reach: Ints) -> Ints:
    """Return the minimum of room[:, reach[i] : i + 1], for every i."""
    pairs = np.column_stack([reach, np.arange(1, len(reach) + 1)]).ravel()
    padded = np.pad(room, ((0, 0), (0, 1)), mode="edge")  # reduceat wants each end to be an index, too
    least: Ints = np.minimum.reduceat(padded, pairs, axis=1)[:, ::2]
    return least


def _solve_chunk(chunk: Trace, task: _Task, full_grid: bool) -> _ChunkSolution:
    """Return the program of one chunk.

    Its unknowns are, one after the other: who is ready, zone by zone and segment by segment; how many become so, likewise;
    and, where outages are allowed, whether a segment is one of service.
    """
    grid = _grid(chunk, task, full_grid)
    n_ready, n_segments = grid.room.size, len(grid.starts)
    n_unknowns = 2 * n_ready + (n_segments if task.availability < 1 else 0)
    booked = np.append(0, np.cumsum(grid.billed))
    to_become_ready = booked[:-1] - booked[grid.reach]  # ticks on the books that a replica is alive before
    cost = np.zeros(n_unknowns)
    cost[:n_ready] = np.outer(task.prices, grid.billed).ravel()
    cost[n_ready : 2 * n_ready] = np.outer(task.prices, to_become_ready).ravel()
    most = np.ones(n_unknowns)
    most[: 2 * n_ready] = np.tile(grid.can_be_ready.ravel(), 2)
    program = _Program(
        cost,
        [_rises(grid, n_unknowns), _has_room(grid, n_unknowns), *_served(task, grid, n_unknowns)],
        least=np.zeros(n_unknowns),
        most=most,
        time_limit_s=task.time_limit_s,
    )
    if task.availability < 1:
        found, bound, status = _with_outages(program, task, grid)
    else:
        found, bound, status = _always_up(program, n_ready)
    ready = np.round(found[:n_ready]).astype(np.int64).reshape(grid.room.shape)
    return _ChunkSolution(grid, _alive(ready, grid.reach), ready, bound, status)


def _alive(ready: Ints, reach: Ints) -> Ints:
    """Return who is ready and, before, on the way to it."""
    rises = np.maximum(np.diff(ready, prepend=0, axis=1), 0)
    waiting = -rises
    for zone, change in enumerate(waiting):
        np.add.at(change, reach, rises[zone])
    alive: Ints = ready + np.cumsum(waiting, axis=1)
    return alive


def _rises(grid: _Grid, n_unknowns: int) -> LinearConstraint:
    """(4), first half: ready[z, i] - ready[z, i - 1] <= becomes_ready[z, i], where anything can be ready."""
    n_ready, n_segments = grid.room.size, len(grid.starts)
    ready = np.flatnonzero(grid.can_be_ready)
    row = np.arange(len(ready))
    has_before = ready % n_segments > 0
    table = _table(
        (row, row[has_before], row),
        (ready, ready[has_before] - 1, n_ready + ready),
        (np.ones(len(ready)), -np.ones(int(has_before.sum())), -np.ones(len(ready))),
        (len(ready), n_unknowns),
    )
    return LinearConstraint(table, ub=0)


def _has_room(grid: _Grid, n_unknowns: int) -> LinearConstraint:
    """(3) and (4), second half: in every segment there is room for who is ready and who becomes so within D."""
    n_ready, n_segments = grid.room.size, len(grid.starts)
    later = np.flatnonzero(grid.can_be_ready)  # becomes ready in i, and takes room in reach[i]..i - 1
    times = later % n_segments - grid.reach[later % n_segments]
    offset = np.arange(int(times.sum())) - np.repeat(np.cumsum(times) - times, times)
    occupied = np.repeat(later - times, times) + offset
    table = _table(
        (later, occupied),
        (later, n_ready + np.repeat(later, times)),
        (np.ones(len(later)), np.ones(len(occupied))),
        (n_ready, n_unknowns),
    )
    said = np.flatnonzero(np.diff(table.indptr) > 0)
    return LinearConstraint(table[said], ub=grid.room.ravel()[said])


def _served(task: _Task, grid: _Grid, n_unknowns: int) -> list[LinearConstraint]:
    """(5), and (2) where outages are allowed."""
    n_zones, n_segments = grid.room.shape
    counted = np.flatnonzero(grid.starts >= task.cold_ticks)
    row = np.arange(len(counted))
    rows = [np.tile(row, n_zones)]
    columns = [(np.arange(n_zones)[:, None] * n_segments + counted).ravel()]
    values = [np.ones(n_zones * len(counted))]
    if task.availability == 1:
        return [LinearConstraint(_table(rows, columns, values, (len(counted), n_unknowns)), lb=task.n_target)]
    in_service = n_unknowns - n_segments + counted
    table = _table(
        [*rows, row],
        [*columns, in_service],
        [*values, np.full(len(counted), -float(task.n_target))],
        (len(counted), n_unknowns),
    )
    ticks = grid.billed[counted].astype(np.float64)
    promise = _table([np.zeros(len(counted), dtype=np.int64)], [in_service], [ticks], (1, n_unknowns))
    return [LinearConstraint(table, lb=0), LinearConstraint(promise, lb=task.availability * ticks.sum())]


def _table(
    rows: Sequence[Ints], columns: Sequence[Ints], values: Sequence[Floats], shape: tuple[int, int]
) -> csr_array:
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    return csr_array(coo_array(entries, shape=shape))


# --- the solver ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Program:
    """Minimise `cost` over unknowns between `least` and `most`, within the constraints."""

    cost: Floats
    constraints: Sequence[LinearConstraint]
    least: Floats
    most: Floats
    time_limit_s: float


_Answer = tuple[Floats, float, str]  # the unknowns, a lower bound of the cost, the status


def _always_up(program: _Program, n_ready: int) -> _Answer:
    """Return all that matters is who is ready: the first `n_ready` unknowns."""
    solution = _optimum(program)
    if np.abs(solution[0][:n_ready] - np.round(solution[0][:n_ready])).max() <= _WHOLE:
        return solution
    return _optimum(program, whole=np.arange(len(program.cost)) < n_ready)


def _with_outages(program: _Program, task: _Task, grid: _Grid) -> _Answer:
    """Choose the segments of service, which the last unknowns say segment by segment; then plan for these."""
    n_segments = len(grid.starts)
    is_segment = np.arange(len(program.cost)) >= len(program.cost) - n_segments
    try:
        found, bound, status = _optimum(program, whole=is_segment)
        in_service = found[is_segment] > 0.5
    except SolverError:
        found, bound, _ = _optimum(program)  # service in parts
        in_service = _most_in_service(found[is_segment], task, grid)
        status = "time limit reached: near the optimum"
    least, most = program.least.copy(), program.most.copy()
    least[is_segment] = most[is_segment] = in_service
    found, _, _ = _always_up(replace(program, least=least, most=most), grid.room.size)
    return found, bound, status


def _most_in_service(parts: Floats, task: _Task, grid: _Grid) -> NDArray[np.bool_]:
    """Return the segments that are of service most, as many as the promise needs."""
    order = np.argsort(np.where(grid.starts >= task.cold_ticks, -parts, 1.0), kind="stable")
    kept = np.cumsum(grid.billed[order]) >= task.availability * grid.billed.sum()
    chosen = np.zeros(len(parts), dtype=np.bool_)
    chosen[order[: int(np.argmax(kept)) + 1]] = True
    return chosen


def _optimum(program: _Program, whole: NDArray[np.bool_] | None = None) -> _Answer:
    """Raise SolverError where the solver has nothing to show when it stops."""
    solution = milp(
        program.cost,
        constraints=program.constraints,
        bounds=Bounds(program.least, program.most),
        integrality=None if whole is None else whole.astype(np.int64),
        options={"time_limit": program.time_limit_s, "mip_rel_gap": MIP_GAP},
    )
    if solution.x is None:
        raise SolverError(f"no plan was found: {solution.message}")
    status = "optimal" if solution.status == 0 else "time limit reached"
    if whole is None:  # a linear program is its own bound, once it is solved
        return solution.x, float(solution.fun) if solution.status == 0 else 0.0, status
    return solution.x, max(0.0, float(solution.mip_dual_bound)), status


# --- the books ----------------------------------------------------------------------------------------------


def _joined(trace: Trace, plans: Sequence[_ChunkSolution], task: _Task, seconds: float) -> OmniscientResult:
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
        on_demand_cost_share=float(by_zone[-1]) / max(float(by_zone.sum()), _WHOLE),
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


def _steps(plans: Sequence[_ChunkSolution], cold_ticks: int, counts: Sequence[Ints]) -> Steps[int]:
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
