"""Notifications: conditions, time and form: values in, values out."""

from __future__ import annotations

import base64
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from policies.budget import Budget, affordable
from policies.model import ReplicaState
from policies.placement.base import PlannedLaunch
from skyserve_cli.config import ConfigError, load_config
from skyserve_cli.controller.notify.alarms import QUIET_S, Notice, decide
from skyserve_cli.controller.notify.conditions import (
    KINDS,
    SHORT_AFTER_S,
    Condition,
    of_services,
    of_store,
)
from skyserve_cli.controller.notify.message import (
    BadKeyError,
    body_of,
    headers_of,
    key_of,
    message_of,
    variables_of,
)
from skyserve_cli.state.outbox import Alarm, Key
from tests.unit.placement_world import an_offer
from tests.unit.test_controller_view import spot
from tests.unit.test_controller_view import view as service

NOW = 1_800_000_000.0
KEY = ("chat", "short")
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()


def view(**changed: Any) -> dict[str, Any]:
    well = {
        "name": "chat", "status": "READY", "ready": 2, "wanted": 2, "target": 2, "version": 3, "serving_version": 3,
        "failed_versions": [], "notes": "", "replicas": [], "load_balancers": [], "last_failure": None,
    }  # fmt: skip
    return {**well, **changed}


def replica(number: int, **changed: Any) -> dict[str, Any]:
    return {"id": number, "end_reason": None, "ended_at": None, "lease": None, **changed}


def test_a_version_that_crashes_is_notified_of_with_the_end_of_its_log() -> None:
    trial = {
        "version": 3,
        "short_lives": 2,
        "message": "version 3 crashes: 2 lives in a row",
        "next_launch_at": None,
    }
    gone = [
        replica(n, version=v, kept_log=log)
        for n, v, log in ((4, 3, "a"), (5, 3, "b"), (6, 3, None), (7, 2, "c"))
    ]
    crashing = view(trial=trial, replicas=gone)
    (condition,) = of_services([crashing], NOW, {"b": "Traceback\nno weights"}.__getitem__).values()
    assert condition == Condition("chat: version 3 crashes: 2 lives in a row\nTraceback\nno weights")
    assert of_services([view(trial=trial)], NOW) == {
        ("chat", "crashes"): Condition("chat: version 3 crashes: 2 lives in a row")
    }
    assert of_services([view(trial=None), view(trial={**trial, "short_lives": 1})], NOW) == {}


def preempted(number: int, ago_s: float) -> dict[str, Any]:
    return replica(number, end_reason="PREEMPTED", ended_at=NOW - ago_s)


# --- conditions ---------------------------------------------------------------------------------------------


def test_nothing_is_to_be_said_of_a_service_that_is_well() -> None:
    assert of_services([view()], NOW) == {}
    assert of_services([view(status="SHUTTING_DOWN", ready=0)], NOW) == {}


def test_each_kind_is_found_where_it_is_the_case() -> None:
    lease = {"visited_at": NOW - 400.0, "lease_s": 600.0}
    found = of_services(
        [
            view(ready=1, last_failure={"message": "no room", "reason": "CAPACITY"}),
            view(name="code", version=4, failed_versions=[4]),
            view(name="cut", replicas=[replica(7, lease=lease)]),
            view(name="storm", target=6, replicas=[preempted(n, 60.0 * n) for n in (1, 2, 3)]),
        ],
        NOW,
    )
    assert {key: condition.text for key, condition in found.items()} == {
        ("chat", "short"): "chat has 1 of 2 wanted replicas ready; the last failure: no room",
        ("code", "version_given_up"): "version 4 of code was given up; version 3 serves",
        (
            "cut",
            "cut_off",
        ): "the controller cannot reach 1 machines of cut (replicas 7); machines that it does not "
        "visit terminate themselves",
        (
            "storm",
            "preemptions",
        ): "storm has lost 3 replicas to preemptions within 10m; 2 of 2 wanted ones are ready",
    }


def test_a_few_preemptions_of_many_replicas_or_long_ago_are_no_storm() -> None:
    three = [preempted(n, 60.0 * n) for n in (1, 2, 3)]
    assert of_services([view(target=8, replicas=three)], NOW) == {}
    assert of_services([view(target=2, replicas=[*three[:2], preempted(3, 700.0)])], NOW) == {}


def test_what_the_policy_says_about_a_budget_is_found_in_the_notes() -> None:
    dear = an_offer("c/r/a", 10.0)
    _, note = affordable([PlannedLaunch(dear, "")], Budget(most=5.0, spent=1.0))
    ((key, condition),) = of_services([view(notes=f"something; {note}")], NOW).items()
    assert key == ("chat", "budget")
    assert note in condition.text
    _, warning = affordable([PlannedLaunch(dear, "")], Budget(most=11.0, spent=1.0))
    assert warning
    assert of_services([view(notes=warning)], NOW) == {}


def test_a_store_that_cannot_be_written_is_a_condition_of_the_controller() -> None:
    assert of_store({"store": {"ok": True, "since": NOW, "why": ""}}, NOW) == {}
    ((key, condition),) = of_store({"store": {"ok": False, "since": NOW - 5.0, "why": "full"}}, NOW).items()
    assert key == ("", "store")
    assert "for 5s: full" in condition.text


def test_the_views_of_the_api_have_what_is_read() -> None:
    """A replica that is not ready, of a real view."""
    found = of_services([service("risk_hedge", spot(1, ReplicaState.STARTING))], NOW)
    assert list(found) == [("chat", "short")]


# --- when ---------------------------------------------------------------------------------------------------


def run(steps: list[tuple[float, Condition | None]]) -> list[tuple[float, bool]]:
    """Return when a notification was sent, and whether it said that something begins."""
    alarms, sent = dict[Key, Alarm](), []
    for now, condition in steps:
        alarms, notices = decide(alarms, {KEY: condition} if condition else {}, now, KINDS)
        sent += [(now, notice.begins) for notice in notices]
    return sent


SHORT = Condition("short", SHORT_AFTER_S)


def test_a_condition_is_notified_of_once_it_has_lasted_and_when_it_is_over() -> None:
    steps: list[tuple[float, Condition | None]] = [(at * 60.0, SHORT) for at in range(30)]
    assert run([*steps, (1800.0, None), (1860.0, None)]) == [(600.0, True), (1800.0, False)]


def test_one_that_is_over_before_is_not_notified_of() -> None:
    assert run([(0.0, SHORT), (599.0, SHORT), (600.0, None), (601.0, SHORT), (1100.0, SHORT)]) == []


def test_one_that_stays_after_the_quiet_time_is_notified_of_then() -> None:
    at_once = Condition("x")
    steps = [(0.0, at_once), (1.0, None), (2.0, at_once), (QUIET_S - 1, at_once), (QUIET_S, at_once)]
    assert run(steps) == [(0.0, True), (1.0, False), (QUIET_S, True)]


def test_what_is_not_known_changes_nothing() -> None:
    alarms = {KEY: Alarm(1.0, 2.0, announced=True)}
    assert decide(alarms, {}, 5000.0, ["store"]) == (alarms, [])


@given(st.lists(st.tuples(st.floats(0.1, 400.0), st.booleans()), max_size=80))
def test_notifications_alternate_and_begin_at_most_once_per_quiet_time(
    moves: list[tuple[float, bool]],
) -> None:
    now, steps = 0.0, list[tuple[float, Condition | None]]()
    for pause, holds in moves:
        now += pause
        steps.append((now, Condition("x") if holds else None))
    sent = run(steps)
    assert [begins for _, begins in sent] == [number % 2 == 0 for number in range(len(sent))]
    begun = [at for at, begins in sent if begins]
    assert all(later - earlier >= QUIET_S for earlier, later in pairwise(begun))


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_a_clock_that_jumps_loses_no_condition_that_stays(jumps: list[float]) -> None:
    now, alarms, began = NOW, dict[Key, Alarm](), 0
    for jump in [*jumps, 0.0, QUIET_S + SHORT_AFTER_S, QUIET_S + SHORT_AFTER_S]:
        now += jump
        alarms, notices = decide(alarms, {KEY: SHORT}, now, KINDS)
        began += len(notices)
    assert began == 1


# --- form ---------------------------------------------------------------------------------------------------

MESSAGE = message_of(Notice("chat", "short", True, '<b> & "x" @everyone'), "m1", NOW)


def test_an_independent_reader_verifies_the_signature() -> None:
    body = body_of(MESSAGE, "json")
    now = time.time()  # the reader rejects old timestamps by the clock of the host
    headers = headers_of(MESSAGE, body, key_of(SECRET), now)
    assert Webhook(SECRET).verify(body, headers) == MESSAGE
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(body.replace(b"chat", b"code"), headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(base64.b64encode(b"x" * 32).decode()).verify(body, headers)


def test_bodies_of_chats_are_text_that_can_do_nothing() -> None:
    assert json.loads(body_of(MESSAGE, "slack")) == {"text": '&lt;b&gt; &amp; "x" @everyone'}
    assert json.loads(body_of(MESSAGE, "discord")) == {
        "content": '<b> & "x" @everyone',
        "allowed_mentions": {"parse": []},
    }


def test_a_command_gets_variables() -> None:
    assert variables_of(MESSAGE)["SKYSERVE_KIND"] == "short"
    assert "\0" not in variables_of({**MESSAGE, "text": "a\0b"})["SKYSERVE_MESSAGE"]


@pytest.mark.parametrize("text", ["", "not base64!", base64.b64encode(b"short").decode(), "whsec_", "ä"])
def test_a_bad_key_is_a_sentence_without_the_key(text: str) -> None:
    with pytest.raises(BadKeyError) as error:
        key_of(text)
    assert not text or text not in str(error.value)


# --- the configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("notify: [{name: a}]", "notify[0]: exactly one of webhook, webhook_file and command must be set"),
        ("notify: [{webhook: 'https://x'}]", "notify[0].name: is missing"),
        ("notify: [{name: a, webhok: 'https://x'}]", "notify[0].webhok: there is no such setting; did you mean \"webhook\"?"),
        ("notify: [{name: a, command: x, secret_file: /x}]", "notify[0]: secret_file and format are for webhooks"),
        ("notify: [{name: a, command: x}, {name: a, command: y}]", "notify: there are two destinations with the name a"),
        ("notify: [{name: a, webhook_file: x}]", "notify[0].webhook_file: x must be an absolute path"),
        ("notify: [{name: a, command: x, kinds: [sort]}]", "notify[0].kinds[0]: "),
        ("notify: [{name: a, webhook: 'https://user:password@x'}]", "notify[0].webhook: "),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_one_sentence_with_the_key(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "config.yaml")
    (line,) = str(error.value).splitlines()
    assert says in line
    assert "password" not in line


def test_destinations_choose_kinds_and_services(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "notify: [{name: a, command: x, kinds: [short, store], services: [chat]}, {name: b, command: x}]"
    )
    first, second = load_config(tmp_path / "config.yaml").notify
    assert first.accepts("short", "chat")
    assert first.accepts("store", "")
    assert not first.accepts("short", "code")
    assert not first.accepts("budget", "chat")
    assert second.accepts("budget", "code")
