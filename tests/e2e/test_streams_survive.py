"""Streams that go on although their replica is taken away: the same text as in an undisturbed round."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.chaos.harness import Stack
from benchmarks.chaos.service_files import service_yaml
from policies.goals import UpdateMode
from tests.e2e.survivors import questions, round_of, streams

pytestmark = pytest.mark.long

NAME = "saga"
REPLICAS = 3
TOKENS = 120
STREAMS = 12
DRAIN_TIMEOUT_S = 1.0  # far less than a stream needs
SPEED = 2.0
MOST_ROUNDS = 12
ASKED = questions(STREAMS, TOKENS)


def yaml(edition: int) -> str:
    """Replicas of the same model; another edition is another version of them."""
    plain = service_yaml(NAME, REPLICAS, speed=SPEED, drain_timeout_s=DRAIN_TIMEOUT_S)
    return f"{plain}envs: {{EDITION: '{edition}'}}\n"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        stack.up(yaml(1))
        yield stack


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[tuple[object, ...]]:
    stack.settled(NAME)
    said = round_of(stack.endpoint(NAME), ASKED)
    assert all(one[1:] == ("length", one[2], 1, True, "") for one in said), said
    assert len({one[0] for one in said}) == STREAMS, "each question has an answer of its own"
    return said


@pytest.mark.parametrize(
    ("notice_s", "metric"),
    [
        pytest.param(3.0, "skyserve_lb_handovers", id="with notice, handed over"),
        pytest.param(0.0, "skyserve_lb_continuations", id="without, continued"),
    ],
)
def test_a_preemption_changes_no_word(
    stack: Stack, undisturbed: list[tuple[object, ...]], notice_s: float, metric: str
) -> None:
    victim, *_ = stack.settled(NAME)
    before = stack.metric(NAME, metric)
    with streams(stack.endpoint(NAME), ASKED) as answers:
        busy = stack.stats(NAME)[str(victim)]["in_flight"]
        stack.preempt(NAME, victim, notice_s)
    assert busy > 0, "the victim had no stream: not the case to test"
    assert [answer.said for answer in answers] == undisturbed
    assert 1 <= stack.metric(NAME, metric) - before <= busy


def test_an_update_cuts_no_stream_however_long_it_runs(
    stack: Stack, undisturbed: list[tuple[object, ...]]
) -> None:
    old = set(stack.settled(NAME))
    before = stack.metric(NAME, "skyserve_lb_handovers")
    stack.update(yaml(2), UpdateMode.ROLLING)
    rounds = 0
    while old & {replica["id"] for replica in stack.replicas(NAME)} and rounds < MOST_ROUNDS:
        assert round_of(stack.endpoint(NAME), ASKED) == undisturbed
        rounds += 1
    assert not old & set(stack.settled(NAME))
    assert stack.metric(NAME, "skyserve_lb_handovers") > before, "no stream outlived a drain"
