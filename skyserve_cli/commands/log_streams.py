"""Logs as they grow: whole lines of several replicas behind their ids, and the last line of each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from provisioners.remote.host_agent.lines import last_text_line
from skyserve_cli.controller.api.client import AWAY, RefusedError

TAIL_BYTES = 4096
EVERY_S = 2.0  # on a cloud each read is a request to the replica's machine

#: Content of a log from an offset on, and the offset after it; no content at the end. See `Client.log`.
Read = Callable[[str, int], tuple[bytes, int]]


class PrefixedLog:
    """One log as lines behind a prefix. A line is returned once it is complete, so that logs do not mix within one."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = b""

    def feed(self, content: bytes) -> list[bytes]:
        """Return the lines that `content` completes, each with its prefix and its newline."""
        *whole, self._rest = (self._rest + content).split(b"\n")
        return [self._prefix + line + b"\n" for line in whole]

    def finish(self) -> list[bytes]:
        """The last line if it has no newline."""
        rest, self._rest = self._rest, b""
        return [self._prefix + rest + b"\n"] if rest else []


class Growing:
    """The logs of a changing set of replicas. `unread` is why some could not be read at the last step, by replica."""

    def __init__(self, read: Read, name: str, node: int) -> None:
        self._read = read
        self._name = name
        self._node = node
        self._logs: dict[int, tuple[PrefixedLog, int]] = {}
        self.unread: dict[int, str] = {}

    def step(self, live: Iterable[int], *, tail: int | None = None) -> list[bytes]:
        """Return the new lines of all logs, replica after replica, of those that have terminated for the last time.

        Of a log that was not read before, only the last `tail` lines.
        """
        now_live = set(live)
        width = len(str(max((*now_live, *self._logs), default=0)))
        lines: list[bytes] = []
        for replica_id in sorted(now_live | set(self._logs)):
            is_new = replica_id not in self._logs
            log, offset = self._logs.get(replica_id, (PrefixedLog(f"{replica_id:>{width}} | "), 0))
            new, offset = self._new_lines(replica_id, log, offset)
            if replica_id in now_live:
                self._logs[replica_id] = log, offset
            else:
                new += log.finish()
                del self._logs[replica_id]
            lines += new if tail is None or not is_new else new[max(0, len(new) - tail) :]
        return lines

    def finish(self) -> list[bytes]:
        """Return the last lines without a newline."""
        return [line for log, _ in self._logs.values() for line in log.finish()]

    def _new_lines(self, replica_id: int, log: PrefixedLog, offset: int) -> tuple[list[bytes], int]:
        lines: list[bytes] = []
        self.unread.pop(replica_id, None)
        while True:
            try:
                content, offset = self._read(f"replica/{self._name}/{replica_id}/{self._node}", offset)
            except RefusedError as error:
                if error.status != 404:  # it has not just terminated without a log
                    self.unread[replica_id] = str(error)
                return lines, offset
            if not content:
                return lines, offset
            lines += log.feed(content)


class LastLines:
    """The last line with words of each of some logs. `run` reads them on a thread: a machine may take seconds to respond."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._wanted: tuple[str, ...] = ()
        self._tails: dict[str, tuple[bytes, int]] = {}

    def follow(self, logs: Iterable[str]) -> None:
        self._wanted = tuple(logs)

    def line(self, log: str) -> str:
        """Return the last line with words; empty until something was read."""
        return last_text_line(self._tails.get(log, (b"", 0))[0])

    def step(self) -> None:
        """Read new lines of the wanted logs."""
        for log in self._wanted:
            tail, offset = self._tails.get(log, (b"", 0))
            try:
                while True:
                    content, offset = self._read(log, offset)
                    if not content:
                        break
                    tail = (tail + content)[-TAIL_BYTES:]
            except (RefusedError, *AWAY, OSError):
                continue  # read again in the next step
            self._tails[log] = tail, offset

    def run(self, stop: threading.Event) -> None:
        while not stop.wait(EVERY_S):
            self.step()
