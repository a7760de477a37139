"""Beats: what an agent reports to its peers a few times a second, as one line of JSON. Pure.

A beat has about 220 bytes. It has no prompt, no key and no text of a request in it. Its `echo` names the newest beat that its sender
has received and for how long that was kept, which gives the receiver the round trip without comparing clocks.
Unknown keys are ignored, so that agents of two releases understand each other.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, NamedTuple

from lb.core.peers import RegionReport

MAX_BEAT_BYTES = 2048
_MOST = 2**53


class BeatError(ValueError):
    """A beat that cannot be understood."""


class Beat(NamedTuple):
    """One report. `boot` distinguishes the lives of an agent, `seq` orders the beats of one life.

    The next one comes after `every_s` at the latest. `echo` is the `seq` of the receiver's newest beat (0: none of this life), kept
    for `held_s` seconds. `epoch` is that of the sender's ownership.
    """

    boot: int
    seq: int
    every_s: float
    report: RegionReport
    echo_boot: int = 0
    echo: int = 0
    held_s: float = 0.0
    epoch: int = 0


def encode(beat: Beat) -> bytes:
    """Return the line of a beat, with its end."""
    report = beat.report
    line = {
        "boot": beat.boot,
        "seq": beat.seq,
        "every": round(beat.every_s, 3),
        "echo": [beat.echo_boot, beat.echo, round(beat.held_s, 6)],
        "epoch": beat.epoch,
        "available": report.available,
        "room": report.room,
        "queued": report.queued,
        "wait": round(report.wait_s, 4),
        "pace": round(report.s_per_byte, 10),
        "decode": round(report.decode_s, 5),
        "draining": report.draining,
    }
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Beat:
    """Return the beat of a line. Raises BeatError."""
    if len(line) > MAX_BEAT_BYTES:
        raise BeatError(f"a beat of {len(line)} bytes")
    try:
        said = json.loads(line)
    except ValueError:
        raise BeatError("a beat that is not JSON") from None
    if not isinstance(said, dict):
        raise BeatError("a beat that is not an object")
    echo = said.get("echo")
    if not isinstance(echo, list) or len(echo) != 3:
        raise BeatError("echo: three values are expected")
    report = RegionReport(
        available=_whole(said.get("available"), "available"),
        room=_whole(said.get("room"), "room"),
        queued=_whole(said.get("queued"), "queued"),
        wait_s=_seconds(said.get("wait"), "wait"),
        s_per_byte=_seconds(said.get("pace"), "pace"),
        decode_s=_seconds(said.get("decode"), "decode"),
        draining=said.get("draining") is True,
    )
    return Beat(
        _whole(said.get("boot"), "boot"),
        _whole(said.get("seq"), "seq"),
        _seconds(said.get("every"), "every"),
        report,
        _whole(echo[0], "echo"),
        _whole(echo[1], "echo"),
        _seconds(echo[2], "echo"),
        _whole(said.get("epoch", 0), "epoch"),
    )


def _whole(value: Any, key: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise BeatError(f"{key}: a whole number is expected")
    return value


def _seconds(value: Any, key: str) -> float:
    if type(value) not in (int, float) or not isfinite(value) or not 0 <= value <= 1e6:
        raise BeatError(f"{key}: a number from 0 to a million is expected")
    return float(value)
