"""`benchmarks.chaos.two_controllers` for a few rounds."""

from __future__ import annotations

import sys

import pytest

from benchmarks.chaos import two_controllers

pytestmark = pytest.mark.long


def test_two_controllers_of_one_database_do_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # This seed kills the leader, sets the clock, and stops the leader until another one leads.
    arguments = ["--rounds", "3", "--stopped", "10", "--rate", "5"]
    monkeypatch.setattr(sys, "argv", ["two_controllers", *arguments])
    assert two_controllers.main() == 0, capsys.readouterr().err
    told = capsys.readouterr().out
    assert "requests failed: 0 of" in told
    assert "the other one leads after stop" in told
