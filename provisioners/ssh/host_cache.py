"""What hosts were last seen to have, in a folder of the home.

A host that does not respond is not empty, and a controller that has just been started must not take it for empty either.

One file per host, replaced whole. A host without a file was never looked at from this home, so nothing of ours is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from provisioners.files import read_json, write_json

Claims = Sequence[Mapping[str, Any]]


class SeenClaims:
    """Claims as hosts reported them, by host. Without a `folder` they are remembered as long as this object exists. Thread-safe."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, Claims] = {}
        self._lock = Lock()

    def note(self, host: str, claims: Claims) -> None:
        """This is what it has."""
        with self._lock:
            if self._known.get(host) == claims and self._has_met(host):
                return
            self._known[host] = claims
            if self._folder is not None:
                with suppress(OSError):  # a full disk here costs the memory after a restart, and no more
                    self._write(self._folder, host, claims)

    def add(self, host: str, claim: Mapping[str, Any]) -> None:
        """It has this one, too."""
        before = [one for one in self.of(host) or () if one["token"] != claim["token"]]
        self.note(host, [*before, claim])

    def has_met(self, host: str) -> bool:
        """Return whether anything of ours may be on it."""
        with self._lock:
            return self._has_met(host)

    def _has_met(self, host: str) -> bool:
        return self._folder is None or self._path(self._folder, host).exists()

    def of(self, host: str) -> Claims | None:
        """Return what it was last seen to have; None if that is not known."""
        with self._lock:
            if host not in self._known and self._folder is not None:
                path = self._path(self._folder, host)
                self._known[host] = read_json(path) or []
            return self._known.get(host)

    def _write(self, folder: Path, host: str, claims: Claims) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self._path(folder, host), list(claims))

    def _path(self, folder: Path, host: str) -> Path:
        return folder / f"{quote(host, safe='')}.json"
