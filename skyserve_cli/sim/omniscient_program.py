"""The program of one chunk of a trace for the Omniscient policy, and its solution by HiGHS (see `omniscient`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from skyserve_cli.sim.trace import Trace

MIP_GAP = 1e-3  # relative; where replicas must be whole, a solution this close to the bound is good enough
WHOLE = 1e-6  # how far from a whole number of replicas is still one
_REACH = (-2, -1, 0, 1, 2)  # cold starts by which a capacity change is felt earlier or later

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class SolverError(RuntimeError):
    """HiGHS found no plan in time; the text is its reason."""


@dataclass(frozen=True, slots=True)
class Task:
    """The parameters of every chunk.

    `prices` are the zones' and, last, on-demand's: on-demand is one more zone, with room for everything.
    """

    n_target: int
    cold_ticks: int
    prices: tuple[float, ...]
    availability: float


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
class ChunkSolution:
    """A chunk's solution. `bound` is the least cost, in spot replica ticks, that the solver has not excluded."""

    grid: _Grid
    alive: Ints
    ready: Ints
    bound: float
    status: str


def _segments(chunk: Trace, cold_ticks: int, full_grid: bool) -> Ints:
    """Return the ticks at which segments start."""
    if full_grid:
        return np.arange(chunk.n_ticks)
    starts = {0, cold_ticks, 2 * cold_ticks}
    for change in chunk.changes():
        starts.update(change + shift * cold_ticks for shift in _REACH)
    return np.array(sorted(tick for tick in starts if 0 <= tick < chunk.n_ticks), dtype=np.int64)


def _grid(chunk: Trace, task: Task, full_grid: bool) -> _Grid:
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


def solve_chunk(chunk: Trace, task: Task, full_grid: bool, left_s: Callable[[], float]) -> ChunkSolution:
    """Build and solve the program of one chunk; `left_s` returns how long that may still take.

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
        left_s=left_s,
    )
    try:
        if task.availability < 1:
            found, bound, status = _with_outages(program, task, grid)
        else:
            found, bound, status = _always_up(program, n_ready)
        ready = np.round(found[:n_ready]).astype(np.int64).reshape(grid.room.shape)
    except SolverError:
        ready = np.zeros_like(grid.room)
        ready[-1] = grid.can_be_ready[-1]
        bound, status = _least_cost(task, grid), "time limit reached: on demand alone"
    return ChunkSolution(grid, _alive(ready, grid.reach), ready, bound, status)


def _least_cost(task: Task, grid: _Grid) -> float:
    """Return what the cheapest replicas with room cost in the cheapest segments that are enough, as if none ever started."""
    missing = np.where(grid.billed > 0, task.n_target, 0)
    rate = np.zeros(len(grid.starts))
    for zone in np.argsort(task.prices):
        taken = np.minimum(missing, grid.can_be_ready[zone])
        rate += task.prices[zone] * taken
        missing = missing - taken
    order = np.argsort(rate)
    ends = np.minimum(np.cumsum(grid.billed[order]), task.availability * grid.billed.sum())
    return float(rate[order] @ np.diff(ends, prepend=0.0))


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


def _served(task: Task, grid: _Grid, n_unknowns: int) -> list[LinearConstraint]:
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
    required = _table([np.zeros(len(counted), dtype=np.int64)], [in_service], [ticks], (1, n_unknowns))
    return [LinearConstraint(table, lb=0), LinearConstraint(required, lb=task.availability * ticks.sum())]


def _table(
    rows: Sequence[Ints], columns: Sequence[Ints], values: Sequence[Floats], shape: tuple[int, int]
) -> csr_array:
    entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    return csr_array(coo_array(entries, shape=shape))


@dataclass(frozen=True, slots=True)
class _Program:
    """Minimise `cost` over unknowns between `least` and `most`, within the constraints and the time that is left."""

    cost: Floats
    constraints: Sequence[LinearConstraint]
    least: Floats
    most: Floats
    left_s: Callable[[], float]


_Solution = tuple[Floats, float, str]  # the unknowns, a lower bound of the cost, the status


def _always_up(program: _Program, n_ready: int) -> _Solution:
    """Return all that matters is who is ready: the first `n_ready` unknowns."""
    solution = _optimum(program)
    if np.abs(solution[0][:n_ready] - np.round(solution[0][:n_ready])).max() <= WHOLE:
        return solution
    return _optimum(program, whole=np.arange(len(program.cost)) < n_ready)


def _with_outages(program: _Program, task: Task, grid: _Grid) -> _Solution:
    """Choose the segments of service, which the last unknowns say segment by segment; then plan for these.

    First those that are of service most where service may be in parts. Mostly that is as good as the best choice of whole segments,
    which takes the solver far longer.
    """
    n_segments = len(grid.starts)
    is_segment = np.arange(len(program.cost)) >= len(program.cost) - n_segments

    def planned(in_service: NDArray[np.bool_]) -> Floats:
        least, most = program.least.copy(), program.most.copy()
        least[is_segment] = most[is_segment] = in_service
        return _always_up(replace(program, least=least, most=most), grid.room.size)[0]

    parts, bound, _ = _optimum(program)
    left_s = program.left_s()
    found, status = planned(_most_in_service(parts[is_segment], task, grid)), "optimal"
    took_s = left_s - program.left_s()
    if program.cost @ found > (1.0 + MIP_GAP) * bound:
        try:
            in_time = replace(program, left_s=lambda: program.left_s() - 2.0 * took_s)
            chosen, proven, status = _optimum(in_time, whole=is_segment)
            bound = max(bound, proven)
            found = min(found, planned(chosen[is_segment] > 0.5), key=lambda one: float(program.cost @ one))
        except SolverError:
            status = "time limit reached: near the optimum"
    return found, bound, status


def _most_in_service(parts: Floats, task: Task, grid: _Grid) -> NDArray[np.bool_]:
    """Return the segments that are of service most, as many as the promise needs."""
    order = np.argsort(np.where(grid.starts >= task.cold_ticks, -parts, 1.0), kind="stable")
    kept = np.cumsum(grid.billed[order]) >= task.availability * grid.billed.sum()
    chosen = np.zeros(len(parts), dtype=np.bool_)
    chosen[order[: int(np.argmax(kept)) + 1]] = True
    return chosen


def _optimum(program: _Program, whole: NDArray[np.bool_] | None = None) -> _Solution:
    """Raise SolverError where the solver has nothing to show when it stops."""
    solution = milp(
        program.cost,
        constraints=program.constraints,
        bounds=Bounds(program.least, program.most),
        integrality=None if whole is None else whole.astype(np.int64),
        options={"time_limit": max(0.0, program.left_s()), "mip_rel_gap": MIP_GAP},
    )
    if solution.x is None:
        raise SolverError(f"no plan was found: {solution.message}")
    status = "optimal" if solution.status == 0 else "time limit reached"
    if whole is None:  # a linear program is its own bound, once it is solved
        return solution.x, float(solution.fun) if solution.status == 0 else 0.0, status
    return solution.x, max(0.0, float(solution.mip_dual_bound)), status
