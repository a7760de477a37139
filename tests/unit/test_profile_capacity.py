"""From steps to a capacity with an interval, and which load comes next. Virtual time: what a load does is a function."""

from __future__ import annotations

import gzip
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyserve_cli.profile import prompts
from skyserve_cli.profile.capacity import Step, capacity, grouped, requests_to_be_sure, surely_too_high
from skyserve_cli.profile.prompts import LengthsError, Shape
from skyserve_cli.profile.ramp import is_climbing, next_load

KNEE = 3.7


def late_share(load: float) -> float:
    """5 % at KNEE, and steep around it."""
    return 1 / (1 + math.exp(-12 * math.log(load / KNEE) + math.log(19)))


def ramp(
    seed: int, first: float = 0.3, attainment: float = 0.95, share: Callable[[float], float] = late_share
) -> list[Step]:
    rng = random.Random(seed)
    steps: list[Step] = []
    while len(steps) < 60 and (load := next_load(steps, attainment, first)) is not None:
        requests = max(1, round(20 * load))
        steps.append(Step(load, requests, sum(rng.random() < share(load) for _ in range(requests))))
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_the_ramp_ends_by_itself_near_the_capacity(seed: int) -> None:
    steps = ramp(seed)
    found = capacity(steps, 0.95)
    assert len(steps) < 60
    assert found is not None
    assert found.confidence == "high"
    assert found.qps == pytest.approx(KNEE, rel=0.15)


def test_nine_of_ten_intervals_hold_the_capacity() -> None:
    held = 0
    for seed in range(100):
        found = capacity(ramp(seed)[:12], 0.95)
        assert found is not None
        held += found.low <= KNEE <= (found.high or math.inf)
    assert held >= 85


@pytest.mark.parametrize(
    ("steps", "qps", "low", "high"),
    [
        pytest.param([Step(1, 100, 0), Step(2, 100, 50)], 1.07, 1, 2, id="between the last in time and the first late"),
        pytest.param([Step(1, 100, 0), Step(2, 100, 0)], 2, 2, None, id="all in time: at least the highest"),
        pytest.param([Step(1, 10, 0), Step(2, 10, 9)], 1.04, 0, 2, id="too few in time to be sure of any load"),
        pytest.param([Step(1, 40, 0), Step(1.5, 40, 0), Step(2, 90, 80)], 1.52, 1, 2, id="groups count together"),
        pytest.param([Step(1, 100, 20), Step(2, 200, 0), Step(4, 90, 90)], 0, 0, 0, id="an outlier below counts too"),
        pytest.param([Step(1, 100, 2), Step(2, 200, 0), Step(4, 90, 90)], 2.06, 1, 4, id="unless it is small"),
    ],
)  # fmt: skip
def test_capacities(steps: list[Step], qps: float, low: float, high: float | None) -> None:
    found = capacity(steps, 0.95)
    if not qps:
        assert found is None
        return
    assert found is not None
    assert found.qps == pytest.approx(qps, abs=0.01)
    assert found.low == pytest.approx(low, abs=0.01) or found.low > low
    assert found.high == high
    assert found.beyond == (high is None)


def test_what_is_late_at_the_lowest_load_has_no_capacity() -> None:
    assert capacity([], 0.99) is None
    assert capacity([Step(1, 0, 0)], 0.99) is None
    assert capacity([Step(1, 50, 40), Step(2, 50, 50)], 0.99) is None


def test_loads_that_are_about_the_same_are_one() -> None:
    assert grouped([Step(1.0, 30, 3), Step(1.04, 10, 1), Step(1.2, 5, 0), Step(3, 0, 0)]) == [
        Step(pytest.approx(1.01), 40, 4),  # type: ignore[arg-type]
        Step(pytest.approx(1.2), 5, 0),  # type: ignore[arg-type]
    ]


def test_a_few_lucky_requests_do_not_hold_the_ramp_where_all_others_are_late() -> None:
    """A load that had three requests in time and is then always late is left for lower ones."""
    steps, loads = [Step(4.0, 3, 0), Step(4.76, 3, 0), Step(5.66, 9, 5), Step(8.0, 21, 19)], []
    while len(steps) < 12 and (load := next_load(steps, 0.9, 4.0)) is not None:
        loads.append(load)
        steps.append(Step(load, 20, 18 if load > 3.0 else 0))
    assert min(loads) < 3.0
    found = capacity(steps, 0.9)
    assert found is not None
    assert found.qps < 3.1


def test_a_server_that_is_never_in_time_ends_the_ramp() -> None:
    assert len(ramp(0, share=lambda _: 1.0)) < 60
    assert capacity(ramp(0, share=lambda _: 1.0), 0.95) is None


def test_a_server_that_is_always_in_time_ends_it_too() -> None:
    loads = list(itertools.accumulate(range(30), lambda load, _: 2 * load, initial=0.3))
    steps = [Step(load, 10, 0) for load in loads if load <= 100_000]
    assert next_load(steps[:5], 0.95, 0.3) == steps[5].load
    assert is_climbing(steps, 0.95)
    assert next_load(steps, 0.95, 0.3) is None


def test_how_many_requests_confirm_a_share() -> None:
    for attainment in (0.9, 0.95, 0.99, 0.999):
        enough = requests_to_be_sure(attainment)
        both = [Step(1.0, enough, 0), Step(2.0, 100, 100)]
        found, short = (
            capacity([both[0]._replace(requests=many), both[1]], attainment) for many in (enough, enough - 1)
        )
        assert found is not None
        assert short is not None
        assert (found.low, short.low) == (1.0, 0.0)


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 300), st.floats(0, 1)), max_size=12),
    st.floats(0.5, 0.999),
)
def test_the_estimate_is_inside_its_interval_and_within_the_loads_tried(
    drawn: list[tuple[float, int, float]], attainment: float
) -> None:
    steps = [Step(load, requests, round(share * requests)) for load, requests, share in drawn]
    found = capacity(steps, attainment)
    if found is None:
        return
    assert 0 <= found.low <= found.qps <= (found.high or math.inf)
    counted = [step.load for step in steps if step.requests]
    assert min(counted) * 0.999 <= found.qps <= max(counted) * 1.001
    load = next_load(steps, attainment, 1.0)
    assert load is None or load > 0


def test_no_late_request_is_never_surely_too_many() -> None:
    assert not surely_too_high(Step(1, 10_000, 0), 0.999)
    assert not surely_too_high(Step(1, 0, 0), 0.999)
    assert surely_too_high(Step(1, 10, 10), 0.5)


# --- requests -----------------------------------------------------------------------------------------------


def test_lengths_have_the_mean_that_was_asked_for_and_vary() -> None:
    shapes = list(itertools.islice(prompts.drawn(random.Random(1), 500, 200), 5000))
    assert fmean(one.prompt for one in shapes) == pytest.approx(500, rel=0.05)
    assert fmean(one.response for one in shapes) == pytest.approx(200, rel=0.05)
    assert max(one.prompt for one in shapes) <= 4000
    assert sum(one.response < 146 for one in shapes) == pytest.approx(2500, rel=0.1)


def test_no_prompt_begins_like_another() -> None:
    rng = random.Random(2)
    assert len({prompts.prompt(rng, 50)[:60] for _ in range(200)}) == 200
    assert len(prompts.prompt(rng, 50).split()) == 50


@pytest.mark.parametrize(
    "head",
    [
        "prompt_tokens,response_tokens",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "input_length,output_length",
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_recorded_lengths_come_again_and_again(tmp_path: Path, head: str, zipped: bool) -> None:
    first = "x," if head.startswith("TIME") else ""
    text = f"{head}\n{first}10,20\n{first}30,0\n"
    path = tmp_path / ("lengths.csv.gz" if zipped else "lengths.csv")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    found = list(itertools.islice(prompts.recorded(random.Random(0), path), 6))
    assert sorted(found) == [Shape(10, 20)] * 3 + [Shape(30, 1)] * 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2\n", "names no columns"),
        ("prompt_tokens,response_tokens\n", "no row"),
        ("prompt_tokens,response_tokens\n1,many\n", "no whole number"),
        ("prompt_tokens,response_tokens\n1\n", "no whole number"),
        ("", "names no columns"),
    ],
)
def test_lengths_that_cannot_be_read_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(LengthsError, match=complaint) as raised:
        prompts.recorded(random.Random(0), path)
    assert str(path) in str(raised.value)


def test_a_file_of_lengths_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(LengthsError, match=r"nothing\.csv"):
        prompts.recorded(random.Random(0), tmp_path / "nothing.csv")
