"""One condition, one sentence, in every command."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from policies.model import Action, EndReason, Event
from skyserve_cli.commands import sentences
from skyserve_cli.commands.progress import event_line
from skyserve_cli.commands.sentences import EVENTS, end_of, exit_message, version_given_up, words
from skyserve_cli.commands.status_tables import tables
from skyserve_cli.controller.api.client import ControllerDownError
from tests.unit.test_cmd_status import replica, service, shown

COMMANDS = Path(sentences.__file__).parent
CODE = COMMANDS.parent


def texts(path: Path) -> list[str]:
    """The pieces of text in a module's code, docstrings left out."""
    tree = ast.parse(path.read_text())
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [str(node.value) for node in found if id(node) not in docs]


def story_kinds() -> set[str]:
    """Every kind of event that the code writes."""
    kinds = {one.__name__ for union in (Event, Action) for one in get_args(union)}
    for path in CODE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "EventRecord" and node.args:
                kind = node.args[0]
                if isinstance(kind, ast.Constant):
                    kinds.add(str(kind.value))
    return kinds


def test_every_kind_of_event_has_its_words_and_they_fit_the_column() -> None:
    assert story_kinds() <= set(EVENTS)
    assert max(map(len, EVENTS.values())) <= 16
    assert len(set(EVENTS.values())) == len(EVENTS)
    assert words("AgentLaunched") == "agent launched"


@pytest.mark.parametrize(
    "sentence",
    [
        sentences.NO_SERVICE,
        sentences.CONTROLLER_DOWN,
        sentences.STANDS_IN,
        sentences.GIVEN_UP,
        sentences.ONLY_HERE,
    ],
)
def test_a_sentence_stands_in_one_place(sentence: str) -> None:
    owners = [path.name for path in COMMANDS.glob("*.py") if any(sentence in text for text in texts(path))]
    assert owners == ["sentences.py"]


def test_the_error_of_every_command_begins_with_the_same_words() -> None:
    assert (ControllerDownError.__doc__ or "").lower().startswith(sentences.CONTROLLER_DOWN)


@pytest.mark.parametrize("reason", [each.value for each in EndReason])
@pytest.mark.parametrize("message", ["", "exit code 3: no weights"])
def test_an_end_reads_the_same_in_the_row_and_in_the_note(reason: str, message: str) -> None:
    """`logs --previous`, `up` and `update` print the sentence of the note."""
    gone = replica(4, "spot", "GONE", ended_at=5.0, end_reason=reason, message=message)
    view = service(gone)
    view["last_failure"] = {**gone, "replica_id": 4, "reason": reason}
    lines = shown(view, 250)
    said = end_of(reason, message)
    assert lines[-1].rstrip().endswith(f" {said}")
    assert f"chat: {exit_message(4, gone, reason)}" in lines
    assert exit_message(4, gone, reason).endswith(f"ended: {said}")


@pytest.mark.parametrize("kind", sorted(set(EVENTS) - {"Progressed"}))
def test_an_event_reads_the_same_in_events_and_while_waiting(kind: str) -> None:
    event = {"at": 0.0, "service": "chat", "replica_id": 3, "kind": kind, "state": "READY", "message": "m"}
    assert f"  {EVENTS[kind]} -> READY: m" in event_line(event, with_service=False)


def test_a_version_that_was_given_up() -> None:
    view = service(replica(1, "on_demand", stands_in=False))
    view |= {"failed_versions": [1]}
    assert f"chat: {version_given_up(1, serves=True)}" in shown(view)
    assert tables([], 0.0, wide=False)
