"""Beats as bytes, and what a link knows from them."""

from __future__ import annotations

from math import inf, nan
from struct import pack

import pytest

from lb.core.beats import BEAT, DIGEST, USED, Beat, BeatError, decode, encode, encode_digest, frames
from lb.core.link_state import ECHO_TIMEOUT_S, LinkState
from lb.core.peers import MOST_CLASSES, ClassReport, RegionReport
from policies.routing.cache_digest import Digest, Row

REPORT = RegionReport(3, 7, 2, 0.25, 0.0000123, 0.031)
CLASS = ClassReport(2, 1, 0.5, 0.0000123, 0.25)
UNLIKE = REPORT._replace(classes=(CLASS, CLASS._replace(available=0, s_per_byte=0.00001)))


def received(data: bytes) -> Beat:
    """The beat of a frame."""
    ((kind, frame),), rest = frames(data)
    found = decode(kind, frame)
    assert (rest, type(found)) == (b"", Beat)
    return found  # type: ignore[return-value]


def test_a_beat_survives_the_wire_and_is_small() -> None:
    report = REPORT._replace(engine="vllm", draining=True, silent=("cloud/eu#1", "cloud/asia#2"))
    for one in (REPORT, report, UNLIKE, report._replace(classes=UNLIKE.classes)):
        beat = Beat(2**40, 123456, 0.25, one, 2**41, 123400, 0.104, 7)
        assert received(encode(beat)) == beat
    assert len(encode(Beat(1, 1, 0.25, REPORT))) <= 110


@pytest.mark.parametrize("cut", range(0, 220, 7))
def test_frames_may_come_in_any_pieces(cut: int) -> None:
    data = encode(Beat(1, 1, 0.25, REPORT)) + encode(Beat(1, 2, 0.25, REPORT))
    first, rest = frames(data[:cut])
    second, end = frames(rest + data[cut:])
    assert [decode(*one).seq for one in first + second] == [1, 2]  # type: ignore[union-attr]
    assert end == b""


GOOD = frames(encode(Beat(1, 1, 0.25, REPORT)))[0][0][1]


def test_a_digest_survives_the_wire_in_frames_of_bounded_size() -> None:
    rows = (Row("7", tuple(range(2**32 - 1000, 2**32))), Row("8", ()), Row("9", (1, 2)))
    whole, rest = frames(encode_digest(Digest(0.5, rows)))
    assert (rest, len(whole)) == (b"", 3)
    found = [decode(kind, data) for kind, data in whole]
    assert all(isinstance(one, Digest) and one.age_s == 0.5 for one in found)
    read = [row for one in found if isinstance(one, Digest) for row in one.rows]
    assert [mark for row in read if row.target_id == "7" for mark in row.marks] == list(rows[0].marks)
    assert read[-2:] == [rows[1], rows[2]]
    assert encode_digest(Digest(0.0, ())) == b""


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\0\0", id="cut"),
        pytest.param(pack("!f", 0.0) + b"\x01", id="text that is not there"),
        pytest.param(pack("!f", 0.0) + b"\x01\xff\0\0", id="text that is not UTF-8"),
        pytest.param(pack("!f", 0.0) + b"\x017\0", id="a count that is cut"),
        pytest.param(pack("!f", 0.0) + b"\x017\xff\xff\0\0\0\x01", id="marks that are not there"),
        pytest.param(pack("!f", nan), id="not a number"),
    ],
)
def test_what_is_no_digest_is_refused(data: bytes) -> None:
    with pytest.raises(BeatError):
        decode(DIGEST, data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(GOOD[:40], id="cut"),
        pytest.param(GOOD[:-1] + b"\x05", id="text that is not there"),
        pytest.param(GOOD[:-1] + b"\x02\xff\xff", id="text that is not UTF-8"),
        pytest.param(GOOD[:40] + pack("!d", nan) + GOOD[48:], id="not a number"),
        pytest.param(GOOD[:40] + pack("!d", -1.0) + GOOD[48:], id="negative"),
        pytest.param(GOOD[:48] + pack("!d", inf) + GOOD[56:], id="infinite"),
    ],
)
def test_what_is_no_beat_is_refused(data: bytes) -> None:
    with pytest.raises(BeatError):
        decode(BEAT, data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"{", id="no JSON"),
        pytest.param(b"[" * 2000, id="nested deeply"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b'{"boot": 1, "used": {"alice": [1, 2]}}', id="too few numbers"),
    ],
)
def test_what_is_no_report_of_counters_is_refused(data: bytes) -> None:
    with pytest.raises(BeatError):
        decode(USED, data)


@pytest.mark.parametrize("data", [b"{}\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 3])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(BeatError):
        frames(data)


def test_a_beat_of_a_later_release_is_understood() -> None:
    assert decode(BEAT, GOOD + b"more") == Beat(1, 1, 0.25, REPORT)
    assert decode(77, b"news") is None
    later = encode(Beat(1, 1, 0.25, UNLIKE))[3:] + b"\x4d\x00\x03new"
    assert decode(BEAT, later) == Beat(1, 1, 0.25, UNLIKE), "a section that is not known is skipped"
    unknown_first = GOOD + b"\x4d\x00\x03new" + encode(Beat(1, 1, 0.25, UNLIKE))[3 + len(GOOD) :]
    assert decode(BEAT, unknown_first) == Beat(1, 1, 0.25, UNLIKE)


def test_a_release_without_classes_reads_the_beat_of_one_with_them() -> None:
    """What has been appended follows all that was there before, byte by byte."""
    assert encode(Beat(1, 1, 0.25, UNLIKE))[3:].startswith(GOOD)
    assert decode(BEAT, GOOD) == Beat(1, 1, 0.25, REPORT)


def test_classes_are_few_and_bounded() -> None:
    crowded = REPORT._replace(classes=(CLASS,) * 9)
    frame = encode(Beat(1, 1, 0.25, crowded))
    assert received(frame).report.classes == (CLASS,) * MOST_CLASSES
    assert len(frame) <= 250


@pytest.mark.parametrize("value", [nan, -1.0, inf])
def test_a_class_whose_times_are_none_is_refused(value: float) -> None:
    frame = encode(Beat(1, 1, 0.25, REPORT._replace(classes=(CLASS._replace(decode_s=0.5),))))
    with pytest.raises(BeatError):
        decode(BEAT, frame[3:-8] + pack("!d", value))


def test_a_section_of_classes_that_is_cut_or_of_another_size_is_skipped() -> None:
    whole = encode(Beat(1, 1, 0.25, UNLIKE))[3:]
    assert decode(BEAT, whole[:-1]) == Beat(1, 1, 0.25, REPORT)
    assert decode(BEAT, GOOD + b"\x01\x00\x03abc") == Beat(1, 1, 0.25, REPORT)


def pair(rtt_s: float, held_s: float, rounds: int = 3) -> tuple[LinkState, LinkState, float]:
    """Two agents that send beats in turn, `held_s` apart, over a way of `rtt_s / 2` each."""
    one, other = LinkState(11), LinkState(22)
    now = 100.0
    one.connected()
    other.connected()
    for _ in range(rounds):
        beat = one.next_beat(REPORT, 0.25, 0, now)
        now += rtt_s / 2
        other.receive(beat, now)
        now += held_s
        beat = other.next_beat(REPORT, 0.25, 0, now)
        now += rtt_s / 2
        one.receive(beat, now)
        now += held_s
    return one, other, now


def test_the_round_trip_is_known_without_a_common_clock() -> None:
    one, other, _ = pair(0.09, 0.1)
    assert one.rtt_s == pytest.approx(0.09)
    assert other.rtt_s == pytest.approx(0.09)


def test_beats_of_another_life_are_no_echo() -> None:
    one, other, now = pair(0.09, 0.1)
    again = LinkState(33)  # the first agent has been restarted
    again.connected()
    again.next_beat(REPORT, 0.25, 0, now)
    assert not again.is_restart(other.next_beat(REPORT, 0.25, 0, now))  # it has heard of no earlier life
    assert again.receive(other.next_beat(REPORT, 0.25, 0, now), now)
    assert again.rtt_s is None
    assert other.is_restart(again.next_beat(REPORT, 0.25, 0, now))
    assert not other.is_restart(one.next_beat(REPORT, 0.25, 0, now))


def test_an_older_beat_that_comes_late_is_passed_over() -> None:
    one, other = LinkState(1), LinkState(2)
    first, second = one.next_beat(REPORT, 0.25, 0, 1.0), one.next_beat(REPORT, 0.25, 0, 1.1)
    assert other.receive(second, 1.2)
    assert not other.receive(first, 1.3)
    assert other.silent_s(2.0) == pytest.approx(0.8)


def test_a_connection_whose_beats_get_no_echo_is_given_up_and_a_new_one_has_its_own_time() -> None:
    one, _, now = pair(0.09, 0.1)
    assert not one.is_half_open(now)
    one.next_beat(REPORT, 0.25, 0, now)
    assert not one.is_half_open(now + ECHO_TIMEOUT_S)
    assert one.is_half_open(now + ECHO_TIMEOUT_S + 0.2)
    one.connected()
    assert not one.is_half_open(now + 5.0)  # nothing has been sent on it yet
    one.next_beat(REPORT, 0.25, 0, now + 5.0)
    assert not one.is_half_open(now + 5.1)
    assert one.is_half_open(now + 7.0)
