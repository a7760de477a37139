"""Connections to the socket in the home of a controller elsewhere, each by a command that runs there (`bridge`).

A process has one link to each controller, and a session in it for each HTTP connection: a small program there joins the session
to the socket and passes on the home's token, which is kept in memory only. HTTP connections are kept open between calls, so that a
command that polls does not start a program for each call.
"""

from __future__ import annotations

import atexit
import http.client
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple, Protocol

from provisioners.port.commands import ShellError

_MARK = b"skyserve-bridge "
_LONGEST_GREETING_BYTES = 65536


class Channel(Protocol):
    """The standard streams of a program there, as a socket has them."""

    @property
    def closed(self) -> bool: ...

    def recv(self, size: int, /) -> bytes: ...

    def settimeout(self, timeout_s: float, /) -> None: ...

    def printed_errors(self) -> bytes: ...

    def close(self) -> None: ...


class Opener(Protocol):
    """What starts programs there."""

    @property
    def is_open(self) -> bool: ...

    def start_bridge(self) -> Channel: ...

    def close(self) -> None: ...


class BridgeSession(NamedTuple):
    """A session that leads to the socket, and the token of the home."""

    channel: Channel
    token: str


class BridgeLink:
    """The way to one controller, opened on first use and again when it was lost. Thread-safe."""

    def __init__(self, dial: Callable[[], Opener]) -> None:
        self._dial = dial
        self._lock = Lock()
        self._opener: Opener | None = None
        self._idle: list[BridgeSession] = []

    def session(self, timeout_s: float) -> BridgeSession:
        """Return a session that no other call uses. Raises OSError, whose text is a sentence."""
        while True:
            try:
                session = self._idle.pop()
            except IndexError:
                break
            if not session.channel.closed:
                session.channel.settimeout(timeout_s)
                return session
            session.channel.close()
        try:
            return self._open(timeout_s)
        except ShellError as error:
            raise ConnectionError(error.message) from error

    def give_back(self, session: BridgeSession) -> None:
        """Keep a session whose last response was read to its end."""
        self._idle.append(session)

    def _open(self, timeout_s: float) -> BridgeSession:
        with self._lock:
            if self._opener is None or not self._opener.is_open:
                self._opener = self._dial()
                atexit.register(self._opener.close)
            opener = self._opener
        channel = opener.start_bridge()
        channel.settimeout(timeout_s)
        try:
            return BridgeSession(channel, _greeting(channel))
        except BaseException:
            channel.close()
            raise


def _greeting(channel: Channel) -> str:
    """Return the token from the bridge's first line. Raises ConnectionError with the bridge's reason, or the shell's."""
    line, count = b"", 0
    while not (line.startswith(_MARK) and line.endswith(b"\n")):
        line = b"" if line.endswith(b"\n") else line
        byte = channel.recv(1)  # no more: what follows belongs to HTTP
        count += 1
        if not byte or count > _LONGEST_GREETING_BYTES:
            printed = channel.printed_errors() or line
            lines = printed.decode(errors="replace").strip().splitlines()
            raise ConnectionError(lines[-1] if lines else "the session there ended at once")
        line += byte
    kind, _, rest = line[len(_MARK) :].decode(errors="replace").strip().partition(" ")
    if kind != "ok":
        raise ConnectionRefusedError(rest)
    return rest


class BridgeHttpConnection(http.client.HTTPConnection):
    """An HTTP connection through a session. `close` keeps the session where the response was read whole.

    `token` is that of the home, once the connection is open.
    """

    def __init__(self, link: BridgeLink, timeout_s: float) -> None:
        super().__init__("controller", timeout=timeout_s)
        self._link = link
        self._timeout_s = timeout_s
        self.token = ""
        self._session: BridgeSession | None = None
        self._response: http.client.HTTPResponse | None = None

    def connect(self) -> None:
        self._session = self._link.session(self._timeout_s)
        self.token = self._session.token
        self.sock: Any = self._session.channel

    def getresponse(self) -> http.client.HTTPResponse:
        self._response = super().getresponse()
        return self._response

    def close(self) -> None:
        session, response = self._session, self._response
        self._session = self._response = None
        is_whole = response is not None and response.isclosed() and not response.will_close
        if is_whole:
            self.sock = None  # the base class would close it
        super().close()
        if session is not None and is_whole:
            self._link.give_back(session)
        elif session is not None:
            session.channel.close()
