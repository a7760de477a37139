"""The lesson of example 9, as in its README: every replica is taken away, and not a word is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.survivors import PATIENCE_S

pytestmark = pytest.mark.long

LESSON = Path(__file__).parents[2] / "examples" / "09-streams-that-survive"
TOKENS = 90


def test_all_replicas_of_a_stream_are_taken_away_and_not_a_word_is_lost(serve: Any) -> None:
    url = serve.ok("up", LESSON / "service.yaml", "-y").out.strip()
    ask = [sys.executable, str(LESSON / "ask.py"), url, str(TOKENS)]
    undisturbed = subprocess.run(ask, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    asking = subprocess.Popen(ask, stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    begun = asking.stdout.read(20)
    assert len(undisturbed.split()) > TOKENS / 2
    serve.ok("local", "preempt", "saga/1", "--notice", "2s")
    serve.ok("local", "preempt", "saga/2")
    serve.ok("local", "preempt", "saga/3")
    rest = asking.stdout.read()
    assert asking.wait(PATIENCE_S) == 0
    assert begun + rest == undisturbed
    serve.eventually(lambda: {1, 2, 3} <= _ended(serve.view("saga", "--all")))


def _ended(view: dict[str, Any]) -> set[int]:
    return {replica["id"] for replica in view["replicas"] if replica["ended_at"]}
