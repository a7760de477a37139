"""A file that is written while the agent has traffic: it renews the lease of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NOTE_EVERY_S = 20.0


async def note_traffic(file: Path, served: Callable[[], int], in_flight: Callable[[], int]) -> None:
    """Touch the file every few seconds in which a request was served, or is still being served, until cancelled.

    `served` counts responses of 2xx and 3xx. Where the file's folder is missing, the machine has no lease.
    """
    before = served()
    while True:
        await asyncio.sleep(NOTE_EVERY_S)
        now = served()
        if now > before or in_flight():
            _touch(file)
        before = now


def _touch(file: Path) -> None:
    with suppress(OSError):
        file.touch()
