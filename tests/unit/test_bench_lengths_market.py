"""The arithmetic of two benchmarks: routing by guessed lengths, and an SLO on a spot market."""

from __future__ import annotations

import pytest

from benchmarks.routing_lengths import GUESSES, GUIDED, Cell, Figures, Known, figures, play, rows
from benchmarks.slo_market import Outcome, at, counted, total
from benchmarks.traffic.measure import Served
from benchmarks.traffic.tenants import TENANTS, Tenants
from benchmarks.traffic.workloads import walk
from lb.config.options import PushMode
from policies.routing.base import RequestView
from skyserve_cli.account.runs import ON_DEMAND, SPOT, FleetSample, Run


def served(number: int, e2e_s: float, tokens: int) -> Served:
    return Served(
        f"c{number}", 0, float(number), float(number), number + 0.1, number + e2e_s, 10, 0, tokens, 40, 0
    )


class TestRoutingLengths:
    def test_a_call_is_in_time_by_its_seconds_per_token(self) -> None:
        calls = [served(0, 1000.0, 1)] * 2  # the first tenth, not counted
        calls += [served(number, 20.0, 100) for number in range(1, 16)]  # exactly 0.2 s per token
        calls += [served(number, 21.0, 100) for number in range(16, 19)]
        found = figures(calls)
        assert found.in_time == pytest.approx(15 / 18)
        assert found.ttft_mean_s == pytest.approx(0.1)
        with pytest.raises(ValueError, match="too few"):
            figures(calls[:1])

    def test_known_lengths_are_those_of_the_calls(self) -> None:
        known, part = Known({"a": 40}), Known({"a": 40}, 0.15)
        view = RequestView("a", "POST", "/")
        assert (known.predict(view), known.mean(view)) == (40, 40.0)
        assert (part.predict(view), part.mean(view)) == (6, 6.0)

    def test_differences_are_taken_seed_by_seed(self) -> None:
        def run(share: float) -> Figures:
            return Figures(share, 1.0, 1.0, 0.1, 0.1, 0)

        base, other = [run(0.9), run(0.5), run(0.7)], [run(0.91), run(0.51), run(0.71)]
        first, second = rows({"constant": base, "other": other}, "constant")
        assert first[-4:] == ["", "", "", ""]
        assert second[6] == "+1.00 ±+0.00", "the seeds differ by far more than the routers"
        assert second[-1] == "3/0"

    def test_tenants_ask_by_their_shares_and_the_same_every_time(self) -> None:
        calls = list(walk(Tenants(10.0, 200.0, 3)))
        assert [call.id for call in calls] == [call.id for call in walk(Tenants(10.0, 200.0, 3))]
        for tenant in TENANTS:
            own = [call for call in calls if call.scope == tenant.name]
            assert len(own) / len(calls) == pytest.approx(tenant.share, abs=0.05)
            middle = sorted(len(call.answer) for call in own)[len(own) // 2]
            assert middle == pytest.approx(tenant.response_tokens.median, rel=0.35)

    @pytest.mark.parametrize("guided", sorted(GUIDED))
    def test_every_guess_serves_the_same_calls(self, guided: str) -> None:
        for router in (*GUESSES, "least_load"):
            found = play(Cell(router, guided, 1.0, 40.0, 1, PushMode.BLIND, 2, "l4-8b"))
            assert found.refused == 0
            assert 0.5 < found.in_time <= 1.0


def outcome(attainment: float, usd: float) -> Outcome:
    return Outcome(1000, 1000 * attainment, usd, round(usd), usd / 2)


class TestSloMarket:
    def test_a_value_at_an_attainment_lies_between_its_neighbours(self) -> None:
        curve = [outcome(0.99, 100.0), outcome(0.97, 60.0), outcome(0.999, 200.0)]
        assert at(curve, 0.98, lambda one: one.usd) == pytest.approx(80.0)
        assert at(curve, 0.99, lambda one: one.usd) == pytest.approx(100.0)
        assert at(curve, 0.96, lambda one: one.usd) is None
        assert at(curve, 0.9995, lambda one: one.usd) is None

    def test_windows_add_up(self) -> None:
        both = total([outcome(1.0, 10.0), Outcome(3000, 1500.0, 30.0, 5, 1.0)])
        assert both == Outcome(4000, 2500.0, 40.0, 15, 6.0)
        assert both.attainment == 0.625

    def test_stand_ins_are_launches_on_demand_and_their_hours(self) -> None:
        def step(at_s: float, on_demand: int) -> FleetSample:
            return FleetSample(at_s, (("a", ON_DEMAND, on_demand, 0), ("a", SPOT, 3, 3)))

        steps = (step(0.0, 2), step(3600.0, 1), step(7200.0, 4))
        found = counted(a_run(steps, days=0.125))
        assert (found.stand_ins, found.stand_in_hours) == (5, 2 + 1 + 4)
        assert found.attainment == pytest.approx(0.99)

    def test_a_run_that_judges_nothing_is_no_outcome(self) -> None:
        with pytest.raises(ValueError, match="judged no requests"):
            counted(a_run((), days=1.0, attainment=None))


def a_run(steps: tuple[FleetSample, ...], *, days: float, attainment: float | None = 0.99) -> Run:
    return Run(
        "spothedge", 1, 0, 0.99, 0.99, 0.5, 0.0, 0.0, 0.5, days, 10.0, 20.0, 5, 0.0, 10, "", "",
        steps, 4, requests=100, attainment=attainment,
    )  # fmt: skip
