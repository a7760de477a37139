"""Recorded tokens in simulated replicas: the work of requests, and an autoscaler that sees it against one that does not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from policies.goals import ScalingGoal
from skyserve_cli.commands.traffic_options import response_weight, scaled
from skyserve_cli.output import WrongUsage
from skyserve_cli.sim.arrivals import Arrivals, TokenMeans
from skyserve_cli.sim.scaling import MINUTE_S, Evaluation, ScalingTrial, goal_for, run
from skyserve_cli.sim.served import ServedRequests, Traffic
from skyserve_cli.sim.slo_queue import bridged, drawn
from skyserve_cli.sim.token_steps import token_steps, work_share
from skyserve_cli.spec import ServiceSpec
from skyserve_cli.spec.model import SloSpec

DAY_S = 86400.0
GOAL = ScalingGoal(1, 100)


def recording(days: int = 3, qps: float = 16.0, response_swing: float = 0.0) -> Arrivals:
    """As many requests at every moment; their prompts double in the second half of each day, and their responses swing by the hour."""
    bins = days * 144
    at = np.arange(bins)
    prompt = np.where(at % 144 < 72, 400.0, 1200.0)
    response = 200.0 * (1.0 + response_swing * np.sin(at / 6.0))
    counts = 600.0 * qps * np.arange(bins + 1)
    tokens = TokenMeans(tuple(prompt.tolist()), tuple(response.tolist()))
    return Arrivals("halves", tuple((600.0 * np.arange(bins + 1)).tolist()), tuple(counts.tolist()), tokens)


def trial(arrivals: Arrivals, weight: float = 1.0, known_s: float = DAY_S) -> ScalingTrial:
    length_s = arrivals.length_s
    tokens = token_steps(arrivals, length_s, known_s, weight)
    return ScalingTrial(drawn(arrivals, length_s, 0), int(known_s // 60), 2.0, 300.0, 0.995, tokens)


def test_a_request_of_the_usual_size_is_one_and_responses_have_their_weight() -> None:
    found = token_steps(recording(), DAY_S, DAY_S, 2.0)
    assert found is not None
    assert found.size.mean() == pytest.approx(1.0, rel=0.01)
    assert (found.size[100], found.size[-100]) == (pytest.approx(800 / 1200), pytest.approx(1600 / 1200))
    assert work_share(recording(), 3 * DAY_S, DAY_S, 2.0) == pytest.approx(1.0)
    assert work_share(recording(), 1.5 * DAY_S, DAY_S, 2.0) == pytest.approx(800 / 1200)


def test_without_tokens_all_requests_weigh_the_same() -> None:
    bare = replace(recording(), tokens=None)
    assert token_steps(bare, DAY_S, DAY_S, 1.0) is None
    assert work_share(bare, DAY_S, 600.0, 1.0) == 1.0


def test_tokens_of_a_hole_are_between_those_of_its_sides() -> None:
    whole = recording(1)
    rates = np.diff(whole.counts)
    rates[10:14] = 0.0
    assert whole.tokens is not None
    prompt = np.array(whole.tokens.prompt)
    prompt[10:14] = 1e6
    holed = replace(
        whole,
        counts=(0.0, *np.cumsum(rates).tolist()),
        tokens=TokenMeans(tuple(prompt.tolist()), whole.tokens.response),
    )
    filled, bridges = bridged(holed)
    assert bridges == 4
    assert filled.tokens == TokenMeans(pytest.approx(whole.tokens.prompt), whole.tokens.response)


def evaluated(name: str, on: ScalingTrial) -> Evaluation:
    return run(on, name, goal_for(name, GOAL, on))


def test_work_that_doubles_without_a_request_more_is_seen_by_tokens_alone() -> None:
    on = trial(recording())
    by_tokens, by_requests = evaluated("predictive", on), evaluated("predictive_requests", on)
    assert by_tokens.attainment > 0.99
    assert by_requests.attainment < by_tokens.attainment - 0.02
    assert by_tokens.hours < by_requests.hours
    oracle = evaluated("oracle", on)
    assert oracle.attainment >= 0.995
    assert oracle.hours < by_tokens.hours


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_a_prior_twice_too_large_or_small_is_learned(weight: float) -> None:
    on = trial(recording(response_swing=0.8), weight)
    known = evaluated("predictive", trial(recording(response_swing=0.8), 1.0))
    assert evaluated("predictive", on).attainment > known.attainment - 0.002


def test_a_market_reports_tokens_and_carries_work() -> None:
    served = ServedRequests.draw(Traffic(recording(1), 2.0, DAY_S / 2, 1.0), 3600.0, 20.0, 0)
    assert served.known[0].prompt_tokens == pytest.approx(400 * served.known[0].requests)
    served.serve(0, 180, 100, counted=True)
    report = served.demand(3600.0)
    assert report.response_tokens[1] == pytest.approx(200 * report.requests[1], abs=1)
    # 8 requests of the usual size in each of 8 replicas; these have 1400 tokens, and the usual ones 600
    assert served.ongoing(3600.0) == (0, pytest.approx(8.0 * 8.0 * 7 / 3, rel=0.2))
    assert served.attainment == 1.0
    assert math.isclose(sum(served.counts), served.asked)
    assert len(served.tokens) == round(3600.0 / MINUTE_S * 3)


# --- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "own", "weight"), [(None, None, 1.0), (0.5, 3.0, 0.5), (4.0, None, 4.0), (None, 3.0, 3.0)]
)
def test_a_response_token_weighs_what_the_option_says_or_the_file(
    given: float | None, own: float | None, weight: float
) -> None:
    spec = ServiceSpec("x", "serve", slo=SloSpec(response_weight=own))
    assert response_weight(recording(1), given, spec) == weight


@pytest.mark.parametrize(
    ("tokens", "given", "sentence"),
    [(True, 0.0, "above 0 and up to 1000"), (True, 2e3, "got 2000"), (False, 2.0, "halves has no tokens")],
)
def test_a_weight_that_makes_no_sense_is_a_wrong_option(tokens: bool, given: float, sentence: str) -> None:
    arrivals = recording(1) if tokens else replace(recording(1), tokens=None)
    with pytest.raises(WrongUsage, match=sentence):
        response_weight(arrivals, given)


def test_mean_replicas_carry_the_mean_of_the_work() -> None:
    day = recording(1)
    by_count = scaled(day, DAY_S, DAY_S / 2, 8.0, 2.0)
    assert scaled(day, DAY_S, DAY_S / 2, 8.0, 2.0, 1.0) == pytest.approx(by_count * 600 / 1400)
    assert response_weight(replace(day, tokens=None), None) is None
