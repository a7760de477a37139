"""What requests to a model cost is learned from those whose engine counts."""

from __future__ import annotations

import pytest

from lb.core.model_costs import BYTES_PER_TOKEN, MOST_MODELS, ModelCost, ModelCosts


def test_bytes_per_token_are_learned_from_reports() -> None:
    cost = ModelCost()
    assert cost.prompt_tokens(1000) == 1000 / BYTES_PER_TOKEN
    for _ in range(100):
        cost.read(3000, 1000)
    assert cost.prompt_tokens(3000) == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(("text_bytes", "tokens"), [(10, 5), (0, 100), (1000, 0)])
def test_short_prompts_and_reports_of_nothing_teach_nothing(text_bytes: int, tokens: int) -> None:
    cost = ModelCost()
    cost.read(text_bytes, tokens)
    assert cost.prompt_tokens(1000) == 250


def test_reports_that_cannot_be_of_the_text_are_bounded() -> None:
    cost = ModelCost()
    for _ in range(1000):
        cost.read(100, 10**9)
    assert cost.prompt_tokens(1000) <= 1000
    for _ in range(1000):
        cost.read(10**9, 1)
    assert cost.prompt_tokens(1000) >= 166


def test_the_pace_of_streams_tells_what_an_unread_response_has() -> None:
    cost = ModelCost()
    assert cost.generated(1.0) is None
    for _ in range(50):
        cost.wrote(2.0, 0.5, 150)  # a token every 10 ms, after half a second
    assert cost.generated(0.4) == 0
    assert cost.generated(1.5) == pytest.approx(100, abs=1)


def test_without_streams_the_mean_pace_is_taken() -> None:
    cost = ModelCost()
    cost.wrote(2.0, None, 7)  # too short to say something
    assert cost.generated(1.0) is None
    cost.wrote(2.0, None, 200)
    assert cost.generated(1.0) == 100


def test_models_beyond_the_most_share_one() -> None:
    costs = ModelCosts()
    own = [costs.served(f"m{number}") for number in range(MOST_MODELS)]
    assert len(set(map(id, own))) == MOST_MODELS
    assert costs.served("one more") is costs.served("another") is costs.of("a third")
    assert costs.of("m0") is own[0]


def test_a_name_that_no_engine_has_served_takes_no_room() -> None:
    costs = ModelCosts()
    for number in range(2 * MOST_MODELS):
        costs.of(f"made up {number}")
    assert costs.served("m") is costs.of("m") is not costs.of("made up 0")
