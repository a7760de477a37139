"""Response lengths that are learned from similar requests and from words."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.preserve.length_learner import BUCKETS, LengthLearner
from policies.routing.base import RequestView
from policies.routing.response_length import DEFAULT_TOKENS
from tests.kit.request_views import changed

TOPICS = {b"translate": 40, b"summarize": 90, b"implement": 400}


def asked(prompt: bytes | None = None, scope: str = "m", max_tokens: int = 0) -> RequestView:
    return RequestView("r", "POST", "/v1/completions", 100, prompt, scope=scope, max_tokens=max_tokens)


def a_prompt(rng: random.Random, topic: bytes) -> bytes:
    words = [b"please", topic, *(f"w{rng.randrange(300)}".encode() for _ in range(12))]
    rng.shuffle(words)
    return b" ".join(words)


def test_nothing_known_is_the_default_and_five_equal_ones_are_the_guess() -> None:
    learner = LengthLearner()
    assert learner.predict(asked()) == DEFAULT_TOKENS
    for _ in range(5):
        learner.learn(asked(b"hello"), 12)
    assert learner.predict(asked(b"hello")) == 12
    assert learner.predict(asked(b"hello", max_tokens=4)) == 4
    assert learner.predict(asked(scope="never heard of")) == 12


def test_words_tell_apart_what_the_median_cannot() -> None:
    rng, learner = random.Random(0), LengthLearner()
    for _ in range(2000):
        topic = rng.choice(sorted(TOPICS))
        learner.learn(asked(a_prompt(rng, topic)), round(TOPICS[topic] * rng.uniform(0.8, 1.2)))
    for topic, tokens in TOPICS.items():
        guesses = [learner.predict(asked(a_prompt(rng, topic))) for _ in range(50)]
        assert sum(guesses) / 50 == pytest.approx(tokens, rel=0.25)
    assert learner.predict(asked()) in range(60, 140)  # without a prompt: the median


def test_words_mean_what_they_mean_to_their_tenant() -> None:
    rng, learner = random.Random(0), LengthLearner()
    for _ in range(1500):
        for scope, factor in (("alice", 1), ("bob", 5)):
            topic = rng.choice(sorted(TOPICS))
            learner.learn(asked(a_prompt(rng, topic), scope), TOPICS[topic] * factor)
    for scope, factor in (("alice", 1), ("bob", 5)):
        guess = learner.predict(asked(a_prompt(rng, b"summarize"), scope))
        assert guess == pytest.approx(90 * factor, rel=0.25)


def test_the_size_of_a_prompt_counts_where_it_is_all_that_is_known() -> None:
    learner = LengthLearner()
    for _ in range(20):
        learner.learn(changed(asked(), body_bytes=100), 30)
        learner.learn(changed(asked(), body_bytes=9000), 300)
    assert learner.predict(changed(asked(), body_bytes=100)) == 30
    assert learner.predict(changed(asked(), body_bytes=9000)) == 300


def test_means_sum_up_to_what_came_and_medians_to_less() -> None:
    rng, learner = random.Random(1), LengthLearner()
    lengths = [round(rng.lognormvariate(4.5, 1.0)) for _ in range(3000)]
    typical, mean = 0.0, 0.0
    for tokens in lengths:
        typical += learner.predict(asked())
        mean += learner.mean(asked())
        learner.learn(asked(), tokens)
    assert typical < 0.75 * sum(lengths)
    assert mean == pytest.approx(sum(lengths), rel=0.1)


@given(st.lists(st.tuples(st.binary(max_size=3000), st.integers(0, 10**6)), max_size=30))
def test_any_bytes_and_any_length_give_a_guess(past: list[tuple[bytes, int]]) -> None:
    learner = LengthLearner()
    for prompt, tokens in past:
        learner.learn(asked(prompt), tokens)
        assert 1 <= learner.predict(asked(prompt)) <= 10**7
        assert learner.mean(asked(prompt)) >= 1.0


def test_memory_is_bounded_however_many_tenants_come() -> None:
    learner = LengthLearner(max_scopes=50)
    for number in range(400):
        learner.learn(asked(b"hello there", f"tenant {number}"), 50)
    assert len(learner._records) == 50
    assert len(learner._scopes._windows) == len(learner._sizes._windows) == 50
    assert sys.getsizeof(learner._weights) + sys.getsizeof(learner._squares) < 2 * 4 * BUCKETS + 1000
