"""The explanations of the last requests."""

from __future__ import annotations

import pytest

from lb.observe.explain import Explanation, Explanations
from policies.routing.base import Choice

CHOICE = Choice(
    "a",
    "fewest in flight",
    ("in_flight", "trouble"),
    (("a", 1.0, 1, 0.0), ("b", 2.5, 2, 0.5)),
    matched_bytes=64,
)


def test_a_story_tells_each_step_its_time_and_the_terms_of_every_candidate() -> None:
    explanations = Explanations()
    story = explanations.begin("r1", "POST", "/v1/chat", 10.0)
    story.note(10.25, "held", why="no target can take it")
    story.note(11.0, "chose", "a", CHOICE.because, CHOICE)
    assert story.to_json() == {
        "request_id": "r1",
        "method": "POST",
        "path": "/v1/chat",
        "steps": [
            {
                "after_s": 0.25,
                "event": "held",
                "target": None,
                "why": "no target can take it",
                "matched_bytes": 0,
                "candidates": [],
            },
            {
                "after_s": 1.0,
                "event": "chose",
                "target": "a",
                "why": "fewest in flight",
                "matched_bytes": 64,
                "candidates": [
                    {"target": "a", "cost": 1.0, "terms": {"in_flight": 1, "trouble": 0.0}},
                    {"target": "b", "cost": 2.5, "terms": {"in_flight": 2, "trouble": 0.5}},
                ],
            },
        ],
    }


def test_a_choice_without_terms_has_candidates_without_them() -> None:
    story = Explanations().begin("r1", "GET", "/", 0.0)
    story.note(0.0, "chose", "a", "its turn", Choice("a", "its turn", (), (("a", 0.0), ("b", 1.0))))
    (step,) = story.to_json()["steps"]
    assert step["candidates"] == [
        {"target": "a", "cost": 0.0, "terms": {}}, {"target": "b", "cost": 1.0, "terms": {}},
    ]  # fmt: skip


@pytest.mark.parametrize("count", [11, 16, 1000])
def test_of_many_candidates_the_ten_best_are_told_and_the_chosen_one(count: int) -> None:
    rows = tuple((f"t{number}", float(number % 100)) for number in range(count))
    chosen = rows[-1][0]
    story = Explanations().begin("r1", "GET", "/", 0.0)
    story.note(0.0, "chose", chosen, "", Choice(chosen, "", (), (*rows[:-1], (chosen, 0.0))))
    (step,) = story.to_json()["steps"]
    assert step["candidates"][0] == {"target": chosen, "cost": 0.0, "terms": {}}
    costs = [one["cost"] for one in step["candidates"]]
    assert len(costs) == 10
    assert costs == sorted([0.0, *(cost for _, cost in rows[:-1])])[:10]


def test_a_long_one_is_found_while_it_runs_and_after_its_end() -> None:
    running: list[Explanation] = []
    explanations = Explanations(kept=2, running=lambda: running)
    long = explanations.begin("long", "POST", "/", 0.0)
    running.append(long)
    for number in range(3):
        short = explanations.begin(f"r{number}", "GET", "/", 1.0)
        explanations.ended(short)
    assert explanations.find("long") is long
    running.clear()
    assert explanations.find("long") is None
    explanations.ended(long)
    explanations.ended(long)
    assert explanations.find("long") is long
    assert [story.request_id for story in explanations.latest(9)] == ["long", "r2"]


def test_only_the_last_ones_are_kept() -> None:
    explanations = Explanations(kept=3)
    for number in range(5):
        explanations.begin(f"r{number}", "GET", "/", 0.0)
    assert [explanations.find(f"r{number}") is not None for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert [story.request_id for story in explanations.latest(10)] == ["r4", "r3", "r2"]
    assert [story.request_id for story in explanations.latest(1)] == ["r4"]


def test_of_a_repeated_id_the_latest_is_found() -> None:
    explanations = Explanations()
    explanations.begin("same", "GET", "/first", 0.0)
    explanations.begin("same", "GET", "/second", 1.0)
    found = explanations.find("same")
    assert found is not None
    assert found.path == "/second"


def test_a_story_is_found_while_it_goes_on() -> None:
    explanations = Explanations()
    story = explanations.begin("r1", "GET", "/", 0.0)
    assert explanations.find("r1") is story
    assert explanations.find("r2") is None
