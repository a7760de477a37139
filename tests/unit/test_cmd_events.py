"""`serve events`: which of the old lines are printed."""

from __future__ import annotations

from typing import Any

import pytest

from skyserve_cli import app
from skyserve_cli.commands import events

NOW = 1_000_000.0


class _Story:
    """The controller's events: one a minute, the last of them now."""

    def __init__(self) -> None:
        self.lines = [
            {
                "seq": number,
                "at": NOW - 60.0 * (300 - number),
                "service": "chat",
                "replica_id": None,
                "kind": "note",
                "state": None,
                "message": f"line {number}",
            }
            for number in range(1, 301)
        ]

    def events(self, name: str | None, *, newest: bool, limit: int) -> list[dict[str, Any]]:
        assert newest
        return self.lines[-limit:]


class _Clock:
    def now(self) -> float:
        return NOW


@pytest.fixture(autouse=True)
def story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "controller", _Story)
    monkeypatch.setattr(events, "SystemClock", _Clock)


@pytest.mark.parametrize(
    ("arguments", "first", "count"),
    [
        ([], 201, 100),
        (["-n", "3"], 298, 3),
        (["-n", "0"], None, 0),
        (["--since", "2m"], 298, 3),
        (["--since", "4h"], 60, 241),
        (["--since", "4h", "-n", "5"], 296, 5),
        (["--since", "1d"], 1, 300),
    ],
)
def test_which_lines_are_printed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], first: int | None, count: int
) -> None:
    assert app.run(["events", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == count
    assert first is None or lines[0].endswith(f"line {first}")
