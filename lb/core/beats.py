"""Beats: what an agent reports to its peers a few times a second, as a frame of some 100 bytes. Pure.

A beat has no prompt, no key and no text of a request in it. Its `echo` names the newest beat that its sender has received and for
how long that was kept, which gives the receiver the round trip without comparing clocks.

A frame is the length of what follows, a kind, and that many bytes. What a later release appends to a beat is ignored, and so are frames
of a kind that is not known, so that agents of two releases understand each other. What this release appends are sections: a kind, the
number of bytes that follow, and these; one that is not known, or not whole, is skipped.
"""

from __future__ import annotations

import json
from functools import lru_cache
from struct import Struct, error, unpack_from
from typing import Any, NamedTuple

from lb.core.peers import MOST_CLASSES, ClassReport, RegionReport
from lb.core.shared_quota import Counters, Used
from policies.routing.cache_digest import Digest, Row

MAX_FRAME_BYTES = 2048
BEAT, USED, DIGEST = 1, 3, 4  # kinds of frames; 2 had fewer counters of each key
MOST_SILENT = 16  # agents that one beat names
_HEAD = Struct("!HB")  # bytes that follow, kind
_LINK = Struct(
    "!QQQQQdd"
)  # boot, seq, boot and seq of the echo, epoch, seconds to the next beat, for how long the echo was kept
_REPORT = Struct("!IIIdddBB")  # available, room, queued, three times, draining, agents that are silent
_TEXT = Struct("!B")  # bytes that follow
_SECTION = Struct("!BH")  # kind, bytes that follow
_CLASSES = 1  # the kind of the section of classes
_CLASS = Struct("!IIddd")  # available, waiting, three times
_MOST_COUNTED = 2**32 - 1
_MOST = 2**53
_LONGEST_S = 1e6
_LONGEST_NAME = 1100  # of a key with one of its models
_USED_BYTES = 1300  # of the rows in one frame
_AGE = Struct("!f")
_MARK = Struct("!I")
_MARKS = Struct("!H")  # marks that follow
_DIGEST_BYTES = 1600  # of the rows in one frame, and one more
_MOST_MARKS = 64  # in one row


class BeatError(ValueError):
    """A beat that cannot be understood."""


class Beat(NamedTuple):
    """One report. `boot` identifies the agent's process, `seq` orders the beats of one process.

    The next one comes after `every_s` at the latest. `echo` is the `seq` of the receiver's newest beat (0: none of this process), kept
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


def without_room(report: RegionReport) -> RegionReport:
    """Return what is left of a report on a link on which a certificate is not valid: that its agent lives, and whom it hears."""
    return RegionReport(0, 0, 0, 0.0, 0.0, 0.0, report.draining, "", report.silent)


class UsedReport(NamedTuple):
    """What an agent, of the process `boot`, has taken from the buckets of API keys (see `lb.core.shared_quota`)."""

    boot: int
    used: Used


def encode(beat: Beat, report: bytes | None = None) -> bytes:
    """Return the frame of a beat; `report` is what `encode_report` returns for its report."""
    if report is None:
        report = encode_report(beat.report)
    return (
        _HEAD.pack(_LINK.size + len(report), BEAT)
        + _LINK.pack(
            beat.boot,
            beat.seq,
            beat.echo_boot,
            beat.echo,
            beat.epoch,
            beat.every_s,
            min(beat.held_s, _LONGEST_S),
        )
        + report
    )


def encode_report(report: RegionReport) -> bytes:
    """Return the bytes of a report, which are the same for all peers."""
    silent = report.silent[:MOST_SILENT]
    return _REPORT.pack(
        min(report.available, _MOST_COUNTED),
        min(report.room, _MOST_COUNTED),
        min(report.queued, _MOST_COUNTED),
        min(report.wait_s, _LONGEST_S),
        min(report.s_per_byte, _LONGEST_S),
        min(report.decode_s, _LONGEST_S),
        report.draining,
        len(silent),
    ) + b"".join((*map(_encoded, (report.engine, *silent)), _encoded_classes(report.classes)))


def _encoded_classes(classes: tuple[ClassReport, ...]) -> bytes:
    if not classes:
        return b""
    rows = [
        _CLASS.pack(
            min(one.available, _MOST_COUNTED),
            min(one.waiting, _MOST_COUNTED),
            min(one.wait_s, _LONGEST_S),
            min(one.s_per_byte, _LONGEST_S),
            min(one.decode_s, _LONGEST_S),
        )
        for one in classes[:MOST_CLASSES]
    ]
    return _SECTION.pack(_CLASSES, _CLASS.size * len(rows)) + b"".join(rows)


def _encoded(text: str) -> bytes:
    data = text.encode()[:100]
    return _TEXT.pack(len(data)) + data


def frames(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Return the whole frames of the data by kind, and the beginning of the next one. Raises BeatError."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while len(data) - at >= _HEAD.size:
        size, kind = _HEAD.unpack_from(data, at)
        if size > MAX_FRAME_BYTES:
            raise BeatError(f"a frame of {size} bytes")
        start = at + _HEAD.size
        if len(data) < start + size:
            break
        at = start + size
        found.append((kind, data[start:at]))
    return found, data[at:]


def decode(kind: int, data: bytes) -> Beat | UsedReport | Digest | None:
    """Return what a frame reports: a beat, counters or a digest; None if its kind is not known. Raises BeatError."""
    if kind == BEAT:
        return _beat(data)
    if kind == DIGEST:
        return _digest(data)
    return _used(data) if kind == USED else None


def _beat(data: bytes) -> Beat:
    try:
        boot, seq, echo_boot, echo, epoch, every_s, held_s = _LINK.unpack_from(data)
        report = _report(data[_LINK.size :])
    except (error, UnicodeDecodeError):
        raise BeatError("a beat that is too short, or has text that is not UTF-8") from None
    _check_times(every_s, held_s)
    return Beat(boot, seq, every_s, report, echo_boot, echo, held_s, epoch)


@lru_cache(maxsize=64)
def _report(data: bytes) -> RegionReport:
    """Return a report, which idle peers repeat. Raises BeatError, and what `_beat` handles."""
    available, room, queued, wait_s, pace_s, decode_s, draining, silents = _REPORT.unpack_from(data)
    engine, at = _text_at(data, _REPORT.size)
    silent = []
    for _ in range(silents):
        name, at = _text_at(data, at)
        silent.append(name)
    _check_times(wait_s, pace_s, decode_s)
    return RegionReport(
        available,
        room,
        queued,
        wait_s,
        pace_s,
        decode_s,
        draining == 1,
        engine,
        tuple(silent),
        _classes(data, at),
    )


def _classes(data: bytes, at: int) -> tuple[ClassReport, ...]:
    """Return the classes among the sections from `at` on. Raises BeatError."""
    found: tuple[ClassReport, ...] = ()
    while len(data) - at >= _SECTION.size:
        kind, size = _SECTION.unpack_from(data, at)
        start = at + _SECTION.size
        at = start + size
        if at > len(data):
            break
        if kind == _CLASSES and size <= MOST_CLASSES * _CLASS.size and not size % _CLASS.size:
            found = tuple(ClassReport(*row) for row in _CLASS.iter_unpack(data[start:at]))
            for one in found:
                _check_times(one.wait_s, one.s_per_byte, one.decode_s)
    return found


def _check_times(*times_s: float) -> None:
    for seconds in times_s:
        if not 0.0 <= seconds <= _LONGEST_S:  # false for what is no number, too
            raise BeatError("a time that is not between 0 and a million seconds")


def _text_at(data: bytes, at: int) -> tuple[str, int]:
    """Return a text, and where the next one begins. Raises what `_beat` handles."""
    (size,) = _TEXT.unpack_from(data, at)
    end = at + 1 + size
    if end > len(data):
        raise error
    return data[at + 1 : end].decode(), end


def encode_used(boot: int, used: Used) -> bytes:
    """Return the frames of counters."""
    found, size = b"", 0
    rows: dict[str, Counters] = {}
    for key, counters in used.items():
        row = len(json.dumps(key)) + len(json.dumps(counters)) + 2
        if row > _USED_BYTES:
            continue  # the name of a key that no frame has room for: its limits hold for each agent
        if rows and size + row > _USED_BYTES:
            found += _used_frame(boot, rows)
            rows, size = {}, 0
        rows[key] = counters
        size += row
    return found + _used_frame(boot, rows) if rows else found


def _used_frame(boot: int, rows: Used) -> bytes:
    data = json.dumps({"boot": boot, "used": rows}, separators=(",", ":")).encode()
    return _HEAD.pack(len(data), USED) + data


def _used(data: bytes) -> UsedReport:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        raise BeatError("counters that are not JSON, or are nested too deeply") from None
    rows = fields.get("used") if isinstance(fields, dict) else None
    if not isinstance(rows, dict):
        raise BeatError("used: an object is expected")
    used = {}
    for key, row in rows.items():
        if not isinstance(row, list) or len(row) != len(Counters._fields) or len(key) > _LONGEST_NAME:
            raise BeatError(f"used: {len(Counters._fields)} numbers are expected for each key")
        used[key] = Counters(*(_integer(one, "used") for one in row))
    return UsedReport(_integer(fields.get("boot"), "boot"), used)


def encode_digest(digest: Digest) -> bytes:
    """Return the frames of a digest (see `policies.routing.cache_digest`)."""
    head = _AGE.pack(min(max(0.0, digest.age_s), _LONGEST_S))
    found, data = b"", b""
    for target_id, marks in digest.rows:
        for at in range(0, max(1, len(marks)), _MOST_MARKS):
            part = marks[at : at + _MOST_MARKS]
            data += _encoded(target_id) + _MARKS.pack(len(part)) + b"".join(map(_MARK.pack, part))
            if len(data) >= _DIGEST_BYTES:
                found, data = found + _HEAD.pack(len(head) + len(data), DIGEST) + head + data, b""
    return found + _HEAD.pack(len(head) + len(data), DIGEST) + head + data if data else found


def _digest(data: bytes) -> Digest:
    rows, at = [], _AGE.size
    try:
        (age_s,) = _AGE.unpack_from(data)
        while at < len(data):
            target_id, at = _text_at(data, at)
            (count,) = _MARKS.unpack_from(data, at)
            at += _MARKS.size
            rows.append(Row(target_id, unpack_from(f"!{count}I", data, at)))
            at += count * _MARK.size
    except (error, UnicodeDecodeError):
        raise BeatError("a digest that is not whole, or has text that is not UTF-8") from None
    _check_times(age_s)
    return Digest(age_s, tuple(rows))


def _integer(value: Any, key: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise BeatError(f"{key}: a whole number is expected")
    return value
