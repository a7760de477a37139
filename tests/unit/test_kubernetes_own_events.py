"""Events of ours on Pods: which there are, and that nothing depends on them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from policies.model import CapacityType, Zone
from provisioners.kubernetes.own_events import Note, OwnEvents, event_of, note_of
from provisioners.port.base import Instance, InstanceState
from provisioners.port.errors import AuthError, ProvisionError, TransientError
from tests.clouds.kubernetes.kube_schemas import check

S = InstanceState


def replica(state: InstanceState, message: str = "", preempt_at: float | None = None) -> Instance:
    return Instance(
        id="uid-1",
        token="chat-1",
        owner="me",
        service="chat",
        replica_id=1,
        zone=Zone("kubernetes", "prod", "a"),
        capacity_type=CapacityType.SPOT,
        state=state,
        preempt_at=preempt_at,
        message=message,
    )


LOST = "its node b1 has stopped responding"


@pytest.mark.parametrize(
    ("one", "before", "note"),
    [
        (replica(S.PENDING), {}, None),
        (replica(S.SETUP), {}, None),
        (replica(S.RUNNING), {}, None),
        (
            replica(S.RUNNING, preempt_at=130.0),
            {},
            Note("PreemptionNotice", "it will be gone in 30 s: no new requests are sent to it"),
        ),
        (
            replica(S.RUNNING, preempt_at=90.0),
            {},
            Note("PreemptionNotice", "it will be gone in 0 s: no new requests are sent to it"),
        ),
        (replica(S.BROKEN, LOST), {}, Note("Lost", LOST)),
        (replica(S.RUN_EXITED, "run exited with code 1"), {}, Note("Failed", "run exited with code 1")),
        (replica(S.SETUP_FAILED, "no image"), {}, Note("Failed", "no image")),
        (replica(S.STOPPING), {}, Note("Terminated", "by skyserve", is_warning=False)),
        (
            replica(S.STOPPING),
            {"PreemptionNotice": "soon", "Lost": LOST},
            Note("Terminated", f"by skyserve, after: {LOST}", is_warning=False),
        ),
    ],
)
def test_what_is_said_of_a_replica(one: Instance, before: dict[str, str], note: Note | None) -> None:
    assert note_of(one, before, 100.0) == note


def test_an_event_passes_the_schema_and_is_bounded() -> None:
    pod = {"metadata": {"name": "chat-1", "namespace": "ml", "uid": "0123456789"}}
    made = event_of("me", pod, Note("Failed", "x" * 5000), 1_800_000_000.0)
    check(made)
    assert made["metadata"]["name"] == "chat-1.failed.01234567"
    assert len(made["message"]) <= 1024


class Refusing:
    """An API, and the cache of its Pods, in which one Pod is lost."""

    def __init__(self, error: ProvisionError) -> None:
        self.error, self.calls = error, 0

    def create(self, *_: object) -> None:
        self.calls += 1
        raise self.error

    def server_s(self) -> None:
        return None

    def instances(self, _: str) -> list[Instance]:
        return [replica(S.BROKEN, LOST)]

    def pods(self, _: str) -> dict[int, Any]:
        return {0: {"metadata": {"name": "chat-1", "namespace": "ml", "uid": "uid-1"}}}


@pytest.mark.parametrize(("error", "pause_s"), [(TransientError, 60.0), (AuthError, 600.0)])
def test_a_call_that_fails_is_not_made_at_each_listing(error: type[ProvisionError], pause_s: float) -> None:
    cluster, now = Refusing(error("no", cloud="kubernetes")), [0.0]
    events = OwnEvents("prod", cast("Any", cluster), cast("Any", cluster), lambda: now[0], lambda: now[0])
    for at, calls in ((0.0, 1), (pause_s - 1.0, 1), (pause_s, 2)):
        now[0] = at
        events.visit("me")
        assert cluster.calls == calls
