"""What a command says while it waits for the controller, and at its deadline."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from skyserve_cli.app import EXIT_CODES, exit_code
from skyserve_cli.controller.api.client import (
    ControllerClient,
    ControllerDownError,
    MisconfiguredError,
    RefusedError,
    UnreachableError,
    UnusableDatabaseError,
)
from skyserve_cli.controller.api.reasons import Reason, of_activity, of_home, of_stopping
from skyserve_cli.controller.api.remote import Remote
from skyserve_cli.controller.api.waiting import (
    ASK_TIMEOUT_S,
    NOTICE_AFTER_S,
    POLL_GRACE_S,
    DeadlineError,
    Waiting,
)
from skyserve_cli.home import Home

URL = "postgresql+psycopg://db/x"
DATABASE = {"url": URL, "slow_s": 0.0, "longest_s": 0.0, "ok": True, "why": "", "bad_s": 0.0}
LEADS = {"leads": True, "epoch": 1, "leader": "the controller on a", "unfit": ""}
TICK = {"for_s": 34.0, "service": "alpha", "turn_s": 33.0, "database_s": 0.0}
CALL = {"cloud": "aws", "kind": "terminate", "service": "bar", "replica_id": 3, "for_s": 14.0}


def activity(**changes: Any) -> dict[str, Any]:
    well: dict[str, Any] = {
        "pid": 1,
        "stopping": False,
        "database": DATABASE,
        "lease": LEADS,
        "tick": None,
        "clock_jump": None,
        "cloud_calls": [],
    }
    return {**well, **changes}


SLOW = {**DATABASE, "slow_s": 72.0}
AWAY = {**DATABASE, "ok": False, "why": "disk is full", "bad_s": 12.0}
JUMP = {"by_s": 3600.0, "ago_s": 12.0}
STANDS_BY = {**LEADS, "leads": False, "leader": "the controller on b"}


@pytest.mark.parametrize(
    ("found", "path", "sentence"),
    [
        pytest.param({}, "/v1/services", "it works on the request; its database responds, and no service stalls it", id="well"),
        pytest.param({"database": SLOW}, "", f"its database {URL} responds slowly or not at all, for 1m 12s", id="slow database"),
        pytest.param({"database": AWAY}, "", "it cannot read or write its state, for 12s (disk is full)", id="database away"),
        pytest.param({"tick": TICK}, "", "its processor is busy: the tick has decided about service alpha for 33s", id="one service"),
        pytest.param({"tick": {**TICK, "for_s": 1.0, "turn_s": 0.5}}, "/v1/plan", "it looks for places and prices", id="a usual tick"),
        pytest.param({"tick": {**TICK, "service": ""}}, "", "the tick has gone on for 34s", id="a long tick"),
        pytest.param({"tick": {**TICK, "database_s": 9.0}, "database": SLOW}, "", f"its database {URL} responds slowly or not at all, for 1m 12s", id="a tick that waits for the database"),
        pytest.param({"clock_jump": JUMP}, "", "the clock of its host was set by +3600 s, 12s ago", id="clock set"),
        pytest.param({"clock_jump": {**JUMP, "ago_s": 3600.0}}, "/v1/plan", "it looks for places and prices", id="clock set long ago"),
        pytest.param({"lease": STANDS_BY}, "/v1/events", "it stands by; the controller on b leads", id="stands by"),
        pytest.param({"lease": {**STANDS_BY, "leader": ""}}, "", "it stands by; no controller leads", id="no leader"),
        pytest.param({"lease": {**LEADS, "unfit": "its keys are old"}}, "", "it must not lead: its keys are old", id="unfit"),
        pytest.param({"cloud_calls": [CALL]}, "/v1/tidy", "it looks in the clouds for what is left of the services (meanwhile the terminate of replica 3 of bar has waited for aws for 14s)", id="cloud call"),
        pytest.param({"stopping": True, "database": SLOW}, "", "it is stopping", id="stopping"),
    ],
)  # fmt: skip
def test_what_a_controller_that_responds_waits_for(found: dict[str, Any], path: str, sentence: str) -> None:
    reason = of_activity(activity(**found), path)
    assert reason.sentence == sentence
    assert reason.next_step


def test_the_next_step_for_a_service_that_stalls_the_others_names_it() -> None:
    assert "`serve down alpha`" in of_activity(activity(tick=TICK)).next_step


@pytest.mark.parametrize(
    ("phase", "pid", "state", "kept", "sentence"),
    [
        pytest.param(None, None, "", False, "it is not running", id="none"),
        pytest.param(None, None, "", True, "it has no process, and its supervisor starts one", id="died"),
        pytest.param(("opening its database x", ""), 7, "S", True, "its process 7 has been opening its database x for 14s", id="starts"),
        pytest.param(("stopping", "the tick has gone on for 9s"), 7, "S", True, "its process 7 has been stopping for 14s: the tick has gone on for 9s", id="stops"),
        pytest.param(("stopping", ""), 7, "T", True, "its process 7 is stopped by a signal (state T)", id="frozen while it stops"),
        pytest.param(None, 7, "T", True, "its process 7 is stopped by a signal (state T)", id="frozen"),
        pytest.param(None, 7, "D", True, "its process 7 does not respond: it gets no CPU, or waits for a disk (state D)", id="silent"),
    ],
)  # fmt: skip
def test_what_a_controller_that_does_not_respond_waits_for(
    phase: tuple[str, str] | None, pid: int | None, state: str, kept: bool, sentence: str
) -> None:
    written = None if phase is None else {"pid": 7, "doing": phase[0], "detail": phase[1], "since": 86.0}
    reason = of_home(written, 100.0, pid, state, kept=kept)
    assert reason.sentence == sentence
    assert reason.next_step


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({"tick": TICK}, "the tick has decided about service alpha for 33s"),
        ({"tick": {**TICK, "database_s": 9.0}}, "the tick about service alpha has waited for the database for 9s"),
        ({"database": {**DATABASE, "longest_s": 8.0}}, f"a transaction of the database {URL} has gone on for 8s"),
        ({"tick": {**TICK, "for_s": 0.1, "turn_s": 0.1}, "database": {**DATABASE, "longest_s": 0.1}}, "its connections are being closed"),
        ({"cloud_calls": [CALL]}, "its connections are being closed (meanwhile the terminate of replica 3 of bar has waited for aws for 14s)"),
    ],
)  # fmt: skip
def test_what_a_stop_waits_for(found: dict[str, Any], sentence: str) -> None:
    assert of_stopping(activity(**found)) == sentence


# --- the command --------------------------------------------------------------------------------------------------


def test_a_command_that_waits_says_so_within_two_seconds() -> None:
    assert NOTICE_AFTER_S + ASK_TIMEOUT_S < 2.0


def test_each_reason_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyserve_cli.controller.api.waiting.NOTICE_AFTER_S", 0.0)
    monkeypatch.setattr("skyserve_cli.controller.api.waiting.LOOK_AGAIN_S", 0.001)
    said: list[str] = []
    two, asked = threading.Event(), iter(["a", "a", "b", "b", "b"])

    def why() -> Reason:
        kind = next(asked, "")
        if not kind:
            two.set()
            return Reason("b", "b", "")
        return Reason(kind, f"because of {kind}", "")

    waiting = Waiting(said.append)
    with waiting.noticed(why):
        assert two.wait(30.0)
    assert said == ["waiting for the controller: because of a", "waiting for the controller: because of b"]


def test_limits_of_all_calls_and_of_each() -> None:
    waiting = Waiting()
    assert waiting.allowance(30.0) == 30.0
    waiting.limit(1000.0)
    assert waiting.allowance(30.0) == 30.0
    with waiting.within(None, 600.0):
        assert waiting.allowance(30.0) == 600.0, "what waits for replicas waits for a slow database"
    with waiting.within(5.0, 600.0):
        assert 0.0 < waiting.allowance(30.0) <= 5.0 + POLL_GRACE_S
        text = str(
            waiting.overdue(4.3, "nothing was changed", Reason("x", "its database is slow", "check it"))
        )
        assert (
            text
            == "the controller has not done this within 5 s: its database is slow; nothing was changed; check it"
        )
        with waiting.within(100.0, 600.0):
            assert waiting.allowance(30.0) <= 5.0 + POLL_GRACE_S, "the first of the limits counts"
    assert waiting.allowance(30.0) == 30.0
    waiting.limit(0.0)
    assert waiting.allowance(30.0) == 0.0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ControllerDownError("x"), 1),
        (UnreachableError("x"), 1),
        (RefusedError(409, "x"), 1),
        (MisconfiguredError("x"), 2),
        (UnusableDatabaseError("x"), 4),
        (DeadlineError("x"), 124),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def test_each_exit_code_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "operations.md").read_text()
    assert all(f"\n| {code} | " in page for code in {*EXIT_CODES.values(), 0, 130})


def test_a_controller_elsewhere_that_takes_connections_and_responds_to_none(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        remote = Remote(f"http://127.0.0.1:{listener.getsockname()[1]}", "token")
        client = ControllerClient(Home.from_environment({"SKYSERVE_HOME": str(tmp_path)}), remote)
        client.waiting.limit(0.2)
        with pytest.raises(DeadlineError) as raised:
            client.services()
    assert str(raised.value).startswith(
        f"the controller has not done this within 0.2 s: {remote.url} takes connections and responds to none; "
    )
