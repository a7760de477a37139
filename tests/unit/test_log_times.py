"""When lines of a log were written: the index beside its segments."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioners.local.log import LogWriter
from provisioners.remote.host_agent.log_times import LogTimes, mark_of, offset_since, read_times
from skyserve_cli.commands.durations import instant
from skyserve_cli.output import WrongUsage


class Log:
    """A log in segments of a hundred bytes, with lines that say when they were written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.time = 1000.0
        self.end = self.segment = 0
        self.start()

    def start(self) -> None:
        """Also after the writer was killed."""
        self.times = LogTimes(self.folder, lambda: self.time)
        self.times.begin(self.segment, max(0, self.segment - 100))

    def write(self, data: bytes) -> None:
        if self.end - self.segment >= 100:
            self.segment = self.end
            self.times.begin(self.segment, self.segment - 100)
        self.times.mark(self.end)
        self.times.wrote(self.end, data)
        self.end += len(data)

    def since(self, at: float) -> int | None:
        return offset_since(lambda after, most: read_times(self.folder, after, 0, most), at)


def test_a_line_is_found_by_its_time_to_the_second(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(8):
        log.time = 1000.0 + 10 * number
        log.write(b"line %d\n" % number)
    assert log.since(0.0) == 0
    assert log.since(1030.0) == 3 * 7
    assert log.since(1025.0) == 3 * 7
    assert log.since(1030.9) == 3 * 7  # it may have been written that late
    assert log.since(1031.0) == 4 * 7
    assert log.since(2000.0) == -1


def test_no_line_is_left_out_whatever_the_rate(tmp_path: Path) -> None:
    log = Log(tmp_path)
    written = []
    for _ in range(19):
        log.time += 0.3
        written.append((log.time, log.end))
        log.write(b"x\n")
    for at, offset in written:
        found = log.since(at)
        assert found is not None
        assert found <= offset
        assert log.time - at < 1.3 or next(t for t, o in written if o == found) > at - 1.3


def test_a_line_that_is_written_in_pieces_is_found_whole(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(b"first\nsecond be")
    log.time += 5.0
    log.write(b"gins\nthird\n")
    assert log.since(1003.0) == len(b"first\n")


def test_marks_go_with_their_segments_and_a_killed_writer_goes_on(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(60):
        log.time += 5.0
        if number % 7 == 0:  # killed, once in the middle of a mark
            with next(iter(sorted(tmp_path.glob("times.*"), reverse=True))).open("ab") as file:
                file.write(b"" if number else b"12.\n")
            log.start()
        log.write(b"nine %04d\n" % number)
    assert len(list(tmp_path.glob("times.*"))) == 2
    for number in range(50, 60):
        assert log.since(1000.0 + 5.0 * (number + 1)) == 10 * number
    assert (log.since(0.0) or 0) >= 300  # what was dropped has no marks


def test_a_clock_that_is_set_back_hides_no_line(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.write(b"a\n")
    log.time -= 500.0
    log.write(b"b\n")
    assert log.since(499.0) == 0
    log.time += 1.0
    log.write(b"c\n")
    assert read_times(tmp_path, 500.5, 0, 10).count(b"\n") == 2


@pytest.mark.parametrize("line", [b"", b"12", b"12 ", b"12.0 3", b"x y\n", b"1.0 2 3\n"])
def test_damaged_marks_are_skipped(line: bytes) -> None:
    assert mark_of(line) is None
    assert mark_of(b"12.5 3\n") == (12.5, 3)


def test_a_log_without_marks_is_not_cut(tmp_path: Path) -> None:
    assert offset_since(lambda after, most: b"", 5.0) is None
    LogWriter(tmp_path).write(b"now\n")
    assert offset_since(lambda after, most: read_times(tmp_path, after, 0, most), 5.0) == 0
    assert offset_since(lambda after, most: read_times(tmp_path, after, 0, most), 1e12) == -1


def test_instants(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000.0  # 2027-01-15T08:00:00Z
    assert instant("--since", "10m", now) == now - 600.0
    assert instant("--since", "90", now) == now - 90.0
    assert instant("--since", "2027-01-15T07:00:00+00:00", now) == now - 3600.0
    today = instant("--since", "00:00", now)
    assert 0 <= now - today < 86400.0
    assert instant("--since", "00:00:30", now) == today + 30.0
    with pytest.raises(WrongUsage, match="--since takes a duration"):
        instant("--since", "yesterday", now)
