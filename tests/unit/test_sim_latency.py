"""How long simulated requests take: an engine's formula without a wait, first come first served with one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.goals import ScalingGoal
from skyserve_cli.commands.traffic_options import TrafficOptions, traffic
from skyserve_cli.engine.profiles import A100_7B, L4_8B
from skyserve_cli.output import WrongUsage
from skyserve_cli.sim.arrivals import Arrivals, TokenMeans
from skyserve_cli.sim.latency import LOADED, EngineTimes, Latencies, Tokens
from skyserve_cli.sim.served import ServedRequests, Traffic
from skyserve_cli.spec.model import ServiceSpec, SloSpec

CHAT = Tokens(512.0, 100.0)
ALONE = EngineTimes(L4_8B, CHAT).served(0.0)


def test_an_idle_engine_takes_what_its_profile_says() -> None:
    first_s, total_s = ALONE
    assert first_s == pytest.approx(0.020 + 0.067 + 0.55e-3 * 512)
    assert total_s == pytest.approx(first_s + 99 * 0.067)


def test_a_loaded_engine_is_slower_up_to_its_full_batch() -> None:
    times = EngineTimes(L4_8B, CHAT)
    rates = [0.0, 0.5, times.capacity_qps(), 2.0 * times.capacity_qps(), 100.0]
    each = [times.iteration_s(rate) for rate in rates]
    assert each == sorted(each)
    assert each[-1] == L4_8B.iteration_s(2048, 48, 48 * 562)
    assert 1.0 < each[2] / each[0] <= 1.0 / (1.0 - LOADED) + 1e-9


def latencies(*steps: tuple[int, int]) -> Latencies:
    """Steps of 20 s, each with ready replicas and requests; a replica carries 4 a second, and serves 5 at most."""
    found = Latencies(A100_7B, 4.0)
    for number, (ready, requests) in enumerate(steps):
        found.step(20.0 * number, 20.0, ready, requests, float(requests), CHAT)
    return found


def waits(*steps: tuple[int, int]) -> tuple[float, ...]:
    found = latencies(*steps).percentiles(20.0 * len(steps))
    assert found is not None
    # Their service takes a third of a second, to 1 % of which bins are exact.
    return tuple(round(one - EngineTimes(A100_7B, CHAT).served(0.0)[0], 0) for one in found[0])


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([(1, 80), (1, 80)], (0, 0, 0), id="at its capacity none waits"),
        pytest.param([(1, 100), (1, 100)], (0, 0, 0), id="nor at the most that it serves"),
        pytest.param([(1, 200), (1, 0)], (10, 18, 19), id="twice as many wait ever longer"),
        pytest.param([(0, 100), (1, 0)], (20, 20, 20), id="without a replica all wait until there is one"),
        pytest.param([(0, 100), (0, 0)], (28, 38, 38), id="who is not served counts with the wait so far"),
        pytest.param([(0, 100), (2, 0)], (14, 19, 19), id="two replicas serve them twice as fast"),
    ],
)
def test_who_waits_for_how_long(steps: list[tuple[int, int]], expected: tuple[float, ...]) -> None:
    assert waits(*steps) == pytest.approx(expected, abs=1.3)


@pytest.mark.parametrize("size", [1, 7, 100, 333])
def test_every_request_is_counted_once(size: int) -> None:
    found = latencies((0, size), (1, 2 * size), (3, size), (0, size), (1, 0))
    found.percentiles(100.0)
    assert sum(found._first.values()) == pytest.approx(5 * size)
    assert sum(found._total.values()) == pytest.approx(5 * size)


@pytest.mark.parametrize(
    ("timeout_s", "steps", "failed", "slowest_s"),
    [
        pytest.param(60.0, [(1, 80)] * 9, 0.0, 2, id="none waits"),
        pytest.param(
            60.0, [(1, 200)] * 60, 0.45, 60, id="twice the most: half fail, but for those of the beginning"
        ),
        pytest.param(60.0, [(0, 100)] * 60, 0.96, 57, id="without a replica all fail but the last"),
        pytest.param(60.0, [(0, 100)] * 2 + [(1, 50)] * 9, 0.0, 42, id="a short outage"),
        pytest.param(60.0, [(0, 100)] * 4 + [(1, 50)] * 9, 0.14, 60, id="a longer one"),
        pytest.param(1.0, [(1, 50)] * 9, 1.0, None, id="shorter than the service"),
    ],
)
def test_clients_give_up(
    timeout_s: float, steps: list[tuple[int, int]], failed: float, slowest_s: float | None
) -> None:
    found = Latencies(A100_7B, 4.0, timeout_s)
    for number, (ready, requests) in enumerate(steps):
        found.step(20.0 * number, 20.0, ready, requests, float(requests), CHAT)
    percentiles = found.percentiles(20.0 * len(steps))
    asked = sum(requests for _, requests in steps)
    assert found.failed / asked == pytest.approx(failed, abs=0.02)
    assert sum(found._total.values()) + found.failed == pytest.approx(asked)
    assert (percentiles and percentiles[1].p99) == (slowest_s and pytest.approx(slowest_s, abs=3))
    assert percentiles is None or percentiles[1].p99 <= timeout_s * 1.01


def test_what_was_given_up_does_not_wait_for_the_slo_either() -> None:
    for timeout_s, waiting in ((math.inf, 720.0), (60.0, 220.0)):
        traffic_ = Traffic(hourly(4.0), 4.0, engine=A100_7B, timeout_s=timeout_s)
        served = replace(
            ServedRequests.draw(traffic_, 300.0, 20.0, 0), counts=[80] * 9, tokens=[(*CHAT, 1.0)] * 9
        )
        served.serve(0, 9, 0, counted=True)
        assert served.queue.waiting == pytest.approx(waiting)
        assert (served.failed is None) == (timeout_s == math.inf)


# --- words of the command line ------------------------------------------------------------------------------


def hourly(rate: float) -> Arrivals:
    return Arrivals("plain", (0.0, 3600.0), (0.0, 3600.0 * rate))


def test_an_engine_says_what_a_replica_carries_unless_the_user_does() -> None:
    _, judged = traffic(None, hourly(3.0), TrafficOptions(engine="l4-8b:512,100"), 30.0)
    assert judged is not None
    assert judged.engine is L4_8B
    assert judged.capacity_qps == pytest.approx(EngineTimes(L4_8B, CHAT).capacity_qps())
    _, told = traffic(None, hourly(3.0), TrafficOptions(7.0, engine="l4-8b:512,100"), 30.0)
    assert told is not None
    assert told.capacity_qps == 7.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param("t4", "no profile 't4'", id="unknown"),
        pytest.param("l4-8b", "has no tokens; add those of a mean request: l4-8b:700,200", id="no tokens"),
        pytest.param("l4-8b:700", "mean tokens of prompts and responses", id="one number"),
        pytest.param("l4-8b:a,b", "mean tokens of prompts and responses", id="no number"),
        pytest.param("l4-8b:0,200", "mean tokens of prompts and responses", id="zero"),
    ],
)
def test_bad_words_are_refused(words: str, sentence: str) -> None:
    with pytest.raises(WrongUsage, match=sentence):
        traffic(None, hourly(3.0), TrafficOptions(engine=words), 30.0)
    with pytest.raises(WrongUsage, match="--requests"):
        traffic(None, None, TrafficOptions(engine=words), 30.0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(TrafficOptions(request_timeout="60s"), "is known with --engine", id="no engine"),
        pytest.param(
            TrafficOptions(engine="l4-8b:512,100", request_timeout="soon"),
            "takes a duration",
            id="no duration",
        ),
        pytest.param(
            TrafficOptions(engine="l4-8b:512,100", request_timeout="0s"), "from 1s to 24h", id="zero"
        ),
    ],
)
def test_a_bad_timeout_is_refused(words: TrafficOptions, sentence: str) -> None:
    with pytest.raises(WrongUsage, match=sentence):
        traffic(None, hourly(3.0), words, 30.0)


@pytest.mark.parametrize(
    ("in_file", "given", "weight"), [(3.0, None, 3.0), (3.0, 2.0, 2.0), (None, None, 1.0)]
)
def test_a_response_token_weighs_what_the_file_says(
    in_file: float | None, given: float | None, weight: float
) -> None:
    spec = ServiceSpec(
        "chat",
        "run",
        scaling=ScalingGoal(1, 30),
        slo=SloSpec(2000.0, capacity_qps=2.0, response_weight=in_file),
    )
    words = TrafficOptions(response_weight=given)
    arrivals = replace(hourly(3.0), tokens=TokenMeans((500.0,), (200.0,)))
    _, judged = traffic(spec, arrivals, words, 30.0)
    assert judged is not None
    assert judged.response_weight == weight
    _, judged = traffic(spec, hourly(3.0), TrafficOptions(), 30.0)
    assert judged is not None
    assert judged.response_weight is None


def test_the_timeout_arrives() -> None:
    _, judged = traffic(
        None, hourly(3.0), TrafficOptions(engine="l4-8b:512,100", request_timeout="100s"), 30.0
    )
    assert judged is not None
    assert judged.timeout_s == 100.0


def test_long_ticks_are_refused() -> None:
    with pytest.raises(WrongUsage, match="60s or less with --engine"):
        traffic(None, hourly(3.0), TrafficOptions(engine="l4-8b:512,100"), 120.0)
