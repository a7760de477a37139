"""Who serves which models: the lists, what follows from them, and what a request's body names."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from lb.config.options import Pushing, PushMode
from lb.config.schema import Readiness, Table, Target
from lb.core.models import ModelList, read_models
from lb.core.queue import RequestQueue
from lb.core.scheduler import Scheduler
from lb.core.targets import TargetTable
from lb.http.api_paths import names_a_model
from lb.stream import model_name
from lb.stream.openai_request import NOT_PARSED, read
from policies.routing.base import RequestView

LISTS_NONE, UNPOLLED = "-", "?"


def models(*names: str) -> ModelList:
    return ModelList({name: json.dumps({"id": name}).encode() for name in names})


def wire(*names: str, draining: str = "") -> Table:
    targets = tuple(
        Target(name, f"http://{name}:1", state=Readiness.DRAINING if name in draining else Readiness.READY)
        for name in names
    )
    return Table("s", "1", targets, pushing=Pushing(PushMode.FIXED_CAP, 1))


def listed(table: TargetTable, target_id: str, names: str) -> bool:
    """The target is polled and lists these one-letter names."""
    key = table.key(target_id)
    assert key is not None
    return table.listed(key, None if names == LISTS_NONE else models(*names))


def of(*lists: str) -> TargetTable:
    """Targets t0, t1, ... that list these models."""
    table = TargetTable(wire(*(f"t{n}" for n in range(len(lists)))), 0.0)
    for n, names in enumerate(lists):
        if names != UNPOLLED:
            listed(table, f"t{n}", names)
    return table


def offered(table: TargetTable, model: str) -> list[str]:
    barred = table.models.barred(model)
    return sorted(view.id for view in table.candidates(0.0, barred)[1])


@pytest.mark.parametrize(
    ("lists", "model", "ids", "missing"),
    [
        pytest.param(["a", "b"], "a", ["t0"], False, id="only the target that serves it"),
        pytest.param(["a", "b"], "b", ["t1"], False, id="the other model"),
        pytest.param(["a", "ab", "b"], "a", ["t0", "t1"], False, id="every target that serves it"),
        pytest.param(["a", "b"], "", ["t0", "t1"], False, id="no model named"),
        pytest.param(["a", "b"], "c", [], True, id="no target serves it"),
        pytest.param(["a", "a"], "c", ["t0", "t1"], False, id="all the same: the engine decides"),
        pytest.param(["a", "b", "-"], "c", ["t2"], False, id="one lists none: it may serve anything"),
        pytest.param(["a", "b", "?"], "c", ["t2"], False, id="one is not polled yet"),
        pytest.param(["a", "?"], "a", ["t0", "t1"], False, id="one that serves it and one not polled yet"),
        pytest.param(["a", "?"], "b", ["t1"], False, id="the new name during an update"),
        pytest.param(["-", "-"], "a", ["t0", "t1"], False, id="nobody lists models"),
        pytest.param(["?", "?"], "a", ["t0", "t1"], False, id="nothing is known yet"),
    ],
)
def test_who_is_offered_a_request_for_a_model(
    lists: list[str], model: str, ids: list[str], missing: bool
) -> None:
    table = of(*lists)
    assert (offered(table, model), table.models.missing(model)) == (ids, missing)


@pytest.mark.parametrize(
    ("lists", "mixed", "differ"),
    [
        (["a"], False, False),
        (["ab", "ba"], False, False),
        (["-", "-"], False, False),
        (["a", "b"], True, True),
        (["a", "-"], True, False),
        (["a", "?"], True, False),
        (["?"], True, False),
    ],
)
def test_nothing_is_looked_up_while_all_serve_the_same(lists: list[str], mixed: bool, differ: bool) -> None:
    table = of(*lists)
    assert (table.models.mixed, table.models.differ) == (mixed, differ)


def test_a_draining_target_serves_no_model() -> None:
    table = of("a", "b")
    table.apply(wire("t0", "t1", draining="t0"), 1.0)
    assert not table.models.mixed
    table.apply(wire("t0", "t1"), 2.0)  # it is back, and has to be polled again
    assert offered(table, "b") == ["t0", "t1"]
    listed(table, "t0", "a")
    assert offered(table, "b") == ["t1"]


def test_a_renewed_target_of_another_model_is_still_not_offered() -> None:
    table = of("a", "b")
    key = table.key("t1")
    assert key is not None
    assert offered(table, "a") == ["t0"]
    table.eject(key, 0.0)
    assert table.renew(key)
    assert offered(table, "a") == ["t0"]


@pytest.mark.parametrize(
    ("before", "after", "news"),
    [
        pytest.param(UNPOLLED, "a", False, id="the first list only takes away"),
        pytest.param(UNPOLLED, LISTS_NONE, False, id="nor does no list"),
        pytest.param("a", "a", False, id="the same"),
        pytest.param("ab", "a", False, id="fewer"),
        pytest.param("a", "ab", True, id="more"),
        pytest.param("a", "b", True, id="another"),
        pytest.param("a", LISTS_NONE, True, id="no longer a list"),
    ],
)
def test_a_list_is_news_if_it_serves_more(before: str, after: str, news: bool) -> None:
    table = of("c", before)
    assert listed(table, "t1", after) is news


def test_another_model_is_also_another_life() -> None:
    """Requests that were queued because it was not served may go there then."""
    table = of("a", "b")
    stale = table.models.barred("a")
    listed(table, "t1", "a")
    assert sorted(view.id for view in table.candidates(0.0, stale)[1]) == ["t0", "t1"]


@pytest.mark.parametrize(
    ("lists", "tried", "found"),
    [
        pytest.param(["b", "a"], ["t0"], True, id="another lists it"),
        pytest.param(["b", "?"], ["t0"], True, id="another is not polled yet"),
        pytest.param(["b", "-"], ["t0"], False, id="engines without lists: as they respond"),
        pytest.param(["b", "a"], ["t0", "t1"], False, id="all have been tried"),
        pytest.param(["b", "c"], ["t0"], False, id="nobody lists it"),
    ],
)
def test_a_request_goes_on_to_a_target_that_may_serve_its_model(
    lists: list[str], tried: list[str], found: bool
) -> None:
    table = of(*lists)
    epochs = {table.book(RequestView("r", "POST", "/"), one, 0.0).epoch for one in tried}
    assert table.models.served_elsewhere("a", epochs) is found


def test_the_union_has_each_name_once_with_the_entry_of_the_first_target() -> None:
    table = TargetTable(wire("t0", "t1"), 0.0)
    for target_id, owner, names in (("t0", "x", "ab"), ("t1", "y", "bc")):
        key = table.key(target_id)
        assert key is not None
        body = json.dumps({"object": "list", "data": [{"id": one, "owned_by": owner} for one in names]})
        table.listed(key, read_models(body.encode()))
    merged = json.loads(table.models.merged())
    assert merged["object"] == "list"
    assert [(one["id"], one["owned_by"]) for one in merged["data"]] == [("a", "x"), ("b", "x"), ("c", "y")]
    assert json.loads(table.models.entry("c") or b"{}") == {"id": "c", "owned_by": "y"}
    assert table.models.entry("d") is None


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b'{"object":"list","data":[{"id":"a"},{"id":"b","parent":"a"}]}', {"a", "b"}),
        (b'{"data":[{"id":"llama3:latest"}]}', {"llama3:latest", "llama3"}),
        (b'{"data":[{"id":1},{"name":"x"},"y",{"id":""},{"id":"a"}]}', {"a"}),
        (b'{"data":[]}', None),
        (b'{"models":["a"]}', None),
        (b'["a"]', None),
        (b"<html>", None),
        (b"", None),
        (b'{"data":[{"id":"a","x":' + b"[" * 300 + b"]" * 300 + b"}]}", None),
    ],
)
def test_what_a_response_lists(body: bytes, names: set[str] | None) -> None:
    found = read_models(body)
    assert (None if found is None else set(found.names)) == names


# --- the queue


@dataclass(eq=False)
class Request:
    """A request for a model, as the proxy makes its `tried` of what it does not serve."""

    table: TargetTable
    model: str
    view: RequestView = field(default_factory=lambda: RequestView("r", "POST", "/"))
    has_priority: bool = False
    queue_left_s: float = 60.0
    tenant: str = ""
    weight: float = 1.0
    policy: str | None = None
    pin: str = ""

    @property
    def tried(self) -> frozenset[int]:
        return self.table.models.barred(self.model)


class Desk:
    """A table of targets that take one request each, and its queue."""

    def __init__(self, *lists: str) -> None:
        self.table = of(*lists)
        self.queue: RequestQueue[Request] = RequestQueue()
        self.scheduler: Scheduler[Request] = Scheduler(self.table, self.queue)

    def come(self, model: str) -> str:
        """Where it goes; empty if it is held."""
        request = Request(self.table, model)
        choice = self.scheduler.place(request, 0.0)
        if choice is None:
            assert self.scheduler.enqueue(request, 0.0) is not None
            return ""
        self.table.book(request.view, choice.target_id, 0.0)
        return choice.target_id

    def let_in(self) -> list[tuple[str, str]]:
        gone = []
        for request, choice in self.scheduler.let_in(0.0):
            self.table.book(request.view, choice.target_id, 0.0)
            gone.append((request.model, choice.target_id))
        return gone


def test_held_requests_of_one_model_do_not_keep_those_of_another_waiting() -> None:
    desk = Desk("a", "b")
    assert [desk.come("a") for _ in range(3)] == ["t0", "", ""]
    assert desk.let_in() == []
    assert desk.come("b") == "t1"


@pytest.mark.parametrize("change", ["joins", "recovers"])
def test_nor_when_the_targets_of_the_other_model_change_meanwhile(change: str) -> None:
    desk = Desk("a", "b")
    assert [desk.come("a") for _ in range(2)] == ["t0", ""]
    if change == "joins":
        desk.table.apply(wire("t0", "t1", "t2"), 0.0)
        listed(desk.table, "t2", "b")
    else:
        key = desk.table.key("t1")
        assert key is not None
        desk.table.eject(key, 0.0)
        desk.table.renew(key)
    assert desk.come("b") in ("t1", "t2")
    assert desk.let_in() == []


def test_a_held_request_goes_to_a_target_that_serves_its_model_by_now() -> None:
    desk = Desk("a", "b")
    assert [desk.come("a") for _ in range(2)] == ["t0", ""]
    assert desk.let_in() == []
    assert listed(desk.table, "t1", "a")
    assert desk.let_in() == [("a", "t1")]


# --- what a body names


@pytest.mark.parametrize(
    ("body", "whole", "model"),
    [
        pytest.param(b'{"model":"a","messages":[{"model":"b"}]}', True, "a", id="parsed: its own"),
        pytest.param(b'{"messages":[{"model":"b"}]}', True, "", id="parsed: none of its own"),
        pytest.param(b'{"model":"a","input":"' + b"x" * 99, False, "a", id="the first part of a body"),
        pytest.param(
            b'{"model":"a","tools":[{"model":"b"}', False, "", id="two models in a part: not certain"
        ),
        pytest.param(
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n"model":"z"\r\n--x\r\n'
            b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n',
            False,
            "whisper",
            id="a form",
        ),
        pytest.param(
            b'--x\r\nContent-Disposition: form-data; name="model"\r\nContent-Type: text/plain\r\n\r\nw\r\n--x--',
            False,
            "w",
            id="a form whose field has a type",
        ),
        pytest.param(b"not json", True, "", id="neither"),
    ],
)
def test_the_model_that_a_body_names(body: bytes, whole: bool, model: str) -> None:
    parsed = read(body) if whole else NOT_PARSED
    assert model_name.model_of(parsed, body) == model


@pytest.mark.parametrize(
    ("body", "model", "means_it"),
    [
        (b'{"error":{"message":"The model `a/b` does not exist."}}', "a/b", True),
        (b'{"error":"model \\"a\\u0022\\" not found"}', "zz", False),
        (b'{"message":"The model `q\\"q` does not exist"}', 'q"q', True),
        (b'{"detail":"Not Found"}', "a/b", False),
        (b'{"detail":"Not Found"}', "", False),
        (b'{"detail":"Not Found"}', "a", False),
        (b"The model a.", "a", True),
    ],
)
def test_a_404_means_the_model_if_it_names_it(body: bytes, model: str, means_it: bool) -> None:
    assert model_name.names_model(body, model) is means_it


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (b"/v1/chat/completions", True),
        (b"/v1/audio/transcriptions", True),
        (b"/api/cars", False),
        (b"/", False),
    ],
)
def test_only_known_paths_name_models(path: bytes, named: bool) -> None:
    assert names_a_model(path) is named
