"""Seconds per byte of prompt, learned from responses: exact where it can be, steady where it must be."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.routing.prefill_rate import FIRST, PrefillRate

PRIOR = 2.5e-5
TRUE = 1e-4
CONSTANT_S = 0.15


def taught(answers: list[tuple[float, float]], now: float = 0.0, doubt: float = 0.0) -> PrefillRate:
    rate = PrefillRate(doubt)
    for work_bytes, first_byte_s in answers:
        rate.learn(work_bytes, first_byte_s, PRIOR, now)
    return rate


def on_the_line(
    rng: Random, count: int, slope: float = TRUE, noise_s: float = 0.0
) -> list[tuple[float, float]]:
    works = [rng.uniform(500, 12_000) for _ in range(count)]
    return [(work, CONSTANT_S + slope * work + rng.gauss(0, noise_s)) for work in works]


@pytest.mark.parametrize("count", [0, 1, FIRST - 1])
def test_a_few_answers_are_not_believed(count: int) -> None:
    assert taught(on_the_line(Random(0), count)).s_per_byte(PRIOR, 0.0) == PRIOR


@pytest.mark.parametrize("noise_s", [0.0, 0.03])
def test_a_line_is_found(noise_s: float) -> None:
    rate = taught(on_the_line(Random(1), 100, noise_s=noise_s))
    assert rate.s_per_byte(PRIOR, 0.0) == pytest.approx(TRUE, rel=0.1)


def test_prompts_of_one_size_teach_nothing() -> None:
    assert taught([(4000.0, 0.9)] * 50).s_per_byte(PRIOR, 0.0) == pytest.approx(PRIOR)


@pytest.mark.parametrize("at", [0, 3, FIRST - 1, FIRST, 40], ids="outlier at {}".format)
def test_one_wild_answer_moves_little(at: int) -> None:
    """Twenty seconds for a prompt that takes one: a compilation, a lost packet, a paused machine."""
    answers = on_the_line(Random(2), 60, noise_s=0.01)
    answers[at] = (answers[at][0], 20.0)
    for count in range(max(at + 1, FIRST), 60):
        assert taught(answers[:count]).s_per_byte(PRIOR, 0.0) == pytest.approx(TRUE, rel=0.35)


def test_a_lasting_change_is_believed() -> None:
    rng = Random(3)
    rate = taught(on_the_line(rng, 100, slope=TRUE) + on_the_line(rng, 300, slope=4 * TRUE))
    assert rate.s_per_byte(PRIOR, 0.0) == pytest.approx(4 * TRUE, rel=0.15)


def test_what_was_learned_fades_to_the_prior() -> None:
    rate = taught(on_the_line(Random(4), 100), now=1000.0)
    seen = [rate.s_per_byte(PRIOR, 1000.0 + age_s) for age_s in (0, 60, 300, 600, 3600)]
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == pytest.approx(TRUE, rel=0.05)
    assert seen[-1] == pytest.approx(PRIOR, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_taken_for_speed(seed: int) -> None:
    """40 responses like the prior's line, half a second off: without doubt the slope would be anything."""
    answers = on_the_line(Random(seed), 40, slope=PRIOR, noise_s=0.3)
    assert taught(answers, doubt=3.0).s_per_byte(PRIOR, 0.0) == PRIOR
    assert taught(answers, doubt=0.0).s_per_byte(PRIOR, 0.0) != PRIOR


def test_a_clear_difference_is_believed_but_for_the_doubt() -> None:
    doubted = taught(on_the_line(Random(6), 100, noise_s=0.03), doubt=3.0).s_per_byte(PRIOR, 0.0)
    believed = taught(on_the_line(Random(6), 100, noise_s=0.03)).s_per_byte(PRIOR, 0.0)
    assert 0.85 * believed < doubted < believed


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1e4)), max_size=60))
def test_it_is_always_positive(answers: list[tuple[float, float]]) -> None:
    assert taught(answers).s_per_byte(PRIOR, 0.0) > 0.0
