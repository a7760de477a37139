"""A day in which every zone has room, then one loses it, then all, then all have it again: the placers that hedge fall
back to on demand and return to spot. The same in real time: tests/e2e/test_spot_timeline.py."""

from __future__ import annotations

import pytest

from skyserve_cli.account.runs import ON_DEMAND, SPOT, Run
from skyserve_cli.sim.run import simulate
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.sim.trace import Steps, Trace, ZoneTrace

TICK_S, HOUR_S = 30.0, 3600.0
ONE_GOES_H, ALL_GO_H, ALL_BACK_H, END_H = 6, 8, 10, 24
WANTED, COLD_START_S = 2, 183.0
SETTLED_S = 1200.0


def the_day() -> Trace:
    def zone(name: str, gone_from_h: float) -> ZoneTrace:
        gone, back = (int(at * HOUR_S / TICK_S) for at in (gone_from_h, ALL_BACK_H))
        return ZoneTrace(name, name[:-1], Steps((0, gone, back), (4, 0, 4)))

    zones = zone("us-1a", ONE_GOES_H), zone("us-1b", ALL_GO_H), zone("eu-1a", ALL_GO_H)
    return Trace("day", zones, int(END_H * HOUR_S / TICK_S), TICK_S, TICK_S, "made up")


def ready(run: Run, at_s: float) -> dict[str, int]:
    """How many of each market are ready at an instant."""
    step = [step for step in run.steps if step.at_s <= at_s][-1]
    return {market: sum(n for _, kind, _, n in step.counts if kind == market) for market in (SPOT, ON_DEMAND)}


@pytest.mark.parametrize(
    "job", [Job("spothedge", 1), Job("risk_hedge", availability_target=0.995)], ids=lambda job: job.policy
)
def test_to_on_demand_and_back(job: Job) -> None:
    run = simulate(Setting(the_day(), WANTED, COLD_START_S), job)
    before = ready(run, ALL_GO_H * HOUR_S - TICK_S)
    assert before[SPOT] >= WANTED
    for at_s in (ALL_GO_H * HOUR_S + SETTLED_S, ALL_BACK_H * HOUR_S - TICK_S):
        assert ready(run, at_s) == {SPOT: 0, ON_DEMAND: WANTED}, (
            "nothing on spot, and not one too many on demand"
        )
    end = ready(run, END_H * HOUR_S)
    assert end[SPOT] >= WANTED
    assert end[ON_DEMAND] == 0
    most = max(sum(alive for _, kind, alive, _ in step.counts if kind == ON_DEMAND) for step in run.steps)
    assert most == WANTED
