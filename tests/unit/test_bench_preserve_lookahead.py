"""The look-ahead map against a model that writes out every request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.preserve.lookahead import HORIZON_SLOTS, SLOT_S, Expected, LookAhead

EXPECTED = st.builds(
    Expected,
    st.integers(0, 5000).map(float),
    st.integers(1, 600).map(float),
    st.sampled_from([0.01, 0.03, 0.1]),
)


@dataclass
class _Naive:
    since: float
    end: float
    expected: Expected

    def held(self, at: float) -> float:
        return self.expected.prompt_tokens + (at - self.since) / self.expected.s_per_token


class _NaiveMap:
    """A request leaves with the slot in which it is expected to end; who is late goes on for a fifth."""

    def __init__(self) -> None:
        self.stays: dict[str, _Naive] = {}

    def enter(self, name: str, expected: Expected, now: float) -> None:
        self.stays[name] = _Naive(now, now + expected.response_tokens * expected.s_per_token, expected)

    def advance(self, now: float) -> None:
        for stay in self.stays.values():
            if stay.end // SLOT_S < now // SLOT_S:
                stay.end = now + max(SLOT_S, 0.2 * (now - stay.since))

    def held(self, now: float) -> float:
        return sum(stay.held(now) for stay in self.stays.values())

    def coming(self, now: float) -> float:
        left = sum((stay.end - now) / stay.expected.s_per_token for stay in self.stays.values())
        return max(0.0, left)  # who is late within his slot counts below zero

    def peak(self, newcomer: Expected, now: float) -> float:
        new = _Naive(now, now + newcomer.response_tokens * newcomer.s_per_token, newcomer)
        everybody = [*self.stays.values(), new]
        first = int(now // SLOT_S)
        levels = [self.held(now) + newcomer.prompt_tokens]
        for slot in range(first, first + HORIZON_SLOTS):
            at = (slot + 1) * SLOT_S
            levels.append(sum(stay.held(at) for stay in everybody if stay.end // SLOT_S >= slot))
        return max(levels)


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef"), EXPECTED, st.floats(0.0, 3.0)), max_size=40),
    EXPECTED,
    st.sampled_from([0.0, 1e6]),
)
def test_it_agrees_with_a_map_that_writes_everything_out(
    events: list[tuple[bool, str, Expected, float]], newcomer: Expected, start: float
) -> None:
    ahead, naive, now = LookAhead(), _NaiveMap(), start
    for enters, name, expected, after in events:
        now += after
        ahead.advance(now)
        naive.advance(now)
        if enters:
            ahead.enter(name, expected, now)
            naive.enter(name, expected, now)
        else:
            ahead.leave(name)
            naive.stays.pop(name, None)
        assert len(ahead) == len(naive.stays)
        assert ahead.held_tokens(now) == pytest.approx(naive.held(now), abs=1e-3)
        assert ahead.remaining_tokens(now) == pytest.approx(naive.coming(now), abs=1e-3)
        peak = ahead.peak_tokens(newcomer, now)
        assert peak == pytest.approx(naive.peak(newcomer, now), abs=1e-3)
        most = ahead.held_tokens(now) + newcomer.prompt_tokens + ahead.max_growth(newcomer.s_per_token)
        assert most >= peak - 1e-3
    for name in "abcdef":
        ahead.leave(name)
    assert (ahead.held_tokens(now), ahead.remaining_tokens(now), len(ahead)) == (0.0, 0.0, 0)


def test_reading_changes_nothing() -> None:
    ahead = LookAhead()
    ahead.enter("r", Expected(100.0, 10.0, 0.03), 0.0)
    read = [(ahead.held_tokens(9.0), ahead.peak_tokens(Expected(1.0, 1.0, 0.03), 9.0)) for _ in range(3)]
    assert read[0] == read[1] == read[2]
    assert ahead.remaining_tokens(0.0) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("now", "coming"),
    [
        pytest.param(0.0, 100.0, id="at first all of it"),
        pytest.param(2.0, 33.3, id="less as it is written"),
        pytest.param(4.0, 26.7, id="late: a fifth of the 133 written"),
        pytest.param(60.0, 400.0, id="very late: a fifth of 2000"),
    ],
)
def test_who_is_late_is_given_a_fifth_more(now: float, coming: float) -> None:
    ahead = LookAhead()
    ahead.enter("r", Expected(50.0, 100.0, 0.03), 0.0)
    ahead.advance(now)
    assert ahead.remaining_tokens(now) == pytest.approx(coming, abs=0.1)


def test_who_is_about_to_leave_makes_room_in_the_peak() -> None:
    leaving, staying = LookAhead(), LookAhead()
    leaving.enter("r", Expected(8000.0, 10.0, 0.03), 0.0)
    staying.enter("r", Expected(8000.0, 500.0, 0.03), 0.0)
    newcomer = Expected(0.0, 400.0, 0.03)
    assert leaving.peak_tokens(newcomer, 0.0) < 8100 < staying.peak_tokens(newcomer, 0.0)
