"""Repeats on all targets what one of them has accepted about LoRA adapters. What is missing where is known by `lb.core.adapters`.

Its requests go past the queue and the bookings, one at a time for each target. The adapters that should be loaded are in a file
beside the table, so that an agent that is started again gives them to new replicas too; keys of clients are not in it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from lb.config.file import write_text
from lb.config.schema import Target
from lb.core.adapters import Adapters, Operation
from lb.core.target_state import Key
from lb.core.targets import TargetTable
from lb.engines.kinds import Fetched

TIMEOUT_S: Final = 300.0  # an adapter may have to be downloaded
EVERY_S: Final = 1.0

Post = Callable[[Target, str, bytes, float, bytes], Awaitable[Fetched]]
"""POSTs a body to a path of a target within a time limit in seconds, with header lines. Raises OSError or asyncio.TimeoutError."""

_log = logging.getLogger("lb.proxy.adapter_sync")


class AdapterSync:
    """Needs a running event loop. `loaded` is called with each target that may list other models now."""

    def __init__(
        self,
        table: TargetTable,
        post: Post,
        clock: Callable[[], float],
        loaded: Callable[[Key], None],
        file: Path | None = None,
    ) -> None:
        self._table = table
        self._post = post
        self._clock = clock
        self._loaded = loaded
        self._file = file
        self._adapters = Adapters()
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        if file is not None and file.exists():
            try:
                self._adapters.restore(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                _log.warning("cannot read adapters file=%s why=%r", file, str(error))

    def accepted(self, operation: Operation, target_id: str) -> None:
        """A target has responded with success to a client's operation."""
        key = self._table.key(target_id)
        models = None if key is None else self._table.models.names_of(key)
        present = [one for one, _, _ in self._table.probe_list()]
        self._adapters.accepted(operation, key, models or (), present, self._clock())
        _log.info("adapter path=%s name=%r target=%s", operation.path.decode(), operation.name, target_id)
        if key is not None:
            self._loaded(key)
        if self._file is not None:
            try:
                write_text(self._file, json.dumps(self._adapters.to_json()) + "\n")
            except OSError as error:
                _log.warning("cannot write adapters file=%s why=%r", self._file, str(error))
        self.tick()

    def tick(self) -> None:
        """Send what targets lack. Called every EVERY_S."""
        if not self._adapters:
            return
        now, table = self._clock(), self._table
        listed = table.probe_list()
        self._adapters.retain([key for key, _, _ in listed])
        for key, target, _ in listed:
            if key in self._tasks or not table.health(key, now).is_good:
                continue
            operation = self._adapters.next(key, table.models.names_of(key), now)
            if operation is not None:
                task = asyncio.get_running_loop().create_task(self._send(key, target, operation))
                self._tasks[key] = task

    def close(self) -> None:
        """Send no more."""
        for task in self._tasks.values():
            task.cancel()

    async def _send(self, key: Key, target: Target, operation: Operation) -> None:
        status = 0
        try:
            path = operation.path.decode("latin-1")
            status = (await self._post(target, path, operation.body, TIMEOUT_S, operation.lines)).status
        except (OSError, asyncio.TimeoutError):  # noqa: UP041 (not the same in 3.10)
            pass
        finally:
            del self._tasks[key]
        settled = self._adapters.applied(key, operation, status, self._clock())
        level = logging.INFO if settled and status < 400 else logging.WARNING
        _log.log(level, "adapter path=%s name=%r target=%s status=%d", path, operation.name, key.id, status)
        if settled:
            self._loaded(key)
            self.tick()
