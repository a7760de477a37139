"""The command's end of a session on a machine (`controller.sessions.relay`): streams of this process to a WebSocket and back."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyserve_cli.output import CommandFailed

if TYPE_CHECKING:
    from skyserve_cli.controller.api.web_socket import WebSocket

UNREACHABLE = 255  # what `ssh` says, too
_WINDOW = 262_144  # bytes of input that were sent and not taken yet
_CHUNK = 32_768
_POLL_S = 0.2
_STDIN, _OUT, _ERR = b"\0", b"\1", b"\2"

Write = Callable[[bytes], object]


def relay(
    link: WebSocket,
    script: str | None,
    *,
    out: Write,
    err: Write,
    stdin: int | None = None,
    term: str | None = None,
    size: Callable[[], tuple[int, int]] = lambda: (80, 24),
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Run a script, or a shell (None), and return its exit code. Raises CommandFailed with the reason if it has none.

    `stdin` is a descriptor that is passed on, `term` the kind of the terminal that the session gets, as large as `size` says.
    """
    session = _Relay(link, out, err)
    try:
        session.begin({"script": script, "stdin": stdin is not None, "term": term and [term, *size()]})
        return session.run(stdin, size if term is not None else None, stopped)
    except (OSError, EOFError) as error:
        if isinstance(error, BrokenPipeError) and session.is_ours:
            raise  # our output is not read any more
        raise CommandFailed(
            "the session was lost: the controller has stopped, or cannot be reached", UNREACHABLE
        ) from error
    finally:
        link.close()


class _Relay:
    def __init__(self, link: WebSocket, out: Write, err: Write) -> None:
        self._link = link
        self._writers = {_OUT: out, _ERR: err}
        self._untaken = 0
        self.is_ours = False  # the failure is one of our own output

    def begin(self, order: dict[str, Any]) -> None:
        self._put(order)

    def run(
        self, stdin: int | None, size: Callable[[], tuple[int, int]] | None, stopped: Callable[[], bool]
    ) -> int:
        shown = None if size is None else size()
        has_stopped = False
        while True:
            reads_stdin = stdin is not None and self._untaken + _CHUNK <= _WINDOW
            sources: list[Any] = [self._link, *([stdin] if reads_stdin else [])]
            ready = sources[:1] if self._link.has_more else select.select(sources, [], [], _POLL_S)[0]
            if self._link in ready:
                for message in self._link.receive():
                    code = self._take(message)
                    if code is not None:
                        return code
            if stdin in ready and stdin is not None:
                data = _read(stdin)
                self._link.send(_STDIN + data)
                self._untaken += len(data)
                stdin = stdin if data else None
            if size is not None and size() != shown:
                shown = size()
                self._put({"size": shown})
            if stopped() and not has_stopped:
                has_stopped = True
                self._put({"stop": True})

    def _put(self, content: dict[str, Any]) -> None:
        self._link.send(json.dumps(content))

    def _take(self, message: bytes | str) -> int | None:
        """Return the exit code if that is what it says. Raises CommandFailed if it says that there is none."""
        if isinstance(message, bytes):
            self.is_ours = True
            self._writers[message[:1]](message[1:])
            self.is_ours = False
            return None
        said: dict[str, Any] = json.loads(message)
        self._untaken -= int(said.get("taken", 0))
        if "error" in said:
            raise CommandFailed(said["error"], said["exit"])
        return said.get("exit")


def _read(descriptor: int) -> bytes:
    """Return nothing at the end, and for a descriptor that is closed or a terminal that is gone."""
    try:
        return os.read(descriptor, _CHUNK - 1)
    except OSError:
        return b""
