"""Limits over real processes that share one file: in parallel, killed, frozen and of different releases."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from lb.__main__ import _parser, _shared_file
from lb.agent import limits_file
from lb.agent.limits_file import LimitsFile, shared_path
from lb.config.options import Access
from lb.core.api_keys import Admission, ApiKeyStore, Usage
from lb.core.limit_store import IN_FLIGHT, sum_of_cells
from lb.core.quota import Limited
from tests.integration.lb_harness import RunningAgent, World, world
from tests.kit.api_keys import api_key

ROOT = Path(__file__).parents[2]
BEARER = ((b"authorization", b"Bearer sk-alice"),)

# A process of its own: reads commands, one a line, and prints what came of each.
PROCESS = """
import hashlib, sys
from pathlib import Path
from lb.agent.limits_file import LimitsFile
from lb.config.key_limits import KeyLimits
from lb.config.options import Access, ApiKey
from lb.core.api_keys import Admission, ApiKeyStore
limits = LimitsFile(Path(sys.argv[1]))
limited = KeyLimits(float(sys.argv[2]), float(sys.argv[3]), max_concurrent=int(sys.argv[4]))
key = ApiKey("alice", hashlib.sha256(b"sk-alice").hexdigest(), limited)
keys = ApiKeyStore(Access((key,)), 0.0, limits)
open_ = []
print("ready", flush=True)
for line in sys.stdin:
    command, now, number = line.split()
    done = 0
    for _ in range(int(number)):
        if command == "admit":
            verdict = keys.admit_head(((b"authorization", b"Bearer sk-alice"),), float(now))
            if isinstance(verdict, Admission):
                open_.append(verdict)
                done += 1
        elif command == "reserve":
            done += keys.reserve(open_[-1], "", 10, 0, float(now)) is None
        elif command == "settle":
            keys.settle(open_.pop(), 10, 0, float(now))
            done += 1
        elif command == "cycle":
            verdict = keys.admit_head(((b"authorization", b"Bearer sk-alice"),), float(now))
            if isinstance(verdict, Admission):
                keys.reserve(verdict, "", 3, 0, float(now))
                keys.settle(verdict, 1, 0, float(now))
                done += 1
        elif command == "lock":
            limits.lock(float(now))
    print(done, flush=True)
"""


class Process:
    def __init__(self, path: Path, requests: float = 0, tokens: float = 0, concurrent: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(path), str(requests), str(tokens), str(concurrent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.said == "ready"

    @property
    def said(self) -> str:
        out: IO[str] | None = self.process.stdout
        assert out is not None
        return out.readline().strip()

    def send(self, command: str, now: float = 0.0, number: int = 1) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {now} {number}\n")
        self.process.stdin.flush()

    def ask(self, command: str, now: float = 0.0, number: int = 1) -> int:
        self.send(command, now, number)
        return int(self.said)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    processes: list[Process] = []

    def begin(requests: float = 0, tokens: float = 0, concurrent: int = 0) -> Process:
        processes.append(Process(tmp_path / "limits", requests, tokens, concurrent))
        return processes[-1]

    yield begin
    for one in processes:
        one.kill()
        one.process.stdin.close()
        one.process.stdout.close()


def here(path: Path, **limits: Any) -> ApiKeyStore:
    """A store of this process on the file."""
    return ApiKeyStore(Access((api_key("alice", "sk-alice", **limits),)), 0.0, LimitsFile(path))


def in_flight(limits: LimitsFile, name: str) -> float:
    row = limits.row(name)
    return sum_of_cells(row.numbers, row.own, row.columns, IN_FLIGHT)


def account(keys: ApiKeyStore, now: float = 0.0) -> Usage:
    (usage,) = keys.usage(now)
    return usage


def test_three_processes_that_compete_get_one_limit(start: Start) -> None:
    processes = [start(requests=1000) for _ in range(3)]
    for one in processes:
        one.send("admit", number=900)
    assert sum(int(one.said) for one in processes) == 1000


def test_no_change_is_lost_where_processes_compete(start: Start, tmp_path: Path) -> None:
    processes = [start(tokens=1e6, requests=1e6, concurrent=100) for _ in range(3)]
    for one in processes:
        one.send("cycle", number=2000)
    assert [int(one.said) for one in processes] == [2000] * 3
    usage = account(here(tmp_path / "limits", tokens_per_minute=1e6, requests_per_minute=1e6))
    assert (usage.tokens_left, usage.requests_left) == (1e6 - 6000, 1e6 - 6000)
    assert (usage.reserved, usage.in_flight) == (0, 0)


def test_an_idle_process_leaves_its_part_to_the_others(start: Start) -> None:
    busy, idle = start(requests=60, concurrent=50), start(requests=60, concurrent=50)
    assert busy.ask("admit", number=100) == 50
    assert idle.ask("admit") == 0
    busy.ask("settle")
    assert idle.ask("admit") == 1


def test_a_killed_process_leaves_nothing_in_flight_or_reserved(start: Start, tmp_path: Path) -> None:
    first, second = start(tokens=100, concurrent=2), start(tokens=100, concurrent=2)
    for _ in range(2):
        assert (first.ask("admit"), first.ask("reserve")) == (1, 1)
    assert second.ask("admit") == 0
    keys = here(tmp_path / "limits", tokens_per_minute=100, max_concurrent=2)
    assert (account(keys).reserved, account(keys).in_flight, account(keys).tokens_left) == (20, 2, 80)
    first.kill()
    assert second.ask("admit", now=2.0, number=5) == 2
    assert (account(keys, 2.0).reserved, account(keys, 2.0).in_flight, account(keys, 2.0).tokens_left) == (
        0,
        2,
        100,
    )


def test_a_successor_goes_on_with_the_levels_of_a_process_that_has_ended(start: Start) -> None:
    first = start(requests=10)
    assert first.ask("admit", number=20) == 10
    first.kill()
    assert [start(requests=10).ask("admit", now=now, number=20) for now in (0.0, 6.0, 6.0)] == [0, 1, 0]


def test_slots_of_the_dead_are_used_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for _ in range(3):
        one = start(concurrent=1)
        assert one.ask("admit") == 1
        one.kill()
    monkeypatch.setattr(limits_file, "SLOTS", 1)
    assert account(here(tmp_path / "limits", max_concurrent=1)).in_flight == 0
    with pytest.raises(OSError, match="1 processes share"):
        LimitsFile(tmp_path / "limits")


def test_a_process_that_is_frozen_with_the_lock_stops_no_other(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_file, "_TRIES", 3)
    keys = here(tmp_path / "limits", requests_per_minute=10)
    frozen = start(requests=10)
    frozen.ask("lock")
    os.kill(frozen.process.pid, signal.SIGSTOP)
    assert isinstance(keys.admit_head(BEARER, 0.0), Admission)
    assert isinstance(keys.admit_head(BEARER, 0.5), Admission)
    assert len([one for one in caplog.records if "go on without" in one.message]) == 1
    frozen.kill()
    assert account(keys, 5.0).requests_left == pytest.approx(8.83, abs=0.01)


OTHERS = {
    "empty": b"",
    "of another layout": b"SKYLIM00" + bytes(4096),
    "of another boot": b"SKYLIM03" + b"?" * 16 + bytes(limits_file._SIZE - 24),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_file_that_is_not_ours_is_replaced_and_not_written_to(tmp_path: Path, case: str) -> None:
    path, former = tmp_path / "limits", tmp_path / "former"
    path.write_bytes(OTHERS[case])
    former.hardlink_to(path)
    keys = here(path, requests_per_minute=1)
    assert isinstance(keys.admit_head(BEARER, 0.0), Admission)
    assert isinstance(here(path, requests_per_minute=1).admit_head(BEARER, 0.0), Limited)
    assert former.read_bytes() == OTHERS[case]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["former", "limits"]


def test_what_was_used_on_a_day_and_in_a_month_outlives_a_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels begin afresh: instants of another boot mean nothing."""
    (tmp_path / "boot").write_text("a")
    monkeypatch.setattr(limits_file, "_BOOT_ID", tmp_path / "boot")
    limits = {"requests_per_minute": 100, "tokens_per_day": 1000, "tokens_per_month": 1000}
    keys = here(tmp_path / "limits", **limits)
    for _ in range(3):
        admission = keys.admit_head(BEARER, 5000.0)
        assert isinstance(admission, Admission)
        keys.reserve(admission, "", 10, 5, 5000.0)
        keys.settle(admission, 10, 5, 5000.0)
    unsettled = keys.admit_head(BEARER, 5000.0)
    assert isinstance(unsettled, Admission)
    keys.reserve(unsettled, "", 10, 5, 5000.0)
    (tmp_path / "boot").write_text("b")
    for _ in range(2):
        usage = account(here(tmp_path / "limits", **limits))
        assert (usage.requests_today, usage.tokens_today, usage.tokens_this_month) == (4, 45, 45)
        assert (usage.requests_left, usage.reserved, usage.in_flight) == (100, 0, 0)


def test_the_file_takes_room_for_the_rows_that_are_used(tmp_path: Path) -> None:
    def room() -> int:
        return (tmp_path / "limits").stat().st_blocks * 512

    first = LimitsFile(tmp_path / "limits")
    assert room() <= 64 * 1024
    rows = [first.row(f"key {number}") for number in range(1000)]
    second = LimitsFile(tmp_path / "limits")
    assert room() <= 1000 * (128 + 2 * 32) + 128 * 1024
    for number, row in enumerate(rows):
        row.numbers[row.own + IN_FLIGHT] = number
    assert [in_flight(second, f"key {number}") for number in range(1000)] == list(range(1000))
    late = first.row("late")
    late.numbers[late.own + IN_FLIGHT] = 2
    assert in_flight(second, "late") == 2


def test_without_room_on_the_disk_keys_are_limited_per_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LimitsFile(tmp_path / "limits")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    keys = ApiKeyStore(Access((api_key("alice", "sk-alice", requests_per_minute=2),)), 0.0, limits)
    verdicts = [isinstance(keys.admit_head(BEARER, 0.0), Admission) for _ in range(3)]
    assert verdicts == [True, True, False]


@pytest.mark.parametrize("rows", [10, 0], ids=["in the file", "beyond it"])
def test_a_key_that_was_removed_and_is_back_has_one_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(limits_file, "ROWS", rows)
    keys = here(tmp_path / "limits", tokens_per_minute=1000)
    used = Access((api_key("alice", "sk-alice", tokens_per_minute=1000),))

    def begin() -> Admission:
        admission = keys.admit_head(BEARER, 0.0)
        assert isinstance(admission, Admission)
        assert keys.reserve(admission, "m", 100, 100, 0.0) is None
        return admission

    before = begin()
    keys.apply(Access((api_key("bob", "sk-bob"),)), 0.0)
    keys.apply(used, 0.0)
    after = begin()
    keys.settle(before, 100, 50, 0.0)
    keys.settle(after, 0, 0, 0.0)
    assert account(keys).tokens_left == 850


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "limits").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        LimitsFile(tmp_path / "limits")
    assert not (tmp_path / "elsewhere").exists()


def test_tenants_beyond_the_file_are_limited_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_file, "ROWS", 1)
    limits = [LimitsFile(tmp_path / "limits") for _ in range(2)]
    for store in limits:
        for name in ("first", "second"):
            row = store.row(name)
            row.numbers[row.own + IN_FLIGHT] = 1
    assert in_flight(limits[0], "first") == 2
    assert in_flight(LimitsFile(tmp_path / "limits"), "second") == 0


def test_the_file_is_for_its_user_alone(tmp_path: Path) -> None:
    LimitsFile(tmp_path / "limits")
    assert (tmp_path / "limits").stat().st_mode & 0o777 == 0o600


# --- through agents


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


def alice(**limits: float) -> dict[str, Any]:
    return api_key("alice", "sk-alice", **limits).to_json()


async def statuses(agent: RunningAgent, count: int) -> list[int]:
    """Of requests on a connection each, which the kernel may give to any agent of the port."""
    headers = {"Authorization": "Bearer sk-alice", "Connection": "close"}
    return [(await agent.text(headers=headers))[0] for _ in range(count)]


async def test_agents_that_share_a_port_share_the_limits(w: World, tmp_path: Path) -> None:
    target = await w.target("a")
    first = await w.agent("--reuse-port", "--limits-file", str(tmp_path / "limits"))
    second = await w.agent(
        "--reuse-port", "--limits-file", str(tmp_path / "limits"), "--port", str(first.port)
    )
    for agent in (first, second):
        await agent.push(target.json, access={"keys": [alice(requests_per_minute=5)]})
    admitted = await statuses(first, 20)
    assert admitted == [200] * 5 + [429] * 15
    for agent in (first, second):
        (usage,) = (await agent.request("GET", "/-/keys"))["keys"]
        assert usage["requests_left"] < 1


async def test_a_restarted_agent_knows_what_was_used(w: World, tmp_path: Path) -> None:
    target = await w.target("a")
    table = str(tmp_path / "table.json")
    first = await w.agent("--table-file", table, clean_exit=False)
    await first.push(target.json, access={"keys": [alice(requests_per_minute=3)]})
    assert await statuses(first, 4) == [200, 200, 200, 429]
    first.process.kill()
    await first.process.wait()
    second = await w.agent("--table-file", table)
    assert await statuses(second, 1) == [429]


@pytest.mark.long
async def test_a_successor_counts_with_its_predecessor(w: World, tmp_path: Path) -> None:
    target = await w.target("a")
    flags = ("--handover-socket", str(tmp_path / "handover"), "--table-file", str(tmp_path / "table.json"))
    first = await w.agent(*flags)
    await first.push(target.json, access={"keys": [alice(requests_per_minute=3)]})
    assert await statuses(first, 2) == [200, 200]
    second = await w.agent(*flags)
    assert await statuses(second, 3) == [200, 429, 429]
    assert (tmp_path / "table.json.limits").exists()
    assert await asyncio.wait_for(first.process.wait(), 20) == 0


async def test_an_agent_that_cannot_share_limits_serves_and_says_so(w: World, tmp_path: Path) -> None:
    (tmp_path / "limits").mkdir()
    target = await w.target("a")
    agent = await w.agent("--limits-file", str(tmp_path / "limits"), clean_exit=False)
    await agent.push(target.json, access={"keys": [alice(requests_per_minute=1)]})
    assert await statuses(agent, 2) == [200, 429]
    assert "limits of API keys are per process" in agent.log.read_text()


FILES = {
    "named": (("--limits-file", "l", "--table-file", "t"), "l"),
    "a port of several": (("--reuse-port", "--port", "81", "--table-file", "t"), str(shared_path("default", 81))),
    "beside the table": (("--table-file", "t", "--handover-socket", "h"), "t.limits"),
    "beside the handover socket": (("--handover-socket", "h"), "h.limits"),
    "any port of several": (("--reuse-port", "--port", "0"), None),
    "alone": (("--port", "81"), None),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_agents_of_one_port_find_the_same_file(case: str) -> None:
    arguments, path = FILES[case]
    given = _parser().parse_args(arguments)
    assert _shared_file(given, "limits", given.limits_file) == (None if path is None else Path(path))
    usage = (
        None if path in (None, "l") else Path(path).with_suffix(".usage")
    )  # --limits-file names no other file
    assert path == "l" or _shared_file(given, "usage", given.usage_file) == usage


def test_another_service_or_port_has_another_file() -> None:
    assert len({shared_path(*one) for one in (("a", 80), ("b", 80), ("a", 81))}) == 3
