"""The file of usage: nothing that was stored is lost or counted twice, with several processes that write it and any end of one."""

from __future__ import annotations

import logging
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from lb.agent import usage_file
from lb.agent.usage_file import UsageFile, left_in
from lb.config.decode import WireError
from lb.config.usage import DAY_S, KEPT_DAYS, UsageReport, UsageRow
from lb.observe.key_usage import KeyUsage

DAY = 20_000


class Agent:
    """One process with the file."""

    def __init__(self, path: Path | None, day: int = DAY) -> None:
        self.counted = KeyUsage()
        self.now = day * float(DAY_S)
        self.metrics: list[tuple[str, str, int]] = []
        self.file = UsageFile(
            path,
            self.counted,
            lambda: self.now,
            lambda used: self.metrics.append(used[:3]),
        )

    def serve(self, key: str = "alice", model: str = "m", tokens: int = 10) -> None:
        self.counted.add(key, model, True, tokens, 1)

    def rows(self) -> tuple[UsageRow, ...]:
        return self.file.report("", 0).rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.json.usage"


def row(requests: int, tokens_in: int, key: str = "alice", model: str = "m", day: int = DAY) -> UsageRow:
    return UsageRow(day, key, model, requests, tokens_in, requests)


@pytest.mark.parametrize("in_memory", [False, True])
def test_numbers_grow_and_only_what_has_changed_is_reported_again(path: Path, in_memory: bool) -> None:
    agent = Agent(None if in_memory else path)
    agent.serve()
    agent.serve("bob")
    first = agent.file.report("", 0)
    assert first.rows == (row(1, 10), row(1, 10, "bob"))
    assert agent.file.report(first.source, first.mark).rows == ()
    agent.serve()
    second = agent.file.report(first.source, first.mark)
    assert second.rows == (row(2, 20),)
    assert agent.file.report(first.source, first.mark) == second  # again, as after a lost response
    assert set(agent.file.report("another", first.mark).rows) == {row(2, 20), row(1, 10, "bob")}
    assert agent.metrics == [("alice", "m", 1), ("bob", "m", 1), ("alice", "m", 1)]


def test_an_agent_that_is_started_again_goes_on(path: Path) -> None:
    one = Agent(path)
    one.serve()
    before = one.file.report("", 0)
    one.serve()
    one.file.close()
    other = Agent(path)
    other.serve()
    after = other.file.report(before.source, before.mark)
    assert (after.source, after.rows) == (before.source, (row(3, 30),))


def test_what_a_killed_process_stored_is_there(path: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from lb.agent.usage_file import UsageFile
        from lb.observe.key_usage import KeyUsage
        counted = KeyUsage()
        file = UsageFile(Path({str(path)!r}), counted, lambda: {DAY * DAY_S}.0, lambda used: None)
        for _ in range(100):
            counted.add("alice", "m", True, 10, 1)
            file.store()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert Agent(path).rows() == (row(100, 1000),)


def test_an_agent_and_its_successor_add_to_the_same_rows_and_either_reports_both(path: Path) -> None:
    leaving, successor = Agent(path), Agent(path)
    for agent in (leaving, successor, leaving):
        agent.serve()
        agent.file.store()
    assert leaving.rows() == successor.rows() == (row(3, 30),)


def test_a_busy_file_delays_the_rows_and_loses_none(path: Path) -> None:
    agent = Agent(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    agent.serve()
    agent.file.store()
    agent.serve()
    assert agent.rows() == ()
    other.execute("COMMIT")
    assert agent.rows() == (row(2, 20),)


def test_each_day_has_rows_of_its_own_and_old_ones_go(path: Path) -> None:
    agent = Agent(path)
    agent.serve()
    agent.file.store()
    agent.serve()  # before midnight
    agent.now += DAY_S
    agent.file.store()
    agent.serve()
    assert set(agent.rows()) == {row(2, 20), row(1, 10, day=DAY + 1)}
    agent.now += (KEPT_DAYS - 1) * DAY_S
    agent.file.store()
    agent.serve()
    assert {one.day for one in agent.rows()} == {DAY + 1, DAY + KEPT_DAYS}


def test_marks_go_on_when_all_rows_have_gone(path: Path) -> None:
    agent = Agent(path)
    agent.serve()
    first = agent.file.report("", 0)
    agent.now += 2 * KEPT_DAYS * DAY_S
    agent.file.store()
    agent.serve()
    assert [one.day for one in agent.file.report(first.source, first.mark).rows] == [DAY + 2 * KEPT_DAYS]


def test_a_long_report_comes_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_file, "MOST_ROWS", 4)
    agent = Agent(path)
    for number in range(10):
        agent.serve(f"k{number}")
    source, mark, more = "", 0, True
    found: list[list[str]] = []
    while more:
        report = agent.file.report(source, mark)
        source, mark, more = report.source, report.mark, report.more
        found.append([one.key for one in report.rows])
    assert [len(part) for part in found] == [4, 4, 2]
    assert sorted(key for part in found for key in part) == [f"k{number}" for number in range(10)]


@pytest.mark.parametrize("content", [b"no database at all" * 100, b""])
def test_a_broken_file_is_replaced(path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(content)
    agent = Agent(path)
    agent.serve()
    agent.file.close()
    assert Agent(path).rows() == (row(1, 10),)
    assert ("begins at 0" in caplog.text) == bool(content)


def test_a_file_of_another_layout_is_replaced(path: Path) -> None:
    Agent(path).file.close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 99")
    agent = Agent(path)
    agent.serve()
    assert agent.rows() == (row(1, 10),)


def test_without_a_usable_place_rows_are_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(tmp_path / "missing" / "file")
    agent.serve()
    assert agent.rows() == (row(1, 10),)
    assert [one.levelno for one in caplog.records] == [logging.ERROR]


def test_only_its_owner_may_read_it(path: Path) -> None:
    agent = Agent(path)
    agent.serve()
    agent.file.store()
    modes = {part.name: oct(part.stat().st_mode & 0o777) for part in path.parent.iterdir()}
    assert set(modes.values()) == {"0o600"}, modes


def test_what_an_agent_left_is_read_from_its_file(path: Path) -> None:
    assert left_in(path, "", 0) is None
    agent = Agent(path)
    agent.serve()
    seen = agent.file.report("", 0)
    agent.serve("bob")
    agent.file.close()
    left = left_in(path, seen.source, seen.mark)
    assert left is not None
    assert (left.rows, left.more) == ((row(1, 10, "bob"),), False)


def test_reports_come_back_from_json(path: Path) -> None:
    agent = Agent(path)
    agent.serve()
    report = agent.file.report("", 0)
    assert UsageReport.from_json(report.to_json()) == report
    assert "totals" not in report.to_json()  # an earlier controller would refuse it
    wants = replace(report, totals=True)
    assert UsageReport.from_json(wants.to_json()) == wants
    with pytest.raises(WireError, match="totals"):
        UsageReport.from_json(report.to_json() | {"totals": 1})


@pytest.mark.parametrize(
    "bad",
    [
        [DAY, "alice", "m", 1, 1],
        [DAY, "alice", "m", 1, 1, -1],
        [DAY, "alice", "m", 1, 1, 1.5],
        [DAY, "alice", "m", 1, True, 1],
        ["1970", "alice", "m", 1, 1, 1],
        [DAY, "a\0", "m", 1, 1, 1],
        [DAY, None, "m", 1, 1, 1],
        [DAY, "a" * 600, "m", 1, 1, 1],
        {},
    ],
)
def test_what_is_no_row_is_refused_with_its_place(bad: object) -> None:
    with pytest.raises(WireError, match=r"rows\[0\]"):
        UsageReport.from_json({"source": "s", "mark": 1, "more": False, "rows": [bad]})
