"""Cloud calls: what each response means, one in flight per replica, and responses that wait for the tick."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import sleep

import pytest

from policies.model import (
    CapacityType,
    EndReason,
    Event,
    FailureKind,
    GaveUp,
    Launched,
    LaunchFailed,
    Offer,
    Progressed,
    Replica,
    ReplicaState,
    Terminated,
    Zone,
)
from provisioners.port.base import Instance, InstanceState, LaunchOrder, Provisioner
from provisioners.port.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    QuotaError,
    TransientError,
)
from skyserve_cli.controller.clouds.execute import (
    LONGEST_RETRY_S,
    MAX_LAUNCH_TRIES,
    Retry,
    backoff_s,
    perform,
)
from skyserve_cli.controller.clouds.operation_runner import OperationsInFlight, ThreadOperationRunner
from skyserve_cli.controller.reconcile.mappers import order_of, token_of
from skyserve_cli.controller.reconcile.ports import CloudOperation, OperationKind
from skyserve_cli.controller.secret_box import CannotUnsealError
from skyserve_cli.spec.model import ServiceSpec
from tests.clouds.fake import DEFAULT_PRICES, FakeProvisioner

OWNER = "0a1b2c3d"
OFFER = Offer(DEFAULT_PRICES[0].zone, "fake", None, 0.0, CapacityType.SPOT, 0.3)
SPEC = ServiceSpec("chat", "run")
L, A, T = OperationKind.LAUNCH, OperationKind.ATTEND, OperationKind.TERMINATE


def a_call(kind: OperationKind, replica_id: int = 1, instance_id: str | None = None) -> CloudOperation:
    state = ReplicaState.REQUESTED if kind is L else ReplicaState.TERMINATING
    return CloudOperation(
        "chat", "abcd", kind, Replica(replica_id, 1, OFFER, state, 0.0, 0.0, instance_id=instance_id)
    )


def token(call: CloudOperation) -> str:
    return token_of(OWNER, call.service, call.incarnation, call.replica.id, call.replica.offer)


def an_order(call: CloudOperation) -> LaunchOrder:
    return order_of(OWNER, call.service, call.incarnation, call.replica, SPEC, {})


def made(call: CloudOperation, cloud: Provisioner) -> Event | Retry | None:
    return perform(call, cloud, lambda: an_order(call), token(call), OWNER)


@pytest.fixture
def cloud() -> FakeProvisioner:
    return FakeProvisioner(lambda: 0.0)


def alive(cloud: FakeProvisioner) -> int:
    return sum(not instance.state.is_gone for instance in cloud.instances(OWNER))


# --- one call --------------------------------------------------------------------------------------------------


def test_an_accepted_launch(cloud: FakeProvisioner) -> None:
    assert made(a_call(L), cloud) == Launched(1, f"fake-{token(a_call(L))}")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (CapacityError("full", cloud="fake"), LaunchFailed(1, FailureKind.CAPACITY, "full")),
        (QuotaError("8 of 8", cloud="fake"), LaunchFailed(1, FailureKind.QUOTA, "8 of 8")),
        (QuotaError("8 of 8", cloud="fake", retry_at=9.0), LaunchFailed(1, FailureKind.QUOTA, "8 of 8", 9.0)),
        (AuthError("no right", cloud="fake"), LaunchFailed(1, FailureKind.AUTH, "no right")),
        (
            InvalidRequestError("no such type", cloud="fake"),
            LaunchFailed(1, FailureKind.CONFIG, "no such type"),
        ),
        (TransientError("503", cloud="fake", retry_after_s=7.0), Retry(7.0, "503")),
    ],
    ids=["capacity", "quota", "quota with a time", "permission", "wrong order", "transient"],
)
def test_what_a_failed_launch_means(
    cloud: FakeProvisioner, error: ProvisionError, outcome: Event | Retry
) -> None:
    cloud.fail_next_launch(error)
    assert made(a_call(L), cloud) == outcome
    assert alive(cloud) == 0


def test_secrets_that_cannot_be_opened_fail_the_version(cloud: FakeProvisioner) -> None:
    def sealed() -> LaunchOrder:
        raise CannotUnsealError("another key")

    outcome = perform(a_call(L), cloud, sealed, token(a_call(L)), OWNER)
    assert outcome == LaunchFailed(1, FailureKind.CONFIG, "another key")
    assert cloud.calls == []


def test_whoever_is_attended_is_launched_once_more_and_tells_nothing(cloud: FakeProvisioner) -> None:
    made(a_call(L), cloud)
    assert made(a_call(A, instance_id="fake-1"), cloud) is None
    assert cloud.calls == [("launch", token(a_call(L)))] * 2
    assert alive(cloud) == 1


def test_who_cannot_be_attended_now_is_asked_for_again_and_does_not_end(cloud: FakeProvisioner) -> None:
    cloud.fail_next_launch(AuthError("expired", cloud="fake"))
    assert isinstance(made(a_call(A), cloud), Retry)

    def sealed() -> LaunchOrder:
        raise CannotUnsealError("another key")

    assert perform(a_call(A), cloud, sealed, "t", OWNER) == Retry(LONGEST_RETRY_S, "another key")


@pytest.mark.parametrize("known", [True, False], ids=["by its id", "by its token"])
def test_terminate_finds_the_instance(cloud: FakeProvisioner, known: bool) -> None:
    launched = made(a_call(L), cloud)
    assert isinstance(launched, Launched)
    call = a_call(T, instance_id=launched.instance_id if known else None)
    assert made(call, cloud) == Terminated(1)
    assert alive(cloud) == 0


def test_terminate_after_a_lost_answer_leaves_nothing(cloud: FakeProvisioner) -> None:
    cloud.fail_next_launch(TransientError("lost", cloud="fake"), after_creation=True)
    assert isinstance(made(a_call(L), cloud), Retry)
    assert alive(cloud) == 1
    assert made(a_call(T), cloud) == Terminated(1)
    assert alive(cloud) == 0


def test_terminate_touches_no_other_replica(cloud: FakeProvisioner) -> None:
    made(a_call(L, 1), cloud)
    assert made(a_call(T, 2), cloud) == Terminated(2)
    assert alive(cloud) == 1
    assert ("terminate", token(a_call(L, 1))) not in cloud.calls


def test_terminate_of_what_is_gone_is_done(cloud: FakeProvisioner) -> None:
    made(a_call(L), cloud)
    assert [made(a_call(T), cloud), made(a_call(T), cloud)] == [Terminated(1)] * 2


class Refusing(FakeProvisioner):
    """Responds to no call but `launch`."""

    def __init__(self, error: ProvisionError) -> None:
        super().__init__(lambda: 0.0)
        self._error = error

    def instances(self, owner: str, service: str | None = None) -> Sequence[Instance]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "after_s"),
    [
        (TransientError("503", cloud="fake", retry_after_s=4.0), 4.0),
        (AuthError("no right", cloud="fake"), 1.0),
    ],
    ids=["transient", "permission"],
)
def test_a_terminate_that_fails_is_made_again(error: ProvisionError, after_s: float) -> None:
    assert made(a_call(T), Refusing(error)) == Retry(after_s, error.message)


def test_waits_double_up_to_half_a_minute() -> None:
    waits = [backoff_s(Retry(2.0, ""), tries) for tries in (1, 2, 3, 4, 5, 60)]
    assert waits == [2.0, 4.0, 8.0, 16.0, LONGEST_RETRY_S, LONGEST_RETRY_S]


# --- the book --------------------------------------------------------------------------------------------------


def test_a_call_under_way_is_not_started_again() -> None:
    book, call = OperationsInFlight(), a_call(L)
    assert book.startable([call], 0.0) == [call]
    assert book.startable([call], 1e9) == []
    assert book.startable([call, a_call(L, 2)], 1e9) == [a_call(L, 2)]


def test_terminate_waits_for_the_launch_to_answer() -> None:
    book, launch, terminate = OperationsInFlight(), a_call(L), a_call(T)
    book.startable([launch], 0.0)
    assert book.startable([terminate], 1.0) == []
    assert book.settled(launch, Launched(1, "i-1"), 2.0) == Launched(1, "i-1")
    assert book.startable([terminate], 3.0) == [terminate]


def test_terminate_does_not_wait_for_the_retry_of_a_launch() -> None:
    book, launch, terminate = OperationsInFlight(), a_call(L), a_call(T)
    book.startable([launch], 0.0)
    assert book.settled(launch, Retry(60.0, "503"), 1.0) is None
    assert book.startable([terminate], 1.0) == [terminate]


def test_a_launch_is_tried_again_after_its_wait_and_then_given_up() -> None:
    book, call, now = OperationsInFlight(), a_call(L), 0.0
    for tries in range(1, MAX_LAUNCH_TRIES):
        assert book.startable([call], now) == [call]
        assert book.settled(call, Retry(2.0, "503"), now) is None
        wait_s = backoff_s(Retry(2.0, ""), tries)
        assert book.startable([call], now + wait_s - 0.001) == []
        now += wait_s
    assert book.startable([call], now) == [call]
    assert book.settled(call, Retry(2.0, "503"), now) == GaveUp(
        1, EndReason.CLOUD_ERROR, "after 5 tries: 503"
    )


def test_a_terminate_is_never_given_up() -> None:
    book, call, now = OperationsInFlight(), a_call(T), 0.0
    for _ in range(50):
        assert book.startable([call], now) == [call]
        assert book.settled(call, Retry(1.0, "503"), now) is None
        now += LONGEST_RETRY_S


def test_a_call_that_is_not_asked_for_any_more_is_forgotten() -> None:
    book, call = OperationsInFlight(), a_call(L)
    book.startable([call], 0.0)
    book.settled(call, Retry(60.0, "503"), 0.0)
    book.startable([], 1.0)
    assert book.startable([call], 1.0) == [call]


# --- on threads ------------------------------------------------------------------------------------------------


class Gated(FakeProvisioner):
    """Launches wait until `gate` opens; `most` is how many waited at once, by token."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.gate = threading.Event()
        self.waiting: list[str] = []

    def launch(self, order: LaunchOrder) -> Instance:
        self.waiting.append(order.token)
        assert self.gate.wait(30)
        return super().launch(order)


class OrphanRemover:
    """A runner with everything it needs, on a clock that stands still."""

    def __init__(self, cloud: Provisioner, threads: int = 32) -> None:
        self.time = 0.0
        self.woken = threading.Event()
        self.allowed = {L, A, T}
        self.runner = ThreadOperationRunner(
            lambda name: cloud,
            an_order,
            OWNER,
            self,
            self.woken.set,
            allows=lambda kind: kind in self.allowed,
            threads=threads,
        )

    def now(self) -> float:
        return self.time

    def answers(self, count: int) -> list[Event]:
        """The next `count` events; fails if they do not come."""
        events: list[Event] = []
        eventually(lambda: len(events) >= count or events.extend(e for _, e in self.runner.drain()) or False)
        return events


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        sleep(0.005)
    raise AssertionError("it did not come to be")


@pytest.fixture
def gated() -> Iterator[Gated]:
    cloud = Gated()
    yield cloud
    cloud.gate.set()


def test_calls_for_different_replicas_run_side_by_side(gated: Gated) -> None:
    """All at once: a call never waits for another's response while there are threads to spare."""
    hands = OrphanRemover(gated)
    calls = [a_call(L, number) for number in range(20)]
    hands.runner.ensure(calls)
    eventually(lambda: len(gated.waiting) == 20)
    gated.gate.set()
    assert {event.replica_id for event in hands.answers(20)} == set(range(20))


def test_no_more_calls_at_once_than_threads(gated: Gated) -> None:
    hands = OrphanRemover(gated, threads=2)
    hands.runner.ensure([a_call(L, number) for number in range(5)])
    eventually(lambda: len(gated.waiting) == 2)
    gated.gate.set()
    assert len(hands.answers(5)) == 5


def test_a_cloud_that_does_not_answer_keeps_nobody_from_the_others(gated: Gated) -> None:
    other = FakeProvisioner(lambda: 0.0)
    runner_of = {"fake": gated, "elsewhere": other}
    hands = OrphanRemover(gated, threads=2)
    hands.runner._provisioners = runner_of.__getitem__
    hands.runner.ensure([a_call(L, number) for number in range(5)])
    eventually(lambda: len(gated.waiting) == 2)
    call = a_call(T, 9, "i-9")
    there = replace(call.replica.offer, zone=Zone("elsewhere", "r", "z"))
    hands.runner.ensure([call._replace(replica=replace(call.replica, offer=there))])
    assert [type(event) for event in hands.answers(1)] == [Terminated]
    gated.gate.set()


def test_a_thread_is_made_again_use_of(gated: Gated) -> None:
    gated.gate.set()
    hands = OrphanRemover(gated, threads=1)
    for number in range(5):
        hands.runner.ensure([a_call(L, number)])
        assert [event.replica_id for event in hands.answers(1)] == [number]


def test_ticks_while_a_call_is_under_way_do_not_repeat_it(gated: Gated) -> None:
    hands, call = OrphanRemover(gated), a_call(L)
    for _ in range(20):
        hands.runner.ensure([call])
    eventually(lambda: len(gated.waiting) == 1)
    gated.gate.set()
    eventually(hands.woken.is_set)
    hands.runner.ensure([call])  # the response is there, but no tick has taken it
    assert [type(event) for event in hands.answers(1)] == [Launched]
    assert gated.waiting == [token(call)]


def test_terminate_follows_the_launch_on_threads_as_well(gated: Gated) -> None:
    hands, launch = OrphanRemover(gated), a_call(L)
    hands.runner.ensure([launch])
    eventually(lambda: len(gated.waiting) == 1)
    hands.runner.ensure([a_call(T)])
    assert gated.calls == []
    gated.gate.set()
    (launched,) = hands.answers(1)
    assert isinstance(launched, Launched)
    hands.runner.ensure([a_call(T, instance_id=launched.instance_id)])
    assert hands.answers(1) == [Terminated(1)]
    assert [kind for kind, _ in gated.calls] == ["launch", "terminate"]


def test_a_retry_is_made_with_the_same_token(cloud: FakeProvisioner) -> None:
    hands, call = OrphanRemover(cloud), a_call(L)
    cloud.fail_next_launch(TransientError("lost", cloud="fake", retry_after_s=9.0), after_creation=True)
    hands.runner.ensure([call])
    eventually(hands.woken.is_set)
    assert hands.runner.drain() == [("chat", Progressed(1, "trying again: lost"))]
    hands.runner.ensure([call])
    assert len(cloud.calls) == 1
    hands.time = 9.0
    hands.runner.ensure([call])
    assert [type(event) for event in hands.answers(1)] == [Launched]
    assert cloud.calls == [("launch", token(call))] * 2
    assert alive(cloud) == 1


class Buggy(FakeProvisioner):
    """A plug-in with a defect."""

    def launch(self, order: LaunchOrder) -> Instance:
        raise ZeroDivisionError

    def terminate(self, instance: Instance) -> None:
        raise ZeroDivisionError


def test_a_defect_in_a_plug_in_does_not_lose_the_replica() -> None:
    hands, call = OrphanRemover(Buggy(lambda: 0.0)), a_call(L)
    for _ in range(MAX_LAUNCH_TRIES):
        hands.woken.clear()
        hands.runner.ensure([call])
        eventually(hands.woken.is_set)
        events = [event for _, event in hands.runner.drain()]
        hands.time += LONGEST_RETRY_S
    assert events == [GaveUp(1, EndReason.CLOUD_ERROR, "after 5 tries: ZeroDivisionError: ")]


def an_orphan(cloud: FakeProvisioner) -> Instance:
    cloud.launch(an_order(a_call(L)))
    return cloud.instances(OWNER)[0]


def test_an_orphan_is_terminated(cloud: FakeProvisioner) -> None:
    hands = OrphanRemover(cloud)
    hands.runner.abandon(an_orphan(cloud))
    eventually(lambda: alive(cloud) == 0)


def test_an_orphan_that_cannot_be_ended_costs_no_thread() -> None:
    orphan = replace(
        an_orphan(FakeProvisioner(lambda: 0.0)), state=InstanceState.RUNNING, zone=Zone("fake", "r", "z")
    )
    hands = OrphanRemover(Buggy(lambda: 0.0), threads=1)
    for number in range(3):
        hands.runner.abandon(replace(orphan, id=f"i-{number}"))
    hands.runner.ensure([a_call(T)])
    assert hands.answers(1) == [Terminated(1)]


# --- without a lease ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [L, T])
def test_a_call_that_is_not_allowed_is_not_made_and_does_not_count_as_a_try(kind: OperationKind) -> None:
    cloud = FakeProvisioner(lambda: 0.0)
    launched = cloud.launch(an_order(a_call(L))) if kind is T else None
    hands = OrphanRemover(cloud)
    call = a_call(kind, instance_id=None if launched is None else launched.id)
    hands.allowed.clear()
    for _ in range(MAX_LAUNCH_TRIES + 1):
        hands.woken.clear()
        hands.runner.ensure([call])
        assert hands.woken.wait(10.0)
        assert hands.runner.drain() == []
        hands.time += 1.0
    assert len([one for one in cloud.instances(OWNER) if not one.state.is_gone]) == (kind is T)
    hands.allowed |= {kind}
    hands.runner.ensure([call])
    assert [type(event) for event in hands.answers(1)] == [Launched if kind is L else Terminated]


def test_a_lease_that_runs_out_during_a_farewell_stops_the_termination() -> None:
    cloud = FakeProvisioner(lambda: 0.0)
    launched = cloud.launch(an_order(a_call(L)))
    hands = OrphanRemover(cloud)
    hands.runner._farewell = lambda *_: hands.allowed.discard(T)
    hands.runner.ensure([a_call(T, instance_id=launched.id)])
    assert hands.woken.wait(10.0)
    assert hands.runner.drain() == []
    assert [one.id for one in cloud.instances(OWNER) if not one.state.is_gone] == [launched.id]


def test_no_orphan_is_terminated_without_a_lease() -> None:
    cloud = FakeProvisioner(lambda: 0.0)
    orphan = cloud.launch(an_order(a_call(L)))
    hands = OrphanRemover(cloud)
    hands.allowed.discard(T)
    hands.runner.abandon(orphan)
    eventually(lambda: not hands.runner._abandoned)
    assert [one.id for one in cloud.instances(OWNER) if not one.state.is_gone] == [orphan.id]
    hands.allowed.add(T)
    hands.runner.abandon(orphan)
    eventually(lambda: all(one.state.is_gone for one in cloud.instances(OWNER)))
