"""Beats as bytes, and what a link knows from them."""

from __future__ import annotations

import pytest

from lb.core.beats import Beat, BeatError, decode, encode
from lb.core.link_state import UNANSWERED_S, LinkState
from lb.core.peers import RegionReport

REPORT = RegionReport(3, 7, 2, 0.25, 0.0000123, 0.031)


def test_a_beat_survives_the_wire_and_is_small() -> None:
    beat = Beat(2**40, 123456, 0.25, REPORT, 2**41, 123400, 0.104, 7)
    line = encode(beat)
    assert decode(line) == beat
    assert len(line) <= 260


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{}",
        b'{"echo":[0,0,0]}',
        encode(Beat(1, 1, 0.25, REPORT)).replace(b'"queued":2', b'"queued":-2'),
        encode(Beat(1, 1, 0.25, REPORT)).replace(b'"wait":0.25', b'"wait":NaN'),
        encode(Beat(1, 1, 0.25, REPORT)).replace(b'"room":7', b'"room":true'),
        b" " * 3000,
    ],
)
def test_what_is_no_beat_is_refused(line: bytes) -> None:
    with pytest.raises(BeatError):
        decode(line)


def test_a_beat_of_a_later_release_is_understood() -> None:
    line = encode(Beat(1, 1, 0.25, REPORT)).replace(b'{"boot"', b'{"later":[1],"boot"')
    assert decode(line).report == REPORT


def pair(rtt_s: float, held_s: float, rounds: int = 3) -> tuple[LinkState, LinkState, float]:
    """Two agents that send beats in turn, `held_s` apart, over a way of `rtt_s / 2` each."""
    one, other = LinkState(11), LinkState(22)
    now = 100.0
    one.connected(now)
    other.connected(now)
    for _ in range(rounds):
        beat = one.next_beat(REPORT, 0.25, 0, now)
        now += rtt_s / 2
        other.heard(beat, now)
        now += held_s
        beat = other.next_beat(REPORT, 0.25, 0, now)
        now += rtt_s / 2
        one.heard(beat, now)
        now += held_s
    return one, other, now


def test_the_round_trip_is_known_without_a_common_clock() -> None:
    one, other, _ = pair(0.09, 0.1)
    assert one.rtt_s == pytest.approx(0.09)
    assert other.rtt_s == pytest.approx(0.09)


def test_beats_of_another_life_are_no_echo() -> None:
    one, other, now = pair(0.09, 0.1)
    again = LinkState(33)  # the first agent has been restarted
    again.connected(now)
    again.next_beat(REPORT, 0.25, 0, now)
    assert again.heard(other.next_beat(REPORT, 0.25, 0, now), now)
    assert again.rtt_s is None
    assert other.is_other_life(again.next_beat(REPORT, 0.25, 0, now))
    assert not other.is_other_life(one.next_beat(REPORT, 0.25, 0, now))


def test_an_older_beat_that_comes_late_is_passed_over() -> None:
    one, other = LinkState(1), LinkState(2)
    first, second = one.next_beat(REPORT, 0.25, 0, 1.0), one.next_beat(REPORT, 0.25, 0, 1.1)
    assert other.heard(second, 1.2)
    assert not other.heard(first, 1.3)
    assert other.silent_s(2.0) == pytest.approx(0.8)


def test_a_connection_whose_beats_get_no_echo_is_given_up_and_a_new_one_has_its_own_time() -> None:
    one, _, now = pair(0.09, 0.1)
    assert not one.unanswered(now)
    one.next_beat(REPORT, 0.25, 0, now)
    assert not one.unanswered(now + UNANSWERED_S)
    assert one.unanswered(now + UNANSWERED_S + 0.2)
    one.connected(now + 2.0)
    assert not one.unanswered(now + 5.0)  # nothing has been sent on it yet
    one.next_beat(REPORT, 0.25, 0, now + 5.0)
    assert not one.unanswered(now + 5.1)
    assert one.unanswered(now + 7.0)
