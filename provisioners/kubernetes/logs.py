"""What Pods printed, by offset.

The API gives the lines of the last seconds, with the time of each. So the lines since the last one are fetched, and a minute
more, because clocks differ; those that are known are left out by their times. The last part of the log is kept here while someone reads
it. The kubelet rotates logs at 10 MiB and shows the last file only; a Pod that is gone has none.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from provisioners.kubernetes.quantities import unix_s

KEPT_BYTES = 4 * 1024**2
_AT_ONCE = 16  # logs that are kept
_FETCH_BYTES = 12 * 1024**2
_FRESH_S = 0.5

_SKEW_S = 60.0  # of the clocks of nodes

#: Reads the lines of so many last seconds (None: all), at most so many bytes.
Fetch = Callable[[int | None, int], bytes]


@dataclass(slots=True)
class _Log:
    kept: bytearray = field(default_factory=bytearray)
    first: int = 0  # the offset of the first kept byte
    last_time: str = ""
    marks: list[tuple[float, int]] = field(default_factory=list)  # when the line at that offset was written
    fetched_at: float = float("-inf")

    @property
    def end(self) -> int:
        return self.first + len(self.kept)

    def take(self, lines: bytes) -> None:
        """Take lines with their times; those that are known are left out."""
        newest = self.last_time
        for line in lines.splitlines(keepends=True):
            stamp, _, text = line.partition(b" ")
            time = stamp.decode(errors="replace")
            if self.last_time and _sortable(time) <= _sortable(self.last_time):
                continue
            at = unix_s(time)
            if at is not None and (not self.marks or at - self.marks[-1][0] >= 1.0):
                self.marks.append((at, self.end))
            self.kept += text
            newest = time
        self.last_time = newest
        if len(self.kept) > KEPT_BYTES:
            cut = self.kept.find(b"\n", len(self.kept) - KEPT_BYTES) + 1 or len(self.kept) - KEPT_BYTES
            del self.kept[:cut]
            self.first += cut
            self.marks = [mark for mark in self.marks if mark[1] >= self.first]


class PodLogs:
    """Thread-safe. Logs by the uid of their Pod."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._logs: OrderedDict[str, _Log] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, uid: str, fetch: Fetch, offset: int, most: int) -> bytes:
        log = self._fresh(uid, fetch)
        with self._lock:
            start = max(0, offset - log.first)
            return bytes(log.kept[start : start + most])

    def window(self, uid: str, fetch: Fetch) -> tuple[int, int]:
        log = self._fresh(uid, fetch)
        with self._lock:
            return log.first, log.end

    def times(self, uid: str, fetch: Fetch, after: float, offset: int, most: int) -> bytes:
        """As `host_agent.log_times` writes them."""
        log = self._fresh(uid, fetch)
        with self._lock:
            marks = [(at, start) for at, start in log.marks if at > after and start >= offset][:most]
        return b"".join(b"%.1f %d\n" % mark for mark in marks)

    def _fresh(self, uid: str, fetch: Fetch) -> _Log:
        with self._lock:
            log = self._logs.setdefault(uid, _Log())
            self._logs.move_to_end(uid)
            while len(self._logs) > _AT_ONCE:
                self._logs.popitem(last=False)
            is_fresh = self._now() - log.fetched_at < _FRESH_S
            last_at = unix_s(log.last_time)
        if is_fresh:
            return log
        seconds = None if last_at is None else math.ceil(max(0.0, self._now() - last_at) + _SKEW_S)
        lines = fetch(seconds, _FETCH_BYTES)
        with self._lock:
            log.take(lines)
            log.fetched_at = self._now()
        return log


def _sortable(time: str) -> str:
    """Return a timestamp whose fraction has nine digits: kubelets leave out zeros at the end."""
    whole, _, fraction = time.rstrip("Z").partition(".")
    return f"{whole}.{fraction:0<9}"
