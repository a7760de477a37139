"""A replica's log: one endless stream of bytes of which the newest part is kept.

It is cut into segments named by the offset of their first byte, so offsets stay true when old segments go.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from provisioners.remote.host_agent.lines import last_text_line
from provisioners.remote.host_agent.log_times import LogTimes

SEGMENT_BYTES = 32 * 1024 * 1024  # two are kept: at least 32 MiB of log, at most 64


class LogWriter:
    """Appends. `last_line` is the last line with words in it, for messages."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._offset = 0
        self._segment_end = 0
        self._fd = -1
        self._times = LogTimes(folder)
        self._tail = b""

    def write(self, data: bytes) -> None:
        while data:
            if self._offset == self._segment_end:
                self._next_segment()
            self._times.mark(self._offset)
            written = os.write(self._fd, data[: self._segment_end - self._offset])
            self._times.wrote(self._offset, data[:written])
            self._offset += written
            self._tail = (self._tail + data[:written])[-4096:]
            data = data[written:]

    @property
    def last_line(self) -> str:
        return last_text_line(self._tail)

    def _next_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        for _, old in log_segments(self._folder)[:-1]:
            old.unlink()
        path = self._folder / f"log.{self._offset:015d}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._segment_end = self._offset + self._segment_bytes
        self._times.begin(self._offset, log_segments(self._folder)[0][0])


def log_segments(folder: Path) -> list[tuple[int, Path]]:
    """(offset of the first byte, file), in order."""
    return sorted((int(path.name.partition(".")[2]), path) for path in folder.glob("log.*"))


def log_window(folder: Path) -> tuple[int, int]:
    """Return the first offset that is still kept, and the one after the last byte."""
    segments = log_segments(folder)
    if not segments:
        return 0, 0
    start, path = segments[-1]
    return segments[0][0], start + path.stat().st_size


def read_log(folder: Path, offset: int, max_bytes: int) -> bytes:
    """Up to `max_bytes` from `offset` on; from the oldest byte kept if that is later. Empty at the end."""
    for start, path in log_segments(folder):
        with suppress(FileNotFoundError), path.open("rb") as file:  # the oldest may go while we look
            size = os.fstat(file.fileno()).st_size
            if offset < start + size:
                file.seek(max(offset - start, 0))
                return file.read(max_bytes)
    return b""
