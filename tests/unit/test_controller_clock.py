"""Clocks that are set, and hosts that sleep: money, ages, waits and event times, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.model import CapacityType, EndReason, Memory, Offer, Replica, ReplicaState, Zone
from skyserve_cli.controller.reconcile.clock import JUMP_S, Steady, SteadyClock, SystemClock, steady_source
from skyserve_cli.controller.ticker import catch_up, follow_clock
from skyserve_cli.state.database import Database
from skyserve_cli.state.store import Store
from tests.clouds.schedules import examples

S = ReplicaState
HOUR = 3600.0
START = 1_700_000_000.0
OFFER = Offer(Zone("c", "r", "z"), "m", None, 0.0, CapacityType.SPOT, 1.0, 2.0)


class Host:
    """A computer whose clocks a test turns."""

    def __init__(self, *, counts_suspension: bool = True) -> None:
        self.wall, self.running, self.slept = START, 50.0, 0.0
        self.counts_suspension = counts_suspension
        self.clock = self.started()

    def started(self) -> SystemClock:
        """The clock of a controller that starts now."""
        return SystemClock(lambda: self.wall, self.steady())

    def steady(self) -> Steady:
        return Steady(
            lambda: self.running + self.slept * self.counts_suspension,
            counts_suspension=self.counts_suspension,
        )

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.running += seconds

    def sleeps(self, seconds: float) -> None:
        self.wall += seconds
        self.slept += seconds

    def is_set(self, by_s: float) -> None:
        self.wall += by_s


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store(Database("sqlite://"))
    yield store
    store.close()


def a_service(store: Store, now: float) -> None:
    """With a replica that runs and one that ended."""
    store.put_service(
        "chat", {}, replica_hash="h", sealed_secrets=b"", lb_port=1, target=1, mode=None, now=now
    )
    live = Replica(
        1, 1, OFFER, S.DRAINING, now, now, "i-1", launched_at=now, ready_at=now, drain_by=now + 60.0
    )
    live = replace(live, preempt_at=now + 90.0)
    gone = replace(
        live, id=2, state=S.GONE, launched_at=now - HOUR, ended_at=now, end_reason=EndReason.PREEMPTED
    )
    store.commit("chat", now=now, changed=[live, gone], memory=None, target=1, notes="", records=())


def usd(store: Store, clock: SystemClock) -> float:
    return store.spent(clock.now())["chat"].usd


def told(store: Store) -> list[str]:
    return [line.record.message for line in store.events(None) if line.record.kind == "clock"]


@pytest.mark.parametrize("counts", [True, False], ids=["a clock that counts suspension", "none that does"])
def test_a_host_that_slept_bills_what_the_cloud_bills(store: Store, counts: bool) -> None:
    host = Host(counts_suspension=counts)
    a_service(store, host.clock.now())
    host.passes(HOUR)
    assert usd(store, host.clock) == pytest.approx(2.0)
    host.sleeps(8 * HOUR)
    jumped = follow_clock(host.clock, store)
    assert host.clock.now() == pytest.approx(host.wall)
    assert usd(store, host.clock) == pytest.approx(10.0)
    assert jumped == pytest.approx(0.0 if counts else 8 * HOUR)
    assert told(store) == ([] if counts else ["clock jumped by +28800 s"])
    restarted = host.started()
    assert usd(store, restarted) == pytest.approx(10.0)


@pytest.mark.parametrize("by_s", [8 * HOUR, -8 * HOUR, 6.0, -6.0])
def test_a_clock_that_is_set_moves_what_lives_with_it(store: Store, by_s: float) -> None:
    host = Host()
    a_service(store, host.clock.now())
    host.passes(30.0)
    before, at = usd(store, host.clock), host.clock.now()
    host.is_set(by_s)
    assert host.clock.now() == at, "nothing jumps before the rows do"
    assert follow_clock(host.clock, store) == pytest.approx(by_s)
    assert host.clock.now() == pytest.approx(host.wall)
    assert usd(store, host.clock) == pytest.approx(before)
    assert told(store) == [f"clock jumped by {by_s:+.0f} s"]
    (row,) = store.services()
    (live,) = row.replicas
    ages = [host.clock.now() - one for one in (live.since, live.created_at, live.launched_at or 0.0)]
    assert ages == pytest.approx([30.0] * 3)
    assert (live.drain_by or 0.0) - host.clock.now() == pytest.approx(30.0), "no wait ends early or late"
    assert live.preempt_at == START + 90.0, "a cloud's word is about the cloud's time"
    gone = next(one for one in store.replicas("chat") if one.id == 2)
    assert (gone.launched_at, gone.ended_at) == (START - HOUR, START)
    assert store.events(None)[-1].at == pytest.approx(host.wall)
    assert follow_clock(host.clock, store) == 0.0
    assert usd(store, host.started()) == pytest.approx(before), "and it is so after a restart"


@pytest.mark.parametrize("by_s", [-8 * HOUR, -JUMP_S - 1.0])
def test_a_clock_that_was_set_back_while_no_controller_ran(store: Store, by_s: float) -> None:
    host = Host()
    a_service(store, host.clock.now())
    host.is_set(by_s)
    restarted = host.started()
    assert usd(store, restarted) >= 1.0, "nothing costs less than nothing"
    catch_up(restarted, store)
    host.passes(HOUR)
    assert usd(store, restarted) == pytest.approx(2.0)
    assert told(store) == [f"clock jumped by {by_s:+.0f} s"]
    catch_up(restarted, store)
    assert len(told(store)) == 1


def test_a_small_difference_is_left_alone(store: Store) -> None:
    host = Host()
    a_service(store, host.clock.now())
    for difference_s in (0.2, -0.4, 4.0, -6.0):
        host.is_set(difference_s)
        before = host.clock.now()
        host.passes(1.0)
        assert follow_clock(host.clock, store) == 0.0
        assert host.clock.now() == before + 1.0
    assert abs(host.clock.now() - host.wall) <= JUMP_S
    assert told(store) == []


def test_what_policies_remember_moves_as_well(store: Store) -> None:
    """Else a clock that is set back by eight hours would make a pause of a minute last for eight hours."""
    host = Host()
    a_service(store, host.clock.now())
    at = host.clock.now()
    rollout = {"failing": 1, "retry_at": at + 60.0, "failed": [3]}
    memory = Memory(7, {"blocks": [{"zone": "z", "until": at + 30.0, "rate": 0.5}]}, {"n": None}, rollout)
    store.commit("chat", now=at, changed=(), memory=memory, target=1, notes="", records=())
    host.is_set(-8 * HOUR)
    follow_clock(host.clock, store)
    (row,) = store.services()
    now = host.clock.now()
    assert row.memory.rollout["retry_at"] - now == pytest.approx(60.0)
    assert row.memory.placement["blocks"][0]["until"] - now == pytest.approx(30.0)
    assert (row.memory.next_replica_id, row.memory.scaling) == (7, {"n": None})
    assert row.memory.placement["blocks"][0]["rate"] == 0.5
    assert row.memory.rollout["failed"] == [3]


def test_a_steady_clock_counts_sleep_and_cannot_be_set() -> None:
    host = Host()
    clock = SteadyClock(host.steady())
    at = clock.now()
    host.passes(1.0)
    host.sleeps(HOUR)
    host.is_set(-9 * HOUR)
    assert clock.now() == at + HOUR + 1.0


def test_this_host_has_one_that_goes_on() -> None:
    source = steady_source()
    first = source.read()
    assert 0.0 < first <= source.read()
    assert SteadyClock().now() >= first


SECONDS = st.floats(0.0, 5 * HOUR)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("passes"), SECONDS),
        st.tuples(st.just("sleeps"), SECONDS),
        st.tuples(st.just("is_set"), st.floats(-24 * HOUR, 24 * HOUR)),
        st.tuples(st.just("is_set"), st.floats(-2 * JUMP_S, 2 * JUMP_S)),
        st.tuples(st.just("follows"), st.just(0.0)),
        st.tuples(st.just("restarts"), st.just(0.0)),
    ),
    max_size=25,
)


@pytest.mark.long
@settings(max_examples=examples(150), deadline=None)
@given(STEPS, st.booleans())
def test_usd_total_never_decreases(steps: list[tuple[str, float]], counts: bool) -> None:
    host, store = Host(counts_suspension=counts), Store(Database("sqlite://"))
    clock, last, real = host.clock, 0.0, 0.0
    a_service(store, clock.now())
    for what, seconds in steps:
        if what == "restarts":
            follow_clock(clock, store)  # one that is set while no controller runs is another test's
            clock = host.started()
            catch_up(clock, store)
        elif what == "follows":
            follow_clock(clock, store)
        else:
            getattr(host, what)(seconds)
            real += seconds if what != "is_set" else 0.0
        now_usd = usd(store, clock)
        # A new process knows the host's clock alone, which may be JUMP_S behind that of the last one.
        assert now_usd >= last - (JUMP_S / HOUR if what == "restarts" else 0.0) - 1e-6
        last = now_usd
    follow_clock(clock, store)
    follow_clock(clock, store)
    if counts:  # then every hour that passed has been billed, and no other
        assert usd(store, clock) == pytest.approx(1.0 + real / HOUR, abs=0.05)
    assert abs(clock.now() - host.wall) <= JUMP_S + 1e-3
    store.close()
