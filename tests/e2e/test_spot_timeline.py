"""Hours of a spot market in half a minute: all zones have room, one loses it, all lose it, all have it again. The
long version, on traces: benchmarks/chaos/spot_market.py.

The next step of the timeline comes when the service has responded to the last one, so that no machine is too slow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.harness import Stack, until
from benchmarks.chaos.spot_market import (
    EXTRA,
    NAME,
    REPLICAS,
    audit,
    fleet,
    furnish,
    kill_controller,
    play,
    serve,
    spec,
)
from benchmarks.chaos.traffic import Traffic, tally
from tests.clouds.schedules import only_long

pytestmark = pytest.mark.long

REGIONS = {"us": ["us-a", "us-b"], "eu": ["eu-a"]}
RATE = 10.0
WANTED = REPLICAS
LOST_TWICE = "Two replicas died on this request"
ONE_GOES = '- {at: 0s, zone: "*", spot: 4}\n  - {at: 0s, zone: us-a, spot: 0}'
ALL_GO = '- {at: 0s, zone: "*", spot: 0}'
ALL_COME_BACK = '- {at: 0s, zone: "*", spot: 4}'


class Timeline:
    """The service in the market, and the steps."""

    def __init__(self, stack: Stack, folder: Path, placer: str) -> None:
        self.stack = stack
        self._file = folder / "market.yaml"
        furnish(stack, REGIONS)
        stack.up(spec(placer))
        self.waits_for(lambda spot, on_demand: spot >= WANTED and on_demand == 0, "spot replicas")

    def step(self, what: str) -> None:
        self._file.write_text(f"timeline:\n  {what}\n")
        play(self.stack, self._file)

    def waits_for(self, fits: Any, what: str) -> None:
        """Until every replica is ready, and that many of each kind."""

        def is_so() -> bool:
            spot, on_demand, others = fleet(self.stack)
            return others == 0 and bool(fits(spot, on_demand))

        until(is_so, f"no {what}", 60.0)

    def one_goes(self) -> None:
        self.step(ONE_GOES)
        until(
            lambda: all(
                r["zone"] != "us-a" for r in self.stack.replicas(NAME) if r["capacity_type"] == "spot"
            ),
            "the zone is not left",
        )
        self.waits_for(lambda spot, on_demand: spot + on_demand >= WANTED, "replicas elsewhere")

    def has_fallen_back(self) -> None:
        """As many on demand as are wanted, not one more, and nothing on spot."""
        self.waits_for(lambda spot, on_demand: (spot, on_demand) == (0, WANTED), "on-demand replicas alone")
        (view,) = json.loads(serve(self.stack, "status", NAME, "-o", "json"))
        assert (view["status"], view["wanted"], view["ready"]) == ("READY", WANTED, WANTED)
        assert all(replica["stands_in"] for replica in view["replicas"])

    def goes_back_to_spot(self) -> None:
        self.step(ALL_COME_BACK)
        self.waits_for(
            lambda spot, on_demand: (spot, on_demand) == (WANTED + EXTRA, 0), "spot replicas alone"
        )

    def is_well_told(self, traffic: Traffic) -> None:
        """No request failed but those of which both replicas were lost, nothing was launched twice, and the report has both kinds.

        A request that ran on the first replica of those that are lost at once may be sent again to the next one, and gets no third
        one then: it could be what kills them.
        """
        failed = tally(traffic.outcomes)
        twice = {why: count for why, count in failed.items() if LOST_TWICE in why}
        assert failed == twice
        assert sum(twice.values()) < RATE  # those under way, and no more
        assert audit(self.stack) == []
        told = json.loads(serve(self.stack, "report", NAME, "-o", "json"))
        hours = {(zone["capacity_type"], zone["hours"] > 0) for zone in told["zones"]}
        assert {("spot", True), ("on_demand", True)} <= hours
        assert told["preemptions"] >= WANTED
        assert 0 < told["availability"] <= 1
        assert told["usd"] > 0
        # Never more on demand than are wanted.
        on_demand = self.stack.rows(
            "SELECT launched_at, ended_at FROM replicas WHERE capacity_type = 'on_demand' AND launched_at IS NOT NULL"
        )
        for born, _ in on_demand:
            assert sum(since <= born < (until or born + 1) for since, until in on_demand) <= WANTED


def test_spot_then_on_demand_then_spot_again(tmp_path: Path) -> None:
    with Stack() as stack:
        timeline = Timeline(stack, tmp_path, "dynamic_fallback")
        with Traffic(stack.endpoint(NAME), RATE) as traffic:
            timeline.one_goes()
            timeline.step(ALL_GO)
            timeline.has_fallen_back()
            timeline.goes_back_to_spot()
        timeline.is_well_told(traffic)
        picture = tmp_path / "report.html"
        serve(stack, "report", NAME, "--out", str(picture))
        assert f"What {NAME} has done" in picture.read_text()


@only_long  # test_chaos_kills kills controllers in every run
def test_a_controller_killed_while_it_falls_back_comes_to_the_same(tmp_path: Path) -> None:
    with Stack() as stack:
        timeline = Timeline(stack, tmp_path, "dynamic_fallback")
        with Traffic(stack.endpoint(NAME), RATE) as traffic:
            timeline.step(ALL_GO)
            until(
                lambda: any(
                    r["capacity_type"] == "on_demand" and r["state"] != "READY" for r in stack.replicas(NAME)
                ),
                "no on-demand replica is on its way",
            )
            assert kill_controller(stack) >= 1  # what it has just forked looks like it
            timeline.has_fallen_back()
            timeline.goes_back_to_spot()
        timeline.is_well_told(traffic)


@only_long  # the simulator plays this in every run
def test_risk_hedge_buys_on_demand_what_spot_no_longer_gives(tmp_path: Path) -> None:
    """It tries lost zones again after two minutes at the earliest; that it goes back then is shown in virtual time
    (tests/sim)."""
    with Stack() as stack:
        timeline = Timeline(stack, tmp_path, "risk_hedge")
        with Traffic(stack.endpoint(NAME), RATE) as traffic:
            timeline.one_goes()
            timeline.step(ALL_GO)
            timeline.has_fallen_back()
        timeline.is_well_told(traffic)
