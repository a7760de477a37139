"""The report of a comparison of autoscalers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from policies.goals import ScalingGoal
from skyserve_cli.report.scaling_figures import binned, budget_used
from skyserve_cli.report.scaling_page import Comparison, write
from skyserve_cli.sim.forecasts import forecasts
from skyserve_cli.sim.scaling import STEPS, Evaluation, ScalingTrial, goal_for, run

GOAL = ScalingGoal(1, 100, 1.6)


def a_trial(known_min: int = 1500, evaluated_min: int = 700, attainment: float = 0.99) -> ScalingTrial:
    at = np.arange((known_min + evaluated_min) * STEPS)
    rate = 12.0 + 8.0 * np.sin(2 * np.pi * at / (1440 * STEPS))
    counts = np.random.RandomState(2).poisson(20.0 * rate)
    return ScalingTrial(tuple(counts.tolist()), known_min, 2.0, 300.0, attainment)


@pytest.fixture(scope="module")
def trial() -> ScalingTrial:
    return a_trial()


@pytest.fixture(scope="module")
def rows(trial: ScalingTrial) -> dict[str, list[Evaluation]]:
    names = ("predictive", "reactive:0.7", "reactive:0.9")
    return {name: [run(trial, name, goal_for(name, GOAL, trial))] for name in names}


def test_the_minutes_of_a_run_add_up_to_it(trial: ScalingTrial, rows: dict[str, list[Evaluation]]) -> None:
    (one,) = rows["predictive"]
    assert one.minutes.first == trial.known_min
    assert sum(one.minutes.asked) == one.requests
    assert sum(one.minutes.met) / one.requests == pytest.approx(one.attainment)
    assert max(one.minutes.ready) <= max(size for _, size in one.sizes)


def test_the_budget_ends_at_the_late_requests_over_those_allowed(rows: dict[str, list[Evaluation]]) -> None:
    (one,) = rows["reactive:0.9"]
    used = budget_used(one, 0.99)
    assert (np.diff(used) >= -1e-12).all()
    assert used[-1] == pytest.approx((1.0 - one.attainment) / 0.01)


def test_a_quantile_of_a_regular_service_covers_what_it_says(trial: ScalingTrial) -> None:
    found = forecasts(trial)
    assert found is not None
    assert found.covered(0.9) == pytest.approx(0.9, abs=0.08)
    assert found.covered(0.5) == pytest.approx(0.5, abs=0.15)
    lead = 5
    minutes = np.reshape(trial.counts, (-1, STEPS)).sum(axis=1)
    first = trial.known_min - 1 + lead
    assert (found.minutes[0], found.came[0]) == (first, minutes[first : first + 2].max())


def test_a_part_too_short_for_a_cold_start_has_no_forecast() -> None:
    assert forecasts(a_trial(evaluated_min=5)) is None


def test_bins_are_means_and_the_last_one_is_of_what_is_left() -> None:
    assert binned([1.0, 3.0, 5.0, 7.0, 10.0], 2).tolist() == [2.0, 6.0, 10.0]


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["html", "png"])
@pytest.mark.parametrize("seeds", [1, 2])
def test_the_same_comparison_makes_the_same_page(
    tmp_path: Path, trial: ScalingTrial, rows: dict[str, list[Evaluation]], suffix: str, seeds: int
) -> None:
    cells = [(name, "99 %") for name in rows]
    every = {name: judged * seeds for name, judged in rows.items()}
    shown = Comparison("a <recording>", "asked: 99 %", (("AUTOSCALER", "ATTAINMENT"), cells), every, trial, forecasts(trial))  # fmt: skip
    paths = [tmp_path / f"{number}.{suffix}" for number in range(2)]
    for path in paths:
        write(shown, path, command="serve simulate --autoscaler predictive")
    content = paths[0].read_bytes()
    if suffix == "png":  # the layout's solver may differ in the last bit, and so may the edges of letters
        once, again = (imread(path) for path in paths)
        assert once.shape == again.shape
        assert np.abs(once - again).mean() < 0.002
        return
    assert content == paths[1].read_bytes()
    page = content.decode()
    for words in ("Autoscalers on a &lt;recording&gt;", "Calibration of the forecast", "Error budget used", "reactive:0.9"):  # fmt: skip
        assert words in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_without_a_forecast_nothing_is_calibrated(
    tmp_path: Path, trial: ScalingTrial, rows: dict[str, list[Evaluation]]
) -> None:
    only = {"reactive:0.9": rows["reactive:0.9"]}
    shown = Comparison("r", "s", (("AUTOSCALER",), [("reactive:0.9",)]), only, trial, None)
    write(shown, tmp_path / "r.html", command="serve")
    assert "Calibration" not in (tmp_path / "r.html").read_text()
