"""One watch for all Pods of a namespace, in a thread: list once, then follow from that version on.

The server ends a watch every few minutes, and the next one goes on where it ended. Bookmarks move the version along while
nothing happens, so that it does not expire; if it does (410) everything is listed again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from provisioners.kubernetes.api import ExpiredError, Json, Listed
from provisioners.port.errors import AuthError, ProvisionError, TransientError

_log = logging.getLogger(__name__)
_BETWEEN_S = 0.05  # two watches, if a server ends them at once
_PAUSE_S, _LONGEST_PAUSE_S, _CLOSED_PAUSE_S = 0.2, 15.0, 30.0


class Sink(Protocol):
    """What takes lists and events."""

    def replace(self, items: list[Json], version: str) -> None: ...

    def apply(self, kind: str, item: Mapping[str, Any]) -> None: ...


class Watcher:
    """Feeds a sink until `stop`. `error` is the reason why it cannot, and is None while the sink is up to date."""

    def __init__(
        self, name: str, listed: Callable[[], Listed], events: Callable[[str], Iterator[Json]], sink: Sink
    ) -> None:
        self._list = listed
        self._events = events
        self._sink = sink
        self._version = ""
        self._is_synced = False
        self._error: ProvisionError | None = None
        self._changes = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{name}", daemon=True)

    def start(self) -> None:
        with self._changes:
            if not self._thread.is_alive() and not self._stopping.is_set():
                self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def wait(self, timeout_s: float) -> ProvisionError | None:
        """Return None once the sink is up to date, or why it is not after that time."""
        with self._changes:
            self._changes.wait_for(lambda: self._is_synced or self._error is not None, timeout_s)
            if self._is_synced:
                return None
            return self._error or TransientError("the first list has not come yet", cloud="kubernetes")

    # --- inside

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                if not self._version:
                    found = self._list()
                    self._sink.replace(found.items, found.version)
                    self._version = found.version
                    self._note(None)
                self._follow()
                failures = 0
                self._stopping.wait(_BETWEEN_S)
            except ExpiredError:
                self._version = ""
            except ProvisionError as error:
                failures += 1
                if failures > 1 or not self._is_synced:  # a connection that breaks is made again at once
                    self._note(error)
                longest = _CLOSED_PAUSE_S if isinstance(error, AuthError) else _LONGEST_PAUSE_S
                self._stopping.wait(min(longest, _PAUSE_S * 2 ** min(failures - 1, 8)))
            except Exception as error:  # noqa: BLE001 (a defect must not blind us for good)
                _log.exception("watch")
                self._version = ""
                self._note(TransientError(f"the watch failed: {error}", cloud="kubernetes"))
                self._stopping.wait(_LONGEST_PAUSE_S)

    def _follow(self) -> None:
        """Until the server ends the watch. It is up to date again once the server has accepted it."""
        events = self._events(self._version)
        for event in events:
            if self._stopping.is_set():
                return
            kind, item = str(event.get("type")), event.get("object") or {}
            if kind != "BOOKMARK":
                self._sink.apply(kind, item)
            self._version = str((item.get("metadata") or {}).get("resourceVersion") or self._version)
            if not self._is_synced:
                self._note(None)

    def _note(self, error: ProvisionError | None) -> None:
        with self._changes:
            self._is_synced, self._error = error is None, error
            self._changes.notify_all()
