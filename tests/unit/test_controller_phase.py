"""What is written while the API of a controller does not respond, and the limit of a stop."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from skyserve_cli.controller import phase as module
from skyserve_cli.controller.phase import Phase, StopLimit, read_phase


def test_a_phase_lasts_from_when_it_was_entered_and_its_detail_changes(tmp_path: Path) -> None:
    now, file = [100.0], tmp_path / "phase.json"
    phase = Phase(file, lambda: now[0])
    assert read_phase(file) is None
    phase.enter("opening its database x")
    now[0] = 105.0
    phase.enter("stopping", "the tick goes on")
    now[0] = 107.0
    phase.enter("stopping", "its connections are being closed")
    found = {
        "pid": os.getpid(),
        "doing": "stopping",
        "detail": "its connections are being closed",
        "since": 105.0,
    }
    assert read_phase(file) == found
    phase.over()
    phase.over()
    assert read_phase(file) is None
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_stops_nothing(tmp_path: Path) -> None:
    Phase(tmp_path / "none" / "phase.json", lambda: 0.0).enter("stopping")


def test_a_stop_that_is_over_in_time_ends_no_process(tmp_path: Path) -> None:
    ended = threading.Event()
    limit = StopLimit(Phase(tmp_path / "phase.json", lambda: 0.0), lambda: "", ended.set)
    limit.start()
    limit.cancel()
    assert not limit.is_alive()
    assert not ended.is_set()
    assert not (tmp_path / "phase.json").exists()


def test_a_stop_that_takes_too_long_ends_the_process_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SHOWN_EVERY_S", 0.001)
    caplog.set_level(logging.WARNING)
    ended = threading.Event()
    sentence = "the tick has decided about service alpha for 61s"
    StopLimit(Phase(tmp_path / "phase.json", lambda: 0.0), lambda: sentence, ended.set, 0.01).start()
    assert ended.wait(30.0)
    assert "the stop is not over after 0.01 s, so the process ends now: " + sentence in caplog.text
