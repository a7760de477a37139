"""When the lines of a log were written: an index beside its segments, for logs whose lines carry no time.

`times.START` belongs to the segment `log.START`. Each of its lines is a mark, "TIME OFFSET": the line of the log that begins
at OFFSET was written at TIME (UNIX seconds of this machine). There is one mark per PRECISION_S at most, so a line was written
less than PRECISION_S after the last mark before it. Each mark is one appended write, made before the bytes that it is about:
if the writer is killed between the two, later lines seem to be older than they are, and no line is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from provisioners.remote.host_agent.files import unix_now

PRECISION_S = 1.0


class LogTimes:
    """The writer of the index. `begin` a segment; before each write `mark` it, and then report what it `wrote`."""

    def __init__(self, folder: Path, now: Callable[[], float] = unix_now) -> None:
        self._folder = folder
        self._now = now
        self._file = -1
        self._marked_at = float("-inf")
        self._line_start: int | None = None

    def begin(self, start: int, oldest: int) -> None:
        """A segment begins at `start`; of those before `oldest` the index goes, as the segments did."""
        self.close()
        with suppress(OSError):
            for old, path in _files(self._folder):
                if old < oldest:
                    path.unlink()
            name = str(self._folder / f"times.{start:015d}")
            self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._marked_at = float("-inf")

    def mark(self, offset: int) -> None:
        """Something is about to be written at `offset`. A full disk costs marks, not lines."""
        now = self._now()
        if self._line_start is None:
            self._line_start = offset
        if self._file >= 0 and not 0 <= now - self._marked_at < PRECISION_S:
            with suppress(OSError):
                os.write(self._file, b"%.1f %d\n" % (now, self._line_start))
                self._marked_at = now

    def wrote(self, offset: int, data: bytes) -> None:
        """`data` was written at `offset`."""
        end = data.rfind(b"\n")
        if end >= 0:
            self._line_start = offset + end + 1

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_times(folder: Path, after: float, offset: int, most: int) -> bytes:
    """Return the first `most` marks later than `after` and not before `offset`."""
    found = b""
    for _, path in _files(folder):
        left = most - found.count(b"\n")
        if left <= 0:
            break
        with suppress(FileNotFoundError):  # the oldest may go while we look
            found += marks_in(path, after, offset, left)
    return found


def marks_in(path: Path, after: float, offset: int, most: int) -> bytes:
    """As `read_times`, of one file."""
    found: list[bytes] = []
    with path.open("rb") as file:
        for line in file:
            mark = mark_of(line)
            if mark is not None and mark[0] > after and mark[1] >= offset:
                found.append(line)
                if len(found) >= most:
                    break
    return b"".join(found)


def mark_of(line: bytes) -> tuple[float, int] | None:
    """Return the time and the offset of a mark; None if the line is damaged."""
    try:
        at, offset = line.split()
        return (float(at), int(offset)) if line.endswith(b"\n") else None
    except ValueError:
        return None


def offset_since(times: Callable[[float, int], bytes], since: float) -> int | None:
    """Return the offset of the first line written at `since` or later, or less than PRECISION_S before.

    -1 if the whole log is older, and None if it has no marks. `times(after, most)` reads marks.
    """
    marks = times(since - PRECISION_S, 1) or times(float("-inf"), 1)
    mark = mark_of(marks)
    if mark is None:
        return None
    return mark[1] if mark[0] > since - PRECISION_S else -1


def _files(folder: Path) -> list[tuple[int, Path]]:
    found = folder.glob("times.*")
    return sorted((int(path.suffix[1:]), path) for path in found if path.suffix[1:].isdigit())
