"""Notifications as a part of the controller."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

from skyserve_cli.controller.notify.watch import NotificationWatch
from skyserve_cli.controller.part import Kernel, Part
from skyserve_cli.state.outbox import Outbox


class NotifyPart(Part):
    """Notifies the destinations of `notify` in config.yaml, if there are any."""

    name = "notify"

    def __init__(self, kernel: Kernel) -> None:
        service = kernel.service
        self._is_used = bool(kernel.config.notify)
        self._watch = NotificationWatch(
            kernel.config.notify,
            Outbox(kernel.store.database),
            kernel.clock,
            lambda: {**service.health(), **kernel.parts.rows(before=self)},
            lambda: service.services(down=False, ended=True),
            lambda: secrets.token_hex(12),
        )

    def lead(self) -> None:
        if self._is_used:
            self._watch.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._watch.stop)

    def row(self) -> Mapping[str, Any]:
        return {"notifications": self._watch.view()}
