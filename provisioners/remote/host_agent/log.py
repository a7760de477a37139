"""The log of `setup` and `run`: one endless stream of bytes of which the newest part is kept.

It is cut into segments named by the offset of their first byte, so offsets stay true when old segments go. What the
scripts print comes through a named pipe, moved by a process of its own (`pump`), so that it can be bounded, and goes on
whichever other process of ours ends.
"""

from __future__ import annotations

import fcntl
import os
import termios
import time
from contextlib import suppress
from pathlib import Path

from provisioners.remote.host_agent.files import lock, uptime_s
from provisioners.remote.host_agent.lines import last_text_line
from provisioners.remote.host_agent.log_times import LogTimes

SEGMENT_BYTES = 32 * 1024 * 1024  # two are kept: at least 32 MiB of log, at most 64
LOCK = "log.lock"


def pipe_of(folder: Path) -> int:
    """Return a descriptor of the pipe, for reading and writing: so it has a reader, and no end, for as long as we live."""
    path = folder / "output"
    with suppress(FileExistsError):
        os.mkfifo(str(path), 0o600)
    return os.open(str(path), os.O_RDWR | os.O_CLOEXEC)


def pump(folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
    """Move what comes out of the pipe into the log until we are killed; nothing if another pump is at it."""
    held = lock(folder / LOCK)
    if held is None:
        return
    pipe = pipe_of(folder)
    offset, room, segment = log_window(folder)[1], 0, -1
    times = LogTimes(folder)
    while True:
        data = os.read(pipe, 65536)
        while data:
            try:
                if room == 0:
                    segment, room = next_segment(folder, offset, segment), segment_bytes
                    times.begin(offset, segments(folder)[0][0])
                times.mark(offset)
                written = os.write(segment, data[:room])
                times.wrote(offset, data[:written])
            except OSError:
                break  # a full disk costs log lines, not the replica
            offset, room, data = offset + written, room - written, data[written:]


def drain(folder: Path, timeout_s: float) -> None:
    """Wait until the pump, which may only be about to start, has emptied the pipe: the last lines are there to be read."""
    pipe = pipe_of(folder)
    until, empty = uptime_s() + timeout_s, 0
    while empty < 2 and uptime_s() < until:
        waiting = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
        empty = (
            empty + 1 if waiting == bytes(4) else 0
        )  # twice: what it has just taken it may not have written yet
        time.sleep(0.05)
    os.close(pipe)


def append_log(folder: Path, data: bytes) -> None:
    """Before there is a pump: what the steps of bringing up print is the beginning of the log."""
    held = lock(folder / LOCK)
    if held is not None:
        start, path = (segments(folder) or [(0, folder / f"log.{0:015d}")])[-1]
        times = LogTimes(folder)
        with suppress(OSError), path.open("ab") as file:
            offset = start + file.tell()
            times.begin(start, 0)
            times.mark(offset)
            file.write(data)
        times.close()
        os.close(held)


def next_segment(folder: Path, offset: int, last: int) -> int:
    if last >= 0:
        os.close(last)
    for _, old in segments(folder)[:-1]:
        old.unlink()
    name = str(folder / f"log.{offset:015d}")
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def segments(folder: Path) -> list[tuple[int, Path]]:
    """(offset of the first byte, file), in order."""
    return sorted((int(path.suffix[1:]), path) for path in folder.glob("log.*") if path.suffix[1:].isdigit())


def log_window(folder: Path) -> tuple[int, int]:
    """Return the first offset that is still kept, and the one after the last byte."""
    found = segments(folder)
    return (found[0][0], found[-1][0] + found[-1][1].stat().st_size) if found else (0, 0)


def read_log(folder: Path, offset: int, max_bytes: int) -> bytes:
    """Up to `max_bytes` from `offset` on; from the oldest byte kept if that is later. Empty at the end."""
    for start, path in segments(folder):
        with suppress(FileNotFoundError), path.open("rb") as file:  # the oldest may go while we look
            if offset < start + os.fstat(file.fileno()).st_size:
                file.seek(max(offset - start, 0))
                return file.read(max_bytes)
    return b""


def last_line(folder: Path) -> str:
    """Return the last line with words in it, for messages."""
    first, end = log_window(folder)
    return last_text_line(read_log(folder, max(first, end - 4096), 4096))
