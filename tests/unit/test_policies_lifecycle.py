"""The automaton: every listed pair leads to the state in the table, every other pair raises and names itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import get_args

import pytest

from policies.lifecycle import NOTICE_MARGIN_S, TRANSITIONS, InvalidTransition, apply, request, table
from policies.model import (
    Action,
    BootstrapFailed,
    Bootstrapped,
    CapacityType,
    Drain,
    Drained,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Launch,
    Launched,
    LaunchFailed,
    NodeLost,
    Offer,
    Preempted,
    PreemptionNotice,
    ProbeFailed,
    ProbePassed,
    Progressed,
    Replica,
    ReplicaState,
    RetireNotice,
    RunExited,
    Terminate,
    Terminated,
    Zone,
)

S = ReplicaState
NOW = 1000.0
OFFER = Offer(Zone("c", "r", "z"), "m", "L4", 1.0, CapacityType.SPOT, 0.3, 1.0)

CAUSES: dict[type, Event | Drain | Terminate] = {
    Launched: Launched(7, "i-7"),
    LaunchFailed: LaunchFailed(7, FailureKind.CAPACITY, "no room"),
    Progressed: Progressed(7, "running setup"),
    Bootstrapped: Bootstrapped(7, "http://h:1"),
    BootstrapFailed: BootstrapFailed(7, "setup: exit 1"),
    RunExited: RunExited(7, "exit 1"),
    ProbePassed: ProbePassed(7),
    ProbeFailed: ProbeFailed(7, "probe returned 503"),
    GaveUp: GaveUp(7, EndReason.START_TIMEOUT, "too late"),
    PreemptionNotice: PreemptionNotice(7, NOW + 30.0),
    RetireNotice: RetireNotice(7, NOW + 3600.0),
    Preempted: Preempted(7, message="taken"),
    NodeLost: NodeLost(7, "node 1 of 2 is gone"),
    Drained: Drained(7),
    Terminated: Terminated(7),
    Drain: Drain(7, EndReason.SCALED_DOWN, "too many", NOW + 120.0),
    Terminate: Terminate(7, EndReason.SCALED_DOWN, "too many"),
}

# Written out once more, by hand and by another order than the table's: for each cause, from where to where.
EXPECTED = """
Launched          REQUESTED>PROVISIONING TERMINATING>TERMINATING
LaunchFailed      REQUESTED>GONE PROVISIONING>TERMINATING STARTING>TERMINATING TERMINATING>GONE
Progressed        REQUESTED>REQUESTED PROVISIONING>PROVISIONING TERMINATING>TERMINATING
Bootstrapped      PROVISIONING>STARTING TERMINATING>TERMINATING
BootstrapFailed   PROVISIONING>TERMINATING TERMINATING>TERMINATING
RunExited         PROVISIONING>TERMINATING STARTING>TERMINATING READY>TERMINATING NOT_READY>TERMINATING
RunExited         DRAINING>TERMINATING TERMINATING>TERMINATING
ProbePassed       STARTING>READY READY>READY NOT_READY>READY DRAINING>DRAINING TERMINATING>TERMINATING
ProbeFailed       STARTING>STARTING READY>NOT_READY NOT_READY>NOT_READY DRAINING>DRAINING
ProbeFailed       TERMINATING>TERMINATING
GaveUp            REQUESTED>TERMINATING PROVISIONING>TERMINATING STARTING>TERMINATING READY>TERMINATING
GaveUp            NOT_READY>TERMINATING TERMINATING>TERMINATING
PreemptionNotice  PROVISIONING>TERMINATING STARTING>TERMINATING READY>READY NOT_READY>DRAINING
PreemptionNotice  DRAINING>DRAINING TERMINATING>TERMINATING
RetireNotice      PROVISIONING>PROVISIONING STARTING>STARTING READY>READY NOT_READY>NOT_READY
RetireNotice      DRAINING>DRAINING TERMINATING>TERMINATING
Preempted         PROVISIONING>GONE STARTING>GONE READY>GONE NOT_READY>GONE DRAINING>GONE TERMINATING>GONE
NodeLost          PROVISIONING>TERMINATING STARTING>TERMINATING READY>TERMINATING NOT_READY>TERMINATING
NodeLost          DRAINING>TERMINATING TERMINATING>TERMINATING
Drained           DRAINING>TERMINATING TERMINATING>TERMINATING
Terminated        TERMINATING>GONE
Drain             READY>DRAINING NOT_READY>DRAINING
Terminate         REQUESTED>TERMINATING PROVISIONING>TERMINATING STARTING>TERMINATING READY>TERMINATING
Terminate         NOT_READY>TERMINATING DRAINING>TERMINATING
"""


def _expected() -> dict[tuple[str, str], str]:
    pairs = {}
    for line in EXPECTED.strip().splitlines():
        cause, *arrows = line.split()
        for arrow in arrows:
            before, _, after = arrow.partition(">")
            pairs[before, cause] = after
    return pairs


LISTED = _expected()
UNLISTED = sorted(
    {(state.value, kind.__name__) for state, kind in product(S, CAUSES)} - LISTED.keys(),
)
BY_NAME = {kind.__name__: cause for kind, cause in CAUSES.items()}


def a_replica(state: ReplicaState, **more: object) -> Replica:
    replica = Replica(
        7, 1, OFFER, state, since=500.0, created_at=400.0, instance_id="i-7", endpoint="http://h:1"
    )
    return replace(replica, **more)  # type: ignore[arg-type]


def test_every_event_and_action_of_the_model_has_a_sample() -> None:
    known = set(get_args(Event)) | set(get_args(Action)) - {Launch}
    assert known == set(CAUSES)


@pytest.mark.parametrize(
    ("state", "cause", "after"),
    [(state, cause, after) for (state, cause), after in LISTED.items()],
    ids=[f"{state}-{cause}-{after}" for (state, cause), after in LISTED.items()],
)
def test_a_listed_pair_leads_where_it_should(state: str, cause: str, after: str) -> None:
    result = apply(a_replica(S(state)), BY_NAME[cause], NOW, 120.0)
    assert result.state is S(after)
    assert result.since == (500.0 if state == after else NOW)
    assert result.ended_at == (NOW if after == "GONE" else None)


@pytest.mark.parametrize(("state", "cause"), UNLISTED, ids=[f"{s}-{c}" for s, c in UNLISTED])
def test_an_unlisted_pair_raises_and_names_itself(state: str, cause: str) -> None:
    with pytest.raises(InvalidTransition) as raised:
        apply(a_replica(S(state)), BY_NAME[cause], NOW, 120.0)
    assert state in str(raised.value)
    assert cause in str(raised.value)
    assert "replica 7" in str(raised.value)


def _edges() -> Iterator[tuple[ReplicaState, ReplicaState]]:
    for state, answers in TRANSITIONS.items():
        for after in answers.values():
            if after is not state:
                yield state, after


def test_every_state_is_reached_from_requested_and_reaches_gone() -> None:
    reached = {S.REQUESTED}
    ending = {S.GONE}
    for _ in S:
        reached |= {after for before, after in _edges() if before in reached}
        ending |= {before for before, after in _edges() if after in ending}
    assert reached == set(S)
    assert ending == set(S)


def test_the_only_edge_back_is_not_ready_to_ready() -> None:
    order = {state: rank for rank, state in enumerate(S)}
    back = {(before, after) for before, after in _edges() if order[after] < order[before]}
    assert back == {(S.NOT_READY, S.READY)}


@pytest.mark.parametrize("state", [s for s in S if s not in (S.REQUESTED, S.GONE)], ids=lambda s: s.value)
def test_where_an_instance_exists_its_loss_ends_the_replica(state: ReplicaState) -> None:
    after = apply(a_replica(state), Preempted(7, message="taken"), NOW, 120.0)
    assert (after.state, after.end_reason, after.ended_at) == (S.GONE, EndReason.PREEMPTED, NOW)


@pytest.mark.parametrize("state", [s for s in S if s not in (S.TERMINATING, S.GONE)], ids=lambda s: s.value)
def test_terminate_is_accepted_wherever_an_instance_may_exist(state: ReplicaState) -> None:
    after = apply(a_replica(state), Terminate(7, EndReason.USER, "asked for"), NOW, 120.0)
    assert (after.state, after.end_reason, after.message) == (S.TERMINATING, EndReason.USER, "asked for")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param(S.REQUESTED, "running setup", id="while it is asked for"),
        pytest.param(S.PROVISIONING, "running setup", id="while it is brought up"),
        pytest.param(S.TERMINATING, "the disk is full", id="not over why it ends"),
    ],
)
def test_progress_is_the_message(state: ReplicaState, message: str) -> None:
    replica = a_replica(state, message="the disk is full")
    assert apply(replica, CAUSES[Progressed], NOW, 120.0) == replace(replica, message=message)  # type: ignore[arg-type]


def test_gone_answers_nothing() -> None:
    assert TRANSITIONS[S.GONE] == {}


def test_the_first_reason_to_end_is_kept() -> None:
    replica = apply(a_replica(S.READY), Drain(7, EndReason.REPLACED, "version 2", NOW + 60), NOW, 120.0)
    for cause in (RunExited(7, "exit 143"), Terminated(7)):
        replica = apply(replica, cause, NOW + 1, 120.0)
    assert (replica.state, replica.end_reason, replica.message) == (S.GONE, EndReason.REPLACED, "version 2")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FailureKind.CAPACITY, EndReason.CAPACITY),
        (FailureKind.QUOTA, EndReason.QUOTA),
        (FailureKind.AUTH, EndReason.AUTH),
        (FailureKind.REFUSED, EndReason.REFUSED),
        (FailureKind.CONFIG, EndReason.CONFIG),
        (FailureKind.TRANSIENT, EndReason.CLOUD_ERROR),
    ],
    ids=lambda value: value.value,
)
def test_a_failed_launch_ends_for_its_reason(kind: FailureKind, reason: EndReason) -> None:
    after = apply(a_replica(S.REQUESTED), LaunchFailed(7, kind, "why"), NOW, 120.0)
    assert (after.end_reason, after.message) == (reason, "why")


def test_a_lost_instance_is_not_a_preempted_one() -> None:
    assert apply(a_replica(S.READY), Preempted(7, lost=True), NOW, 120.0).end_reason is EndReason.LOST


@pytest.mark.parametrize(
    ("capacity_type", "reason"),
    [(CapacityType.SPOT, EndReason.PREEMPTED), (CapacityType.ON_DEMAND, EndReason.LOST)],
    ids=["spot", "on demand"],
)
@pytest.mark.parametrize("state", [S.PROVISIONING, S.STARTING, S.READY, S.NOT_READY, S.DRAINING])
def test_a_lost_node_ends_the_replica_and_what_is_left_of_it(
    state: ReplicaState, capacity_type: CapacityType, reason: EndReason
) -> None:
    gang = a_replica(state, offer=replace(OFFER, capacity_type=capacity_type))
    after = apply(gang, NodeLost(7, "node 1 of 2 is gone"), NOW, 120.0)
    assert (after.state, after.end_reason) == (S.TERMINATING, reason)
    assert (after.message, after.ended_at) == ("node 1 of 2 is gone", None)


def test_launched_remembers_the_instance_and_when_its_price_begins_even_while_terminating() -> None:
    for state in (S.REQUESTED, S.TERMINATING):
        after = apply(a_replica(state, instance_id=None), Launched(7, "i-9"), NOW, 120.0)
        assert (after.instance_id, after.launched_at) == ("i-9", NOW)


def test_ready_at_is_the_first_time() -> None:
    ready = apply(a_replica(S.STARTING), ProbePassed(7), NOW, 120.0)
    flapped = apply(apply(ready, ProbeFailed(7, "503"), NOW + 5, 120.0), ProbePassed(7), NOW + 9, 120.0)
    assert (ready.ready_at, flapped.ready_at, flapped.since) == (NOW, NOW, NOW + 9)


def test_an_event_that_changes_nothing_gives_the_same_object() -> None:
    ready, draining = a_replica(S.READY), a_replica(S.DRAINING, preempt_at=NOW + 30.0)
    assert apply(ready, ProbePassed(7), NOW, 120.0) is ready
    assert apply(draining, PreemptionNotice(7, NOW + 30.0), NOW, 120.0) is draining


@pytest.mark.parametrize(
    ("drain_timeout_s", "notice_s", "drain_by", "by"),
    [
        pytest.param(120.0, 30.0, None, NOW + 30.0 - NOTICE_MARGIN_S, id="the notice is shorter"),
        pytest.param(10.0, 30.0, None, NOW + 10.0, id="the drain time-out is shorter"),
        pytest.param(120.0, 30.0, NOW + 5.0, NOW + 5.0, id="it was draining already, and for less"),
        pytest.param(120.0, 30.0, NOW + 99.0, NOW + 30.0 - NOTICE_MARGIN_S, id="draining already, for more"),
    ],
)
def test_a_notice_ends_the_drain_before_the_kill(
    drain_timeout_s: float, notice_s: float, drain_by: float | None, by: float
) -> None:
    state = S.NOT_READY if drain_by is None else S.DRAINING
    after = apply(
        a_replica(state, drain_by=drain_by), PreemptionNotice(7, NOW + notice_s), NOW, drain_timeout_s
    )
    assert (after.state, after.drain_by, after.preempt_at) == (S.DRAINING, by, NOW + notice_s)
    assert after.end_reason is EndReason.PREEMPTED


def test_a_ready_replica_serves_on_after_a_notice() -> None:
    after = apply(a_replica(S.READY), PreemptionNotice(7, NOW + 120.0), NOW, 60.0)
    assert (after.state, after.drain_by, after.preempt_at) == (S.READY, None, NOW + 120.0)
    assert after.end_reason is EndReason.PREEMPTED


def test_a_launch_is_born_requested() -> None:
    born = request(Launch(3, OFFER, 2, "no replica there yet"), NOW)
    assert (born.id, born.version, born.state, born.created_at) == (3, 2, S.REQUESTED, NOW)
    unset = {f.name for f in fields(Replica) if getattr(born, f.name) is None}
    assert {"instance_id", "launched_at", "ready_at", "ended_at", "end_reason"} <= unset


def test_the_table_prints_every_pair() -> None:
    lines = {line.split()[0]: line for line in table().splitlines()}
    for (state, cause), after in LISTED.items():
        assert f"{cause} > {after}" in lines[state]
    assert "(final)" in lines["GONE"]
