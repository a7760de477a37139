"""What a listing of a cloud means for our replicas, and for machines without an owner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.goals import Goal, ScalingGoal
from policies.model import (
    BootstrapFailed,
    Bootstrapped,
    CapacityType,
    Event,
    FailureKind,
    LaunchFailed,
    Offer,
    Preempted,
    PreemptionNotice,
    Progressed,
    Replica,
    ReplicaState,
    RetireNotice,
    RunExited,
    Scope,
    Zone,
)
from provisioners.port.base import Instance, InstanceState
from provisioners.port.errors import Refusal
from skyserve_cli.controller.reconcile.listing_events import events_of, missing_from, orphans
from skyserve_cli.controller.reconcile.ports import InstanceListing
from skyserve_cli.controller.reconcile.transitions import TickTransitions

S, I = ReplicaState, InstanceState  # noqa: E741
ZONE = Zone("c", "r", "z")
SPOT = Offer(ZONE, "m", None, 0.0, CapacityType.SPOT, 0.3)
ON_DEMAND = replace(SPOT, capacity_type=CapacityType.ON_DEMAND)
ASKED_AT = 100.0
WITH_INSTANCE = (S.PROVISIONING, S.STARTING, S.READY, S.NOT_READY, S.DRAINING)


def a_replica(state: ReplicaState, **more: Any) -> Replica:
    plain = Replica(1, 1, SPOT, state, 0.0, 0.0, instance_id="i-1", launched_at=50.0)
    return replace(plain, **more)


def an_instance(state: InstanceState, **more: Any) -> Instance:
    plain = Instance("i-1", "t-1", "me", "chat", 1, ZONE, CapacityType.SPOT, state, endpoint="http://h:1")
    return replace(plain, **more)


def seen(replica: Replica, instance: Instance | None) -> list[Event]:
    return list(events_of([replica], {} if instance is None else {instance.id: instance}, ASKED_AT))


def kinds(events: list[Event]) -> str:
    return " ".join(type(event).__name__ for event in events)


TRUTH: dict[InstanceState | None, dict[ReplicaState, str]] = {
    None: dict.fromkeys(WITH_INSTANCE, "Preempted"),
    I.PENDING: {},
    I.UNSUPERVISED: {},
    I.SETUP: {},
    I.RUNNING: {S.PROVISIONING: "Bootstrapped"},
    I.SETUP_FAILED: {S.PROVISIONING: "BootstrapFailed"},
    I.RUN_EXITED: dict.fromkeys(WITH_INSTANCE, "RunExited"),
    I.BROKEN: dict.fromkeys(WITH_INSTANCE, "NodeLost"),
    I.STOPPING: dict.fromkeys(WITH_INSTANCE, "Preempted"),
    I.PREEMPTED: dict.fromkeys(WITH_INSTANCE, "Preempted"),
    I.TERMINATED: dict.fromkeys(WITH_INSTANCE, "Preempted"),
}


def test_the_truth_table_is_complete() -> None:
    assert set(TRUTH) == {None, *InstanceState}


@pytest.mark.parametrize("instance", list(TRUTH), ids=lambda i: i.value if i else "not listed")
@pytest.mark.parametrize("state", list(S), ids=lambda s: s.value)
def test_what_the_cloud_says_of_a_replica(state: ReplicaState, instance: InstanceState | None) -> None:
    events = seen(a_replica(state), None if instance is None else an_instance(instance))
    assert kinds(events) == TRUTH[instance].get(state, "")


@pytest.mark.parametrize("instance", [i for i in TRUTH if i], ids=lambda i: i.value)
@pytest.mark.parametrize("state", WITH_INSTANCE, ids=lambda s: s.value)
def test_a_notice_is_passed_on_while_it_can_matter(state: ReplicaState, instance: InstanceState) -> None:
    noticed = seen(a_replica(state), an_instance(instance, preempt_at=130.0))
    alive = instance in (I.PENDING, I.UNSUPERVISED, I.SETUP, I.RUNNING)
    assert (PreemptionNotice(1, 130.0) in noticed) is alive
    assert kinds(noticed).removesuffix("PreemptionNotice").strip() == TRUTH[instance].get(state, "")


@pytest.mark.parametrize(
    ("known", "events"),
    [
        pytest.param(None, [PreemptionNotice(1, 130.0)], id="new"),
        pytest.param(130.0, [], id="known"),
        pytest.param(140.0, [PreemptionNotice(1, 130.0)], id="moved"),
    ],
)
def test_a_notice_is_told_once(known: float | None, events: list[Event]) -> None:
    assert seen(a_replica(S.READY, preempt_at=known), an_instance(I.RUNNING, preempt_at=130.0)) == events


@pytest.mark.parametrize(
    ("known", "told", "events"),
    [
        pytest.param(None, 4000.0, [RetireNotice(1, 4000.0)], id="new"),
        pytest.param(None, 0.0, [], id="nothing is announced"),
        pytest.param(None, None, [], id="not known"),
        pytest.param(4000.0, None, [], id="not known any more"),
        pytest.param(4000.0, 3970.0, [], id="known"),
        pytest.param(4000.0, 3000.0, [RetireNotice(1, 3000.0)], id="sooner"),
        pytest.param(4000.0, 9000.0, [], id="later: another agent has counted anew"),
        pytest.param(4000.0, 0.0, [RetireNotice(1, None)], id="taken back"),
    ],
)
def test_what_is_announced_long_before_is_told_once(
    known: float | None, told: float | None, events: list[Event]
) -> None:
    assert seen(a_replica(S.READY, retire_at=known), an_instance(I.RUNNING, retire_at=told)) == events


@pytest.mark.parametrize(
    ("replica", "missing"),
    [
        pytest.param(a_replica(S.READY, launched_at=99.9), True, id="launched before the cloud was asked"),
        pytest.param(a_replica(S.READY, launched_at=100.0), False, id="launched when it was asked"),
        pytest.param(a_replica(S.READY, launched_at=100.1), False, id="launched since"),
        pytest.param(a_replica(S.READY, instance_id=None), False, id="no instance known"),
        pytest.param(
            a_replica(S.REQUESTED, instance_id=None, launched_at=None), False, id="not answered yet"
        ),
    ],
)
def test_who_is_missing_from_a_listing(replica: Replica, missing: bool) -> None:
    assert bool(seen(replica, None)) is missing


@pytest.mark.parametrize(
    ("offer", "instance", "lost"),
    [
        pytest.param(SPOT, None, False, id="spot, not listed: preempted"),
        pytest.param(SPOT, I.TERMINATED, False, id="spot, terminated: preempted"),
        pytest.param(ON_DEMAND, None, True, id="on demand, not listed: lost"),
        pytest.param(ON_DEMAND, I.STOPPING, True, id="on demand, stopping: lost"),
        pytest.param(ON_DEMAND, I.PREEMPTED, False, id="the cloud says preempted, whatever it is"),
    ],
)
def test_preempted_or_lost(offer: Offer, instance: InstanceState | None, lost: bool) -> None:
    listed = None if instance is None else an_instance(instance)
    (event,) = seen(a_replica(S.READY, offer=offer), listed)
    assert isinstance(event, Preempted)
    assert event.lost is lost
    assert event.message


@pytest.mark.parametrize("instance", [I.TERMINATED, I.STOPPING, I.BROKEN])
@pytest.mark.parametrize("offer", [SPOT, ON_DEMAND], ids=["spot", "on demand"])
@pytest.mark.parametrize("state", WITH_INSTANCE)
def test_a_death_at_birth_is_a_refusal_and_a_later_one_is_not(
    state: ReplicaState, offer: Offer, instance: InstanceState
) -> None:
    dead = an_instance(instance, message="no room", refusal=Refusal(FailureKind.CAPACITY, Scope.ZONE))
    (event,) = seen(a_replica(state, offer=offer), dead)
    if state in (S.PROVISIONING, S.STARTING):
        assert event == LaunchFailed(1, FailureKind.CAPACITY, "no room", scope=Scope.ZONE)
    else:
        assert not isinstance(event, LaunchFailed)


@pytest.mark.parametrize(("state", "lost"), [(S.STARTING, True), (S.READY, False)])
def test_a_spot_instance_that_was_terminated_before_it_was_ready_is_lost(
    state: ReplicaState, lost: bool
) -> None:
    (event,) = seen(a_replica(state), an_instance(I.TERMINATED))
    assert isinstance(event, Preempted)
    assert event.lost is lost


def test_events_carry_what_the_cloud_said() -> None:
    assert seen(a_replica(S.PROVISIONING), an_instance(I.RUNNING)) == [Bootstrapped(1, "http://h:1")]
    failed = an_instance(I.SETUP_FAILED, message="setup: exit 1")
    assert seen(a_replica(S.PROVISIONING), failed) == [BootstrapFailed(1, "setup: exit 1")]
    exited = an_instance(I.RUN_EXITED, message="exit 9")
    assert seen(a_replica(S.READY), exited) == [RunExited(1, "exit 9")]


@pytest.mark.parametrize("instance", [I.PENDING, I.SETUP], ids=lambda i: i.value)
@pytest.mark.parametrize(
    ("state", "known", "told"),
    [
        pytest.param(S.PROVISIONING, "waiting for ssh", True, id="news"),
        pytest.param(S.PROVISIONING, "running setup", False, id="known"),
        pytest.param(S.READY, "", False, id="too late to matter"),
    ],
)
def test_progress_is_told_once(state: ReplicaState, known: str, told: bool, instance: InstanceState) -> None:
    events = seen(a_replica(state, message=known), an_instance(instance, message="running setup"))
    assert events == [Progressed(1, "running setup")] * told


def test_running_without_an_address_is_not_set_up_yet() -> None:
    assert seen(a_replica(S.PROVISIONING), an_instance(I.RUNNING, endpoint=None)) == []


# --- orphans ---------------------------------------------------------------------------------------------------

LISTED = (
    an_instance(I.RUNNING, id="i-mine", token="t-mine"),
    an_instance(I.RUNNING, id="i-stray", token="t-stray"),
    an_instance(I.STOPPING, id="i-stopping", token="t-stopping"),
    an_instance(I.PREEMPTED, id="i-gone", token="t-gone"),
    an_instance(I.TERMINATED, id="i-dead", token="t-dead"),
)
MINE = frozenset({"t-mine"})


def test_an_orphan_is_a_suspect_first() -> None:
    found, suspects = orphans(InstanceListing("c", 1.0, LISTED), MINE, frozenset())
    assert found == []
    assert suspects == {"i-stray", "i-stopping"}


def test_a_suspect_that_is_seen_again_is_an_orphan() -> None:
    found, suspects = orphans(InstanceListing("c", 2.0, LISTED), MINE, frozenset({"i-stray", "i-other"}))
    assert [instance.id for instance in found] == ["i-stray"]
    assert suspects == {"i-stray", "i-stopping"}


def test_a_suspect_that_is_owned_or_gone_is_cleared() -> None:
    found, suspects = orphans(InstanceListing("c", 2.0, LISTED[:1]), MINE, frozenset({"i-mine", "i-stray"}))
    assert (found, suspects) == ([], frozenset())


@pytest.mark.parametrize(
    ("silent", "missing"), [((), True), (("r",), False), (("z",), False), (("other",), True)]
)
def test_a_replica_is_missing_only_if_its_region_responded(silent: tuple[str, ...], missing: bool) -> None:
    goal = Goal(1, ScalingGoal())
    change = TickTransitions([a_replica(S.READY)], goal, 200.0)
    listing = InstanceListing("c", ASKED_AT, (), silent=frozenset(silent))
    change.observe((), [listing])
    assert bool(change.events) is missing
    assert missing_from(listing, [a_replica(S.READY)]) is missing
