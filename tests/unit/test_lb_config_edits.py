"""Changes to a table by hand: a table in, a table out, or the sentence why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lb.config import edits as config_edits
from lb.config.decode import WireError
from lb.config.edits import KnownWorkerError, UnknownWorkerError
from lb.config.schema import Limits, Readiness, Table, Target

A = Target("a", "http://a:1", region="eu-1", state=Readiness.DRAINING, drain_deadline_s=30.0)
B = Target("b", "http://b:1")
TABLE = Table("chat", "pushed", (A, B), limits=Limits(hold_s=7.0))


def test_an_edit_changes_what_it_names_and_nothing_else() -> None:
    edited = config_edits.with_options(TABLE, {"policy": "round_robin", "limits": {"max_held": 5}})
    assert edited.policy == "round_robin"
    assert edited.limits == replace(TABLE.limits, max_held=5)
    assert replace(edited, policy=TABLE.policy, limits=TABLE.limits, revision="pushed") == TABLE


def test_an_edit_has_a_revision_of_its_own_which_tells_its_content() -> None:
    once, again = (config_edits.with_options(TABLE, {"policy": "round_robin"}) for _ in range(2))
    assert once.revision == again.revision
    assert once.revision not in ("pushed", config_edits.with_options(TABLE, {}).revision)
    back = config_edits.with_options(once, {"policy": TABLE.policy})
    assert back.revision == config_edits.with_options(TABLE, {}).revision


def test_what_options_shows_can_be_sent_back() -> None:
    assert config_edits.with_options(TABLE, config_edits.options(TABLE)).limits == TABLE.limits


def test_keys_are_replaced_as_a_whole() -> None:
    key = {"name": "alice", "sha256": "0" * 64}
    edited = config_edits.with_options(TABLE, {"access": {"keys": [key]}})
    assert [one.name for one in edited.access.keys] == ["alice"]
    assert config_edits.with_options(edited, {"access": {"keys": []}}).access.keys == ()


def test_drains_go_on_counting_while_other_things_are_edited() -> None:
    later = config_edits.aged(TABLE, 20.0)
    assert [target.drain_deadline_s for target in later.targets] == [10.0, None]
    assert [target.drain_deadline_s for target in config_edits.aged(TABLE, 99.0).targets] == [0.0, None]


def test_drained_and_back() -> None:
    drained = config_edits.drained(TABLE, "b", 5.0)
    assert config_edits.find(drained, "b") == replace(B, state=Readiness.DRAINING, drain_deadline_s=5.0)
    assert config_edits.find(config_edits.undrained(drained, "b"), "b") == B
    assert config_edits.find(config_edits.drained(TABLE, "b", None), "b").drain_deadline_s is None


def test_a_worker_gets_an_id_from_its_url() -> None:
    made, same, other = (
        config_edits.worker({"url": url}) for url in ("http://c:1", "http://c:1", "http://c:2")
    )
    assert made.id == same.id != other.id
    assert made.health_path == "/health"
    assert config_edits.worker(
        {"url": "http://c:1", "id": "c", "worker_type": "regular", "zone": "z"}
    ) == Target("c", "http://c:1", zone="z", health_path="/health")


def test_workers_come_and_go() -> None:
    more = config_edits.with_target(TABLE, config_edits.worker({"url": "http://c:1", "id": "c"}))
    assert [target.id for target in more.targets] == ["a", "b", "c"]
    assert config_edits.without_target(more, "a").targets == (B, more.targets[2])


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "unknown option": (lambda: config_edits.with_options(TABLE, {"limit": {}}), WireError, "limit: is not known"),
    "targets are no option": (lambda: config_edits.with_options(TABLE, {"targets": []}), WireError, "targets: is not known"),
    "unknown limit": (lambda: config_edits.with_options(TABLE, {"limits": {"hold": 1}}), WireError, "limits.hold"),
    "wrong type": (lambda: config_edits.with_options(TABLE, {"limits": 3}), WireError, "limits: expected an object"),
    "out of bounds": (lambda: config_edits.with_options(TABLE, {"limits": {"hold_s": -1}}), WireError, "limits.hold_s"),
    "null": (lambda: config_edits.with_options(TABLE, {"retries": {"jitter": None}}), WireError, "retries.jitter"),
    "wrong mode": (lambda: config_edits.with_options(TABLE, {"pushing": {"mode": "push"}}), WireError, "selective"),
    "not an object": (lambda: config_edits.with_options(TABLE, [1]), WireError, "expected an object"),
    "policy": (lambda: config_edits.with_options(TABLE, {"policy": 1}), WireError, "policy: expected a text"),
    "key by itself": (lambda: config_edits.with_options(TABLE, {"access": {"keys": [{"name": "a", "sha256": "sk-1"}]}}),
                      WireError, "access.keys[0].sha256"),
    "no url": (lambda: config_edits.worker({"id": "c"}), WireError, "url: is missing"),
    "bad url": (lambda: config_edits.worker({"url": "c:1"}), WireError, "url: must start"),
    "worker is no object": (lambda: config_edits.worker("http://c"), WireError, "expected an object"),
    "unknown field": (lambda: config_edits.worker({"url": "http://c", "modle": "x"}), WireError, "modle: is not known"),
    "prefill": (lambda: config_edits.worker({"url": "http://c", "worker_type": "prefill"}), WireError, "worker_type"),
    "grpc": (lambda: config_edits.worker({"url": "http://c", "connection_mode": "grpc"}), WireError, "connection_mode"),
    "another id": (lambda: config_edits.worker({"url": "http://c", "id": "x"}, "c"), WireError, "id: is 'c'"),
    "id changed": (lambda: config_edits.changed_worker(B, {"id": "x"}), WireError, "id: is 'b'"),
    "url changed": (lambda: config_edits.with_changed(TABLE, replace(B, url="http://c")), WireError, "url: stays"),
    "id taken": (lambda: config_edits.with_target(TABLE, Target("a", "http://c")), KnownWorkerError, "already exists"),
    "url taken": (lambda: config_edits.with_target(TABLE, Target("c", "http://a:1")), KnownWorkerError, "http://a:1"),
    "nobody to remove": (lambda: config_edits.without_target(TABLE, "x"), UnknownWorkerError, "x not found"),
    "nobody to drain": (lambda: config_edits.drained(TABLE, "x", None), UnknownWorkerError, "x not found"),
    "nobody to change": (lambda: config_edits.with_changed(TABLE, Target("x", "http://x")), UnknownWorkerError, "x not"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_where_and_why(case: str) -> None:
    edit, kind, words = REFUSED[case]
    with pytest.raises(kind) as error:
        edit()
    assert words in str(error.value)
