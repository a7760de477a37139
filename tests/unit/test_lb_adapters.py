"""LoRA adapters: what one target has accepted reaches all others, and those that join later."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lb.config.options import Pushing, PushMode
from lb.config.schema import Table, Target
from lb.core.adapters import LISTED_AFTER_S, LOAD, UNLOAD, Adapters, Operation, read_operation
from lb.core.models import ModelList
from lb.core.target_state import Key
from lb.core.targets import TargetTable
from lb.engines.kinds import Fetched
from lb.proxy.adapter_sync import AdapterSync
from skyserve_cli.engine.errors import BadRequest, ModelNotFound
from skyserve_cli.engine.server import LoadedAdapters
from tests.unit.test_lb_intake import TWICE, Door, admitted, post, whole

A, B, C = Key("a", 1), Key("b", 2), Key("c", 3)
SQL = Operation(LOAD, "sql", b'{"lora_name": "sql", "lora_path": "/sql"}')
OFF = Operation(UNLOAD, "sql", b'{"lora_name": "sql"}')
BASE = frozenset({"llama"})


def loaded() -> Adapters:
    adapters = Adapters()
    adapters.accepted(SQL, A, BASE, (A, B), 0.0)
    return adapters


def test_what_one_target_accepted_is_repeated_on_the_others_and_on_those_that_join() -> None:
    adapters = loaded()
    assert adapters.next(A, BASE, 0.0) is None
    assert adapters.next(B, BASE, 0.0) == SQL
    assert adapters.applied(B, SQL, 200, 1.0)
    assert adapters.next(B, BASE, 1.0) is None
    assert adapters.next(C, BASE, 50.0) == SQL, "it has joined since"


@pytest.mark.parametrize(
    ("status", "settled", "again_after_s"),
    [
        (200, True, None),
        (400, True, None),  # it has it already
        (404, True, None),  # it has no such path
        (0, False, 4.0),
        (429, False, 4.0),
        (503, False, 4.0),
    ],
)
def test_what_fails_is_tried_again(status: int, settled: bool, again_after_s: float | None) -> None:
    adapters = loaded()
    adapters.next(B, BASE, 0.0)
    assert adapters.applied(B, SQL, status, 0.0) is settled
    assert adapters.next(B, BASE, 3.9) is None
    if again_after_s is not None:
        assert adapters.next(B, BASE, again_after_s) == SQL


def test_one_that_was_started_again_gets_its_adapters_again() -> None:
    adapters = loaded()
    assert adapters.next(A, BASE, LISTED_AFTER_S - 1.0) is None, "the list may be an old one"
    assert adapters.next(A, BASE | {"sql"}, LISTED_AFTER_S) is None
    assert adapters.next(A, None, LISTED_AFTER_S) is None, "it lists nothing"
    assert adapters.next(A, BASE, LISTED_AFTER_S) == SQL


def test_targets_of_another_model_are_left_alone() -> None:
    adapters = loaded()
    assert adapters.next(B, frozenset({"mistral"}), 0.0) is None
    assert adapters.next(C, None, 0.0) == SQL, "an engine that lists no models may serve this one"


def test_unloading_reaches_those_that_are_there_and_is_forgotten_then() -> None:
    adapters = loaded()
    adapters.next(B, BASE, 0.0)
    adapters.applied(B, SQL, 200, 0.0)
    adapters.accepted(OFF, A, BASE | {"sql"}, (A, B), 5.0)
    assert adapters.next(C, BASE, 5.0) is None, "it never had it"
    assert adapters.next(B, BASE | {"sql"}, 5.0) == OFF
    adapters.retain((A, B, C))
    assert adapters
    adapters.applied(B, OFF, 200, 6.0)
    adapters.retain((A, B, C))
    assert not adapters


def test_loaded_adapters_outlive_the_agent_without_their_keys() -> None:
    adapters = loaded()
    adapters.accepted(SQL._replace(name="x", lines=b"Authorization: Bearer s\r\n"), A, BASE, (A,), 1.0)
    kept = json.dumps(adapters.to_json())
    assert "Bearer" not in kept
    again = Adapters()
    again.restore(json.loads(kept))
    assert again.next(A, BASE | {"sql", "x"}, 0.0) is None, "it has them"
    assert again.next(B, BASE, 0.0) == SQL
    assert again.next(C, frozenset({"mistral"}), 0.0) is None
    for wrong in ([1], [["a"]], [["a", 1]]):
        with pytest.raises(ValueError, match="not a list"):
            Adapters().restore(wrong)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (SQL.body, "sql"),
        (b'{"lora_name": ""}', None),
        (b'{"lora_name": 1}', None),
        (b"[1]", None),
        (b"{", None),
        (b'{"lora_name": "x", "pad": "' + b"x" * 20_000 + b'"}', None),
    ],
)
def test_a_request_about_an_adapter(body: bytes, name: str | None) -> None:
    found = read_operation(LOAD, body, b"")
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
def test_only_what_a_target_accepted_counts(status: bytes) -> None:
    door = Door("a")
    accepted: list[tuple[str, str]] = []
    door.plane.account.on_adapter = lambda one, target_id: accepted.append((one.name, target_id))
    connection, _ = door.send(post(LOAD.decode(), SQL.body, TWICE))
    assert connection.request is not None
    door.plane.answer("a", whole(b"done").replace(b"200 OK", status))
    door.plane.loop.settle()
    assert accepted == ([("sql", "a")] if status.startswith(b"200") else [])
    assert admitted(Door("a"), post("/v1/other", SQL.body)).arrival.adapter is None


async def test_all_targets_get_it(tmp_path: Path) -> None:
    """With engines' own rules: loading twice is an error, and so is unloading what is not there."""
    engines = {name: LoadedAdapters("llama") for name in "abc"}
    now, polled = 0.0, list[str]()
    file = tmp_path / "adapters.json"

    async def send(target: Target, path: str, body: bytes, timeout_s: float, lines: bytes) -> Fetched:
        await asyncio.sleep(0)
        engine = engines[target.id]
        try:
            text = (engine.load if path.encode() == LOAD else engine.unload)(json.loads(body))
        except (BadRequest, ModelNotFound):
            return Fetched(400, b"")
        return Fetched(200, text.encode())

    def table_of(names: str) -> Table:
        targets = tuple(Target(name, f"http://{name}:1") for name in names)
        return Table("s", "1", targets, pushing=Pushing(PushMode.BLIND))

    def names(one: str) -> list[object]:
        return [card["id"] for card in engines[one].cards({})]

    table = TargetTable(table_of("ab"), now)
    for key, _, _ in table.probe_list():
        table.listed(key, ModelList({"llama": b"{}"}))
    sync = AdapterSync(table, send, lambda: now, lambda key: polled.append(key.id), file)
    engines["a"].load(json.loads(SQL.body))
    sync.accepted(SQL, "a")
    for _ in range(5):
        await asyncio.sleep(0)
    assert (names("a"), names("b")) == (["sql"], ["sql"])
    assert polled == ["a", "b"], "their lists are read again"
    table.apply(table_of("abc"), now)
    again = AdapterSync(table, send, lambda: now, lambda key: polled.append(key.id), file)
    again.tick()
    for _ in range(5):
        await asyncio.sleep(0)
    assert [names(one) for one in "abc"] == [["sql"]] * 3, "of an agent that was started again"
    engines["b"].unload(json.loads(OFF.body))
    again.accepted(OFF, "b")
    for _ in range(5):
        await asyncio.sleep(0)
    assert [names(one) for one in "abc"] == [[], [], []]
    assert json.loads(file.read_text()) == []
    again.close()
