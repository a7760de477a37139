"""What a response token weighs, from what a replica carries of requests of different lengths."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyserve_cli.commands.profile_text import sentence, view
from skyserve_cli.engine.profiles import A100_7B, L4_8B, Profile
from skyserve_cli.profile.capacity import Capacity
from skyserve_cli.profile.weights import LEAST, MOST, Carried, ResultError, carried_of, response_weight
from skyserve_cli.sim.latency import EngineTimes, Tokens

LONG, SHORT, USUAL = (2000.0, 50.0), (200.0, 400.0), (500.0, 200.0)


def carried(weight: float, *lengths: tuple[float, float]) -> list[Carried]:
    """Runs of a replica that carries 1,000 prompt tokens a second."""
    return [Carried(1000.0 / (prompt + weight * response), prompt, response) for prompt, response in lengths]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        pytest.param(carried(1.0, LONG, SHORT), 1.0, id="a token is a token"),
        pytest.param(carried(3.5, LONG, SHORT), 3.5, id="two runs"),
        pytest.param(carried(0.3, LONG, SHORT, USUAL), 0.3, id="three runs"),
        pytest.param(carried(500.0, LONG, SHORT), MOST, id="at most"),
        pytest.param(
            [Carried(1.0, *LONG), Carried(0.1, *SHORT)], MOST, id="prompts that seem to cost nothing"
        ),
        pytest.param([Carried(0.1, *LONG), Carried(9.0, *SHORT)], LEAST, id="nor responses"),
        pytest.param(carried(3.5, USUAL), None, id="one run"),
        pytest.param(carried(3.5, USUAL, (900.0, 380.0)), None, id="lengths that are alike"),
        pytest.param([], None, id="none"),
    ],
)
def test_the_weight_follows_from_runs_of_different_lengths(
    runs: list[Carried], expected: float | None
) -> None:
    assert response_weight(runs) == (expected and pytest.approx(expected))


@pytest.mark.parametrize(("profile", "least", "most"), [(A100_7B, 1.0, 1.3), (L4_8B, 2.7, 3.1)])
def test_engines_differ(profile: Profile, least: float, most: float) -> None:
    runs = [
        Carried(EngineTimes(profile, Tokens(*each)).capacity_qps(), *each) for each in (LONG, SHORT, USUAL)
    ]
    found = response_weight(runs)
    assert found is not None
    assert least < found < most


def test_a_result_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    result = {"capacity_qps": 1.5, "mean_prompt_tokens": 2000, "mean_response_tokens": 50}
    path.write_text(json.dumps(result))
    assert carried_of(path) == Carried(1.5, 2000.0, 50.0)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"capacity_qps": null, "mean_prompt_tokens": 1, "mean_response_tokens": 1}']
    + [
        f'{{"capacity_qps": {one}, "mean_prompt_tokens": 1, "mean_response_tokens": 1}}'
        for one in ("0", "NaN")
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "long.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=r"long\.json has no capacity"):
        carried_of(path)
    with pytest.raises(ResultError, match=r"cannot read .*other\.json: No such file"):
        carried_of(tmp_path / "other.json")


FOUND = Capacity(1000 / (200 + 2 * 400), 0.9, 1.1, beyond=False)


def measured(found: Capacity | None = FOUND) -> Any:
    """Ten requests of the SHORT length, as the sentences see them."""
    return SimpleNamespace(
        found=found, finished=10, prompt_tokens=2000, response_tokens=4000, stopped="precise", attainment=0.99,
        sent=10, took_s=60.0, steps=[], server=SimpleNamespace(base="http://x", model="m"),
        slo=SimpleNamespace(ttft_s=1.0, tpot_s=0.0),
    )  # fmt: skip


def test_the_result_says_what_to_write() -> None:
    others = carried(2.0, LONG)
    assert view(measured(), others)["response_weight"] == 2.0
    assert sentence(measured(), Path("chat.yaml"), others).splitlines()[-2:] == [
        "With 1 other run: a token of a response weighs 2 tokens of a prompt.",
        "To use it: serve update chat.yaml --set replica_policy.slo.response_weight=2",
    ]
    alike = carried(2.0, SHORT)
    assert view(measured(), alike)["response_weight"] is None
    assert (
        sentence(measured(), None, alike)
        .splitlines()[-1]
        .startswith("What a token of a response weighs is not known")
    )
    assert view(measured(), ())["response_weight"] is None
    assert view(measured(None), others)["response_weight"] is None
