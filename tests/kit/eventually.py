"""Waiting for what other processes do."""

from __future__ import annotations

from collections.abc import Callable
from time import sleep

import pytest


def eventually(holds: Callable[[], bool], what: str) -> None:
    """Return as soon as it holds; a test that waits for more than 20 s fails with the sentence."""
    for _ in range(1000):
        if holds():
            return
        sleep(0.02)
    pytest.fail(f"never happened: {what}")
