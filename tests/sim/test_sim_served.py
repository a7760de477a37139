"""Markets with requests: who is served within the SLO, what a service with an SLO makes of it, and of an hour's delay."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.goals import ScalingGoal
from skyserve_cli.account.runs import Run
from skyserve_cli.engine.profiles import L4_8B
from skyserve_cli.sim.arrivals import Arrivals, TokenMeans
from skyserve_cli.sim.run import Replay, simulate
from skyserve_cli.sim.served import ServedRequests, Traffic
from skyserve_cli.sim.settings import Job, Setting
from skyserve_cli.sim.slo_queue import SloQueue
from skyserve_cli.sim.trace import Steps, Trace, ZoneTrace
from skyserve_cli.spec.model import ServiceSpec, SloSpec

DAY_S = 86_400.0
REACTIVE = ScalingGoal(1, 30, 1.6)
SLO = ServiceSpec("chat", "run", scaling=ScalingGoal(1, 30), slo=SloSpec(2000.0, None, 0.99, 2.0))


def market(hours: float) -> Trace:
    """Three zones, of which one comes and goes."""
    ticks = round(hours * 120)
    zones = [
        ZoneTrace("r1a", "r1", Steps((0,), (50,))),
        ZoneTrace("r2b", "r2", Steps((0, 100, 200), (50, 0, 50))),
        ZoneTrace("r3c", "r3", Steps((0,), (3,))),
    ]
    return Trace("made", tuple(zones), ticks, 30.0, 30.0, "counts")


def a_day(least: float = 6.0, most: float = 18.0) -> Arrivals:
    """Every day three hours of rising and nine of falling, twice; requests per second."""
    counts = [0.0]
    for ten in range(144):
        hour = ten / 6 % 12
        share = hour / 3 if hour < 3 else (12 - hour) / 9
        counts.append(counts[-1] + 600.0 * (least + (most - least) * share))
    return Arrivals("made", tuple(600.0 * ten for ten in range(145)), tuple(counts))


def setting(spec: ServiceSpec, hours: float = 8.0, known_days: int = 2) -> Setting:
    arrivals = a_day()
    traffic = Traffic(arrivals, 2.0, known_days * DAY_S)
    return Setting(market(hours), 1, 180.0, arrivals=arrivals, spec=spec, traffic=traffic)


def on_demand(goal: ScalingGoal) -> Run:
    found = simulate(setting(ServiceSpec("chat", "run", scaling=goal)), Job("on_demand"))
    assert found.attainment is not None
    return found


def test_an_upscale_delay_of_an_hour_serves_fewer_in_time() -> None:
    soon, late = on_demand(REACTIVE), on_demand(replace(REACTIVE, upscale_delay_s=3600.0))
    assert soon.attainment is not None
    assert late.attainment is not None
    assert late.attainment < soon.attainment - 0.02


@pytest.mark.long
def test_a_service_with_an_slo_meets_it_in_a_market() -> None:
    found = simulate(setting(SLO), Job("spothedge", 0))
    assert found.attainment is not None
    assert found.attainment >= 0.985
    assert len({wanted for _, wanted in found.wanted}) > 4  # it follows the day


@pytest.mark.long
@pytest.mark.parametrize("policy", ["spothedge", "risk_hedge"])
def test_ticks_left_out_change_no_story_of_a_service_with_an_slo(policy: str) -> None:
    given = setting(SLO, 2.0)
    quick, thorough = Replay(given, Job(policy, 0)), Replay(given, Job(policy, 0), compressed=False)
    assert quick.run().digest == thorough.run().digest


def test_history_ends_where_the_market_begins() -> None:
    served = ServedRequests.draw(Traffic(a_day(), 2.0, DAY_S), 3600.0, 30.0, 0)
    first = served.demand(0.0).first
    assert [row.minute for row in served.known] == list(range(served.known[0].minute, first))
    assert sum(row.requests for row in served.known) == pytest.approx(12 * DAY_S, rel=0.02)
    served.serve(0, 8, 10, counted=True)
    told = served.demand(240.0)
    assert (told.first, told.end) == (first, first + 4)
    assert sum(told.requests) <= served.asked


def test_requests_that_nobody_can_serve_yet_are_not_judged() -> None:
    served = ServedRequests.draw(Traffic(a_day(), 2.0), 3600.0, 30.0, 0)
    served.serve(0, 6, 0, counted=False)
    assert served.attainment is None
    served.serve(6, 8, 0, counted=True)
    assert served.attainment == 0.0
    assert sum(served.demand(270.0).late) == served.asked


@pytest.mark.parametrize("start_s", [0.0, 600.0, 650.0, 86_000.0, 3 * DAY_S + 7.0])
def test_a_recording_from_later_on_has_the_same_requests(start_s: float) -> None:
    whole = a_day()
    later = whole.later(start_s)
    assert later.length_s == pytest.approx(whole.length_s)
    assert list(later.at_s) == sorted(later.at_s)
    for at_s in (0.0, 55.0, 4000.0, 80_000.0, 100_000.0):
        assert later.count(at_s, at_s + 700.0) == pytest.approx(
            whole.count(start_s + at_s, start_s + at_s + 700.0), abs=2
        )


def test_what_waits_is_served_in_ticks_without_a_request() -> None:
    queue = SloQueue(1.0)
    served = ServedRequests([200, 0, 0, 0, 0, 0, 0, 30], [(0.0, 0.0, 1.0)] * 8, (), 30.0, queue)
    served.serve(0, 7, 1, counted=True)
    assert queue.waiting == 0.0  # 210 seconds of at most 1.25 requests
    before = served.met
    served.serve(7, 8, 1, counted=True)
    assert served.met - before == pytest.approx(30.0)


def test_disks_and_addresses_are_paid_as_long_as_machines() -> None:
    found = simulate(Setting(market(2.0), 3, 180.0, beside_usd_hour=0.5), Job("on_demand"))
    assert found.usd_beside == pytest.approx(0.5 * found.usd / 3.0)  # an hour of a machine costs 3
    assert simulate(Setting(market(2.0), 3, 180.0), Job("on_demand")).usd_beside is None


def test_a_policy_that_loses_replicas_has_more_requests_that_time_out() -> None:
    tokens = TokenMeans(*((one,) * 144 for one in (512.0, 100.0)))
    arrivals = replace(a_day(0.5, 0.5), tokens=tokens)

    def failed(policy: str, timeout_s: float) -> Run:
        traffic = Traffic(arrivals, 0.4, 0.0, 1.0, L4_8B, timeout_s)
        return simulate(Setting(market(2.0), 2, 180.0, arrivals=arrivals, traffic=traffic), Job(policy, 0))

    lost, kept = failed("single_zone", 30.0), failed("on_demand", 30.0)
    assert kept.requests_failed == 0.0
    assert lost.requests_failed == 0.0  # its best zone never empties
    spread = failed("even_spread", 30.0)
    assert spread.requests_failed is not None
    assert spread.requests_failed > 0.0
    assert spread.latency_s is not None
    assert spread.latency_s.p99 <= 31.0
    assert failed("even_spread", math.inf).requests_failed is None
