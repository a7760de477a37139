"""Work: what tokens and requests weigh, and what each minute asked for."""

from __future__ import annotations

import json
import math
from itertools import repeat

import numpy as np
import pytest

from policies.forecast import work
from policies.forecast.demand import Floats
from policies.history import History, Load
from policies.model import Json
from tests.kit.histories import history_of

KIND = "L4:1@1"
USUAL = [500.0, 200.0]


def minutes(
    requests: Floats, prompt: Floats | float, response: Floats | float, late: Floats | float = 0.0
) -> History:
    """Requests by minute, and the mean tokens of one of them."""
    tokens = (requests * prompt).tolist(), (requests * response).tolist()
    return history_of(0, requests.tolist(), (requests * (1.0 - late)).tolist(), None, tokens)


def counted(history: History, of: work.Weights) -> list[float]:
    return work.work(history, np.frombuffer(history.requests), of).tolist()  # type: ignore[no-any-return]


def taught(true: tuple[float, float, float], seed: int = 0, length: int = 2000) -> Json:
    """The memory after minutes of a fleet in which requests run as long as `true` says: (per request, prompt token, response token)."""
    rng = np.random.RandomState(seed)
    memory: Json = {"usual": USUAL, "minutes": work.USUAL_MIN}
    for _ in range(length):
        requests = float(rng.randint(200, 2000))
        prompt, response = USUAL * rng.uniform(0.6, 1.4, 2)
        seconds = true[0] + true[1] * prompt + true[2] * response
        history = minutes(np.array([requests]), prompt, response)
        load = Load(ongoing=requests * seconds / 60.0 * rng.uniform(0.9, 1.1) + 7, queued=7, known=True)
        memory = work.learn(memory, history, [KIND], load)
    return memory


@pytest.mark.parametrize(
    "true",
    [(0.0, 1e-3, 1e-3), (0.0, 1e-3, 2e-3), (0.0, 1e-3, 5e-4), (0.5, 1e-3, 1e-3)],
)
def test_the_weights_of_a_fleet_are_found_from_how_many_requests_run(
    true: tuple[float, float, float],
) -> None:
    found = work.weights(taught(true)["kinds"], KIND, USUAL)
    usual_s = true[0] + true[1] * USUAL[0] + true[2] * USUAL[1]
    for weight, seconds, size in zip(found, true, (1.0, *USUAL), strict=True):
        assert weight * size == pytest.approx(seconds * size / usual_s, abs=0.04)
    assert found.request + found.prompt * USUAL[0] + found.response * USUAL[1] == pytest.approx(1.0)


@pytest.mark.parametrize(("true", "ratio"), [((0.0, 0.0, 2e-2), 4.0), ((0.0, 1e-3, 0.0), 0.25)])
def test_a_response_token_weighs_at_most_four_times_the_prior(
    true: tuple[float, float, float], ratio: float
) -> None:
    found = work.weights(taught(true)["kinds"], KIND, USUAL)
    assert found.response / found.prompt == pytest.approx(ratio)
    assert found.request + found.prompt * USUAL[0] + found.response * USUAL[1] == pytest.approx(1.0)


def test_the_prior_is_that_a_token_is_a_token() -> None:
    assert work.weights({}, KIND, USUAL) == pytest.approx((0.0, 1 / 700, 1 / 700))
    assert work.weights({}, KIND, [500.0, 0.0]) == pytest.approx((0.0, 1 / 501, 1 / 501)), "embeddings"


def test_the_prior_is_what_the_file_says() -> None:
    history = minutes(np.full(900, 100.0), 500.0, 200.0)
    _, prompt, response = work.refresh({}, history, [KIND], 3.0)["weights"]
    assert (500 * prompt + 200 * response, response / prompt) == pytest.approx((1.0, 3.0))
    learned = taught((0.0, 0.0, 2e-2))["kinds"]
    found = work.weights(learned, KIND, USUAL, 3.0)
    assert found.response / found.prompt == pytest.approx(12.0), "at most four times the prior"


def test_a_new_version_starts_from_the_newest_and_another_accelerator_from_the_prior() -> None:
    known = taught((0.0, 1e-3, 4e-3))["kinds"]
    assert work.weights(known, "L4:1@2", USUAL) == work.weights(known, KIND, USUAL)
    assert work.weights(known, "H100:1@2", USUAL) == work.weights({}, KIND, USUAL)


def test_memory_is_small_json_and_keeps_the_kinds_taught_last() -> None:
    memory, history = taught((0.0, 1e-3, 1e-3), length=3), minutes(np.array([100.0]), 500.0, 200.0)
    for version in range(2, 9):
        memory = work.learn(memory, history, [f"L4:1@{version}"], Load(ongoing=9.0))
    assert list(memory["kinds"]) == [f"L4:1@{version}" for version in range(5, 9)]
    assert json.loads(json.dumps(memory)) == memory
    assert len(json.dumps(memory)) < 1000


@pytest.mark.parametrize(
    ("history", "load"),
    [
        pytest.param(minutes(np.array([5.0]), 500.0, 200.0), Load(ongoing=9.0), id="too few requests"),
        pytest.param(minutes(np.array([100.0]), 500.0, 200.0, 0.2), Load(ongoing=9.0), id="many late"),
        pytest.param(minutes(np.array([100.0]), 0.0, 0.0), Load(ongoing=9.0), id="no tokens"),
        pytest.param(minutes(np.array([math.nan]), 1.0, 1.0), Load(ongoing=9.0), id="not reported"),
        pytest.param(minutes(np.array([100.0]), 1.0, 1.0), Load(ongoing=9.0, queued=9), id="none runs"),
        pytest.param(history_of(0, [100.0], [100.0]), Load(ongoing=9.0), id="tokens are not known"),
    ],
)
def test_such_a_minute_teaches_no_weights(history: History, load: Load) -> None:
    memory = {"usual": USUAL}
    assert work.learn(memory, history, [KIND], load) == memory


def test_weights_in_use_change_only_by_what_matters_and_the_usual_size_stays() -> None:
    history = minutes(np.full(work.USUAL_MIN, 100.0), *USUAL)
    first = work.refresh({}, history, [KIND])
    assert (first["usual"], first["minutes"]) == (USUAL, work.USUAL_MIN)
    learned = {**first, "kinds": taught((0.0, 1e-3, 1.02e-3))["kinds"]}
    assert work.refresh(learned, history, [KIND])["weights"] == first["weights"]
    other = {**first, "kinds": taught((0.0, 1e-3, 4e-3))["kinds"]}
    heavier = minutes(np.full(work.USUAL_MIN, 100.0), 5000.0, 900.0)
    after = work.refresh(other, heavier, [KIND])
    assert after["usual"] == USUAL
    assert after["weights"][2] > 3.0 * after["weights"][1]


def test_a_service_without_tokens_is_counted_by_requests() -> None:
    assert work.refresh({}, minutes(np.full(9, 100.0), 0.0, 0.0), [KIND]) == {}
    assert work.refresh({"weights": [0.0, 1.0, 1.0]}, history_of(0, [1.0], [1.0]), [KIND]) == {}
    assert work.in_use({}) is None


# --- the work of a minute -----------------------------------------------------------------------------------

HALVES = work.Weights(0.0, 0.5 / USUAL[0], 0.5 / USUAL[1])


def test_usual_requests_are_one_each_and_longer_ones_more() -> None:
    requests = np.full(40, 10_000.0)
    factor = np.repeat([1.0, 2.0], 20)
    found = counted(minutes(requests, USUAL[0] * factor, USUAL[1] * factor), HALVES)
    assert found[:20] == pytest.approx([10_000.0] * 20)
    assert found[20] == pytest.approx(20_000.0, rel=0.05), "at once, where a minute has many requests"
    assert found[-1] == pytest.approx(20_000.0, rel=0.01)


def test_a_single_long_request_of_a_quiet_service_is_luck() -> None:
    requests = np.full(20, 2.0)
    factor = np.array([*repeat(1.0, 19), 20.0])
    assert counted(minutes(requests, USUAL[0] * factor, USUAL[1]), HALVES)[-1] < 2.0 * 1.6


@pytest.mark.parametrize(
    ("tokens", "late", "size"),
    [
        pytest.param(0.0, 0.0, 2.0, id="no request ended"),
        pytest.param(0.2, 0.5, 2.0, id="few ended, as many are late"),
        pytest.param(0.2, 0.0, 0.4, id="they are short"),
        pytest.param(3.0, 0.5, 6.0, id="longer ones are why they are late"),
    ],
)
def test_tokens_that_are_missing_make_no_request_small(tokens: float, late: float, size: float) -> None:
    requests = np.full(60, 100_000.0)
    factor = 2.0 * np.repeat([1.0, tokens], 30)
    history = minutes(requests, USUAL[0] * factor, USUAL[1] * factor, np.repeat([0.0, late], 30))
    assert counted(history, HALVES)[-1] == pytest.approx(size * 100_000.0, rel=0.01)


def test_minutes_from_before_tokens_were_known_are_usual_and_missing_ones_stay_missing() -> None:
    requests = np.array([100.0, math.nan, 100.0, 100.0])
    found = counted(minutes(requests, np.array([0.0, 0.0, 0.0, 1500.0]), 0.0), work.Weights(0.2, 1 / 625, 0))
    assert found[:3] == pytest.approx([100.0, math.nan, 100.0], nan_ok=True)
    assert found[3] > 100.0


def test_what_is_known_does_not_depend_on_what_comes() -> None:
    rng = np.random.RandomState(3)
    history = minutes(rng.uniform(0, 900, 90).round(), rng.uniform(0, 900, 90), rng.uniform(0, 900, 90))
    whole = counted(history, HALVES)
    assert counted(history.until(50), HALVES) == whole[:50]


def test_the_work_of_a_minute_does_not_depend_on_how_far_back_is_known() -> None:
    rng = np.random.RandomState(3)
    requests, prompt, response = rng.uniform(100, 900, (3, 90)).round()
    whole, later = (minutes(requests[at:], prompt[at:], response[at:]) for at in (0, 20))
    assert counted(whole, HALVES)[20 + work.SIZE_MIN :] == counted(later, HALVES)[work.SIZE_MIN :], (
        "to the last bit, or each minute's forecast would be fitted again"
    )
