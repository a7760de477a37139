"""When a load becomes a size: the rule every scaler shares (SkyServe paper §4, made exact).

A scaler decides how many replicas the load requests now. The target rises to the highest number that the load has
requested during the whole upscale delay, and sinks to the lowest that was enough during the whole downscale delay:
a spike at the end of the wait is not taken for the level of the wait, and what rises step by step is followed step
by step, each level with a wait of its own. Delays are seconds of the clock, not ticks as in SkyPilot, so a delay
of 39 s is 39 s. A sudden change of load comes out of the window over which it is measured as a slope; that it be
followed in one move and not in many, a move takes along the levels whose waits end within a sixth of the delay.

*Excursions.* SkyPilot restarts a wait after a single sample on the other side, so a load that jitters around a
boundary never scales although it requests more nine times out of ten. Here a wait pauses while the load is away,
and is forgotten only when the load has been away for more than a sixth of the delay in total. The delay is thus
always served in full, a wait lasts at most 7/6 of it, and a load that is away more often than every seventh second
is not taken for steady. Excursions are remembered as instants and sums of seconds, so a quiet tick changes nothing.

*Zero.* To sleep is another thing than to be one smaller: the next request waits for a cold start. A single request
stops the wait for zero, and no service sleeps while a request is in flight or held. From zero the target jumps at once:
no replica and a waiting request is not a trend to be confirmed.

*Load that only shows in probes.* A replica whose readiness probe waits behind requests (`health`) has more to do than it can,
whatever the figure that the scaler measures. While there are such, as many replicas are needed on top of the target, within the
same waits, and none goes.

*Ignorance.* Without a report from any load balancer the target stays, so that a controller that has just started
does not take its own ignorance for silence.

Memory is {"target": n, "up": [wait, ...], "down": [wait, ...]} with waits as [level, since, away_s, left].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from policies.model import Json, Observation
from policies.scaling.base import Size

SPARE_SHARE = 1 / 6
_ROUNDING_S = 1e-6


class Need(NamedTuple):
    """What a load requests.

    Fewer than `least` replicas cannot carry it; `enough` can, whichever of the fleet they are. The two differ only where
    replicas differ.
    """

    least: int
    enough: int


class _Wait(NamedTuple):
    """All levels beyond those of the wait before, up to `level`, have been requested since `since`, but for `away_s` seconds.

    `left`: when the load went away again; None while it requests them.
    """

    level: int
    since: float
    away_s: float
    left: float | None

    def ripe_at(self, delay_s: float) -> float:
        return self.since + self.away_s + delay_s


def settle(observation: Observation, memory: Json, need: Need | None, floor: int = 0) -> Size:
    """Return the size for a `need` (None: unknown).

    `floor` is a size owed without any wait: what the present replicas need to carry the load that had been agreed on.
    """
    goal, load, now = observation.goal.scaling, observation.load, observation.now
    low, high = goal.min_replicas, goal.max_replicas
    target = _within(memory.get("target", low), low, high)
    current = _within(max(target, floor), low, high)
    if need is None:
        return Size(current, {**memory, "target": target})

    more = max(load.asked, target + len(load.loaded) if load.loaded else 0)
    need = Need(max(need.least, more), max(need.enough, more))
    busy = 1 if load.in_flight + load.queued > 0 else 0
    least = _within(max(need.least, busy), low, high)
    enough = _within(max(need.enough, busy), low, high)
    if current == 0 and least > 0:
        return Size(least, {"target": least})

    up = _watch(_waits(memory, "up"), least, current, now, SPARE_SHARE * goal.upscale_delay_s)
    idle = _waits(memory, "down")
    if enough > 0:
        idle = [wait._replace(level=max(1, wait.level)) for wait in idle]
    # Downwards is upwards in a mirror.
    down = _mirrored(_watch(_mirrored(idle), -enough, -current, now, SPARE_SHARE * goal.downscale_delay_s))
    risen = _ripe(up, goal.upscale_delay_s, now)
    sunk = _ripe(down, goal.downscale_delay_s, now)
    if risen:
        current = target = risen[-1].level
        up, down = [wait for wait in up if wait.level > target], []
    elif sunk:
        # Levels that came along are as good as waited for; zero is not.
        slept = _is_ripe(sunk[-1], goal.downscale_delay_s, now)
        current = target = sunk[-1].level if slept else max(1, sunk[-1].level)
        up, down = [], [wait for wait in down if wait.level < target]

    after: dict[str, object] = {"target": target}
    after |= {key: [list(wait) for wait in waits] for key, waits in (("up", up), ("down", down)) if waits}
    ripe_at = [wait.ripe_at(goal.upscale_delay_s) for wait in up if wait.left is None]
    ripe_at += [wait.ripe_at(goal.downscale_delay_s) for wait in down if wait.left is None]
    return Size(current, after, min(ripe_at, default=None))


def _watch(waits: Iterable[_Wait], asked: int, current: int, now: float, spare_s: float) -> list[_Wait]:
    """Return the waits for more than `current` after the load has requested `asked`; nearest level first."""
    after: list[_Wait] = []
    top = current
    for wait in waits:
        if asked > top and wait.level > top:
            away_s = wait.away_s + (0.0 if wait.left is None else now - wait.left)
            if away_s > spare_s:
                continue  # forgotten; a wait for more that is not will do for these levels as well
            top = min(wait.level, asked)
            after.append(_Wait(top, wait.since, away_s, None))
        if wait.level > top:
            top = wait.level
            after.append(wait if wait.left is not None else wait._replace(left=now))
    if asked > top:
        after.append(_Wait(asked, now, 0.0, None))
    return after


def _ripe(waits: Iterable[_Wait], delay_s: float, now: float) -> list[_Wait]:
    """Return the waits that are over, and with them those that will be within the time that is forgiven anyway."""
    asked = [wait for wait in waits if wait.left is None]
    if not any(_is_ripe(wait, delay_s, now) for wait in asked):
        return []
    return [wait for wait in asked if _is_ripe(wait, delay_s * (1.0 - SPARE_SHARE), now)]


def _is_ripe(wait: _Wait, delay_s: float, now: float) -> bool:
    return now >= wait.ripe_at(delay_s) - _ROUNDING_S


def _waits(memory: Json, key: str) -> list[_Wait]:
    return [_Wait(*wait) for wait in memory.get(key, ())]


def _mirrored(waits: Iterable[_Wait]) -> list[_Wait]:
    return [wait._replace(level=-wait.level) for wait in waits]


def _within(size: int, low: int, high: int) -> int:
    return min(max(size, low), high)
