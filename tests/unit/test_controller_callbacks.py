"""`event_callback`: one command for each event, in order, at least once, and never in the way of a tick."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from policies.goals import UpdateMode
from skyserve_cli.controller.callbacks import (
    AT_ONCE,
    FAILED,
    MOST_WAITING,
    Callback,
    Callbacks,
    variables_of,
)
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.secret_box import SecretBox
from skyserve_cli.controller.shell_commands import CommandRunner
from skyserve_cli.spec import spec_to_json
from skyserve_cli.spec.load import load_text
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord, StoredEvent

KEY = base64.urlsafe_b64encode(b"k" * 32)


class World:
    """Callbacks whose threads are stepped by hand."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(Database("sqlite://"))
        self.seal = SecretBox(KEY)
        self.position = folder / "callbacks.json"
        self.why = ""
        self.tasks: list[Callable[[], None]] = []
        self.ran: list[str] = []
        self.callbacks = self.fresh()

    def now(self) -> float:
        return 5.0

    def fresh(self) -> Callbacks:
        """Also what a controller has that was killed and started again."""
        self.tasks = []
        specs = SpecCache(self.store, self.seal)
        return Callbacks(self.store, specs, self, self.position, run=self._run, submit=self.tasks.append)

    def _run(self, callback: Callback) -> str:
        self.ran.append(f"{callback.event.service}: {callback.event.record.message}")
        return self.why

    def up(self, name: str, command: str | None = "x", mode: UpdateMode | None = None) -> None:
        extra = "" if command is None else f"event_callback: '{command}'\n"
        spec = spec_to_json(
            load_text(f"service: {{}}\nrun: x\nenvs: {{A: b}}\nsecrets: {{S: t}}\n{extra}").spec
        )
        self.store.put_service(name, spec, replica_hash="h", sealed_secrets=self.seal.close({"S": "t"}),
                               lb_port=1, target=1, mode=mode, now=1.0)  # fmt: skip

    def tell(self, name: str, *messages: str, kind: str = "note") -> None:
        for message in messages:
            self.store.append_event(EventRecord(kind, message, 7, "READY"), now=2.0, service=name)

    def finish(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.callbacks.step()  # what happened before there was a controller is not reported
    return world


def test_each_event_of_a_service_with_a_command_runs_it_in_order(world: World) -> None:
    world.up("a")
    world.up("b", None)
    world.tell("a", "one", "two")
    world.tell("b", "not this")
    world.tell("", "nor this")
    world.tell("a", "nor a step of a start", kind="Progressed")
    world.callbacks.step()
    assert len(world.tasks) == 1, "one at a time of one service"
    world.finish()
    assert world.ran == ["a: up: version 1", "a: one", "a: two"]
    world.callbacks.step()
    assert world.tasks == []


def test_services_wait_for_each_other_only_beyond_a_number(world: World) -> None:
    for name in "abcdef":
        world.up(name)
        world.tell(name, "one")
    world.callbacks.step()
    world.callbacks.step()
    assert len(world.tasks) == AT_ONCE
    world.finish()
    assert sorted(world.ran) == sorted(
        f"{name}: {what}" for name in "abcdef" for what in ("up: version 1", "one")
    )


def test_an_event_is_run_for_again_if_the_controller_died_before_its_end(world: World) -> None:
    world.up("a")
    world.tell("a", "one", "two")
    world.callbacks.step()
    world.tasks.pop(0)()  # the first ends, the second is under way
    later = world.fresh()
    later.step()
    world.finish()
    assert world.ran == ["a: up: version 1", "a: one", "a: two"]
    again = world.fresh()
    again.step()
    assert world.tasks == []


def test_a_queue_is_bounded_and_what_is_skipped_is_reported_once(world: World) -> None:
    world.up("a")
    world.callbacks.step()
    world.tell("a", *map(str, range(MOST_WAITING + 3)))
    world.callbacks.step()
    world.finish()
    assert world.ran[1] == "a: 3"
    assert len(world.ran) == MOST_WAITING + 1
    world.callbacks.step()
    assert [e.record.message.partition(" ")[0] for e in reports(world)] == ["3"]


def test_a_failure_is_reported_when_it_is_new(world: World) -> None:
    world.up("a")
    world.tell("a", "one", "two")
    for why in ("exit code 3: no", "", "exit code 4"):
        world.why = why
        world.callbacks.step()
        world.finish()
        world.tell("a", "more", "and more")
    assert [event.record.message for event in reports(world)] == [
        "event_callback failed, for goal: exit code 3: no",
        "event_callback failed, for note: exit code 4",
    ]
    assert {event.service for event in reports(world)} == {"a"}
    assert not any("event_callback failed" in line for line in world.ran)


def test_an_update_changes_the_command_and_the_last_events_of_a_service_run_it(world: World) -> None:
    world.up("a", None)
    world.callbacks.step()
    world.up("a", "y", UpdateMode.ROLLING)
    world.store.set_down("a", purge=False, now=3.0)
    assert world.store.services() == []
    world.callbacks.step()
    world.finish()
    assert world.ran == ["a: rolling update: version 2", "a: down"]


def test_a_damaged_position_is_that_of_a_first_start(world: World) -> None:
    world.up("a")
    for content in ("", "{}", '{"seq": 999999}'):
        world.position.write_text(content)
        later = world.fresh()
        later.step()
        assert world.tasks == []


def reports(world: World) -> list[StoredEvent]:
    return [event for event in world.store.events(None) if event.record.kind == FAILED]


EVENT = StoredEvent(9, 12.0, "chat", EventRecord("ProbePassed", 'it\'s "up" \0', 3, "READY"))


def test_the_variables() -> None:
    found = variables_of(EVENT)
    assert (found["SKYSERVE_SERVICE"], found["SKYSERVE_REPLICA_ID"], found["SKYSERVE_STATE"]) == (
        "chat",
        "3",
        "READY",
    )
    assert found["SKYSERVE_MESSAGE"] == 'it\'s "up" '
    assert (found["JOB_STATUS"], found["TASK_NAME"]) == ("READY", "chat")
    of_service = variables_of(replace(EVENT, record=EventRecord("goal", "down")))
    assert (of_service["SKYSERVE_REPLICA_ID"], of_service["JOB_STATUS"]) == ("", "goal")


VARIABLES = {"S": "t", **variables_of(EVENT)}


def test_a_command_sees_its_variables_and_no_key_of_a_cloud(tmp_path: Path) -> None:
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "AWS_SECRET_ACCESS_KEY": "k",
        "SKYSERVE_DB": "d",
    }
    assert CommandRunner(environ).execute("env > seen; pwd >> seen", VARIABLES) == ""
    seen = (tmp_path / "seen").read_text().splitlines()
    assert {"S=t", "SKYSERVE_STATE=READY", str(tmp_path)} <= set(seen)
    assert not [line for line in seen if line.startswith(("AWS_", "SKYSERVE_DB"))]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("exit 3", "exit code 3"),
        ("echo no such hook >&2; exit 1", "exit code 1: no such hook"),
        ("echo slow; exec sleep 600", "killed (it has 0.2 s): slow"),
        ("sleep 600 & exit 0", ""),
        ("if", "exit code 2: bash: -c: line 2: syntax error: unexpected end of file"),
    ],
)
def test_why_a_command_failed(text: str, why: str) -> None:
    found = CommandRunner({"PATH": "/usr/bin:/bin"}, timeout_s=0.2 if "exec" in text else 20.0).execute(
        text, VARIABLES
    )
    assert found.startswith(why[:20]) if "syntax" in why else found == why


def test_a_machine_without_the_programs_and_a_controller_that_stops() -> None:
    assert "timeout" in CommandRunner({"PATH": "/nowhere"}).execute("x", VARIABLES)
    stopped = CommandRunner({"PATH": "/usr/bin:/bin"})
    stopped.kill()
    assert stopped.execute("x", VARIABLES) == "the controller stops"
