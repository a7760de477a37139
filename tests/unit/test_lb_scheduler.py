"""Go now or wait: no request is overtaken, none blocks another, and no policy is called in vain."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import lb.core.targets
from benchmarks.table_audit import audit
from lb.config.options import Limits, Pushing, PushMode
from lb.config.schema import Readiness, Table, Target
from lb.core.admission import EngineLoad
from lb.core.queue import RequestQueue
from lb.core.scheduler import Scheduler
from lb.core.target_state import TargetState
from lb.core.targets import Blame, Booking, TargetTable
from policies.routing.base import RequestView
from policies.routing.registry import UnknownPolicyError


@dataclass(eq=False)
class Request:
    view: RequestView
    tried: set[int] = field(default_factory=set)
    has_priority: bool = False
    queue_left_s: float = 1e6
    tenant: str = ""
    weight: float = 1.0
    policy: str | None = None
    pin: str = ""
    started: bool = False
    booking: Booking | None = None

    def __repr__(self) -> str:
        return self.view.id


counts_calls = pytest.mark.skipif(
    lb.core.targets.__file__.endswith(".so"),
    reason="calls within compiled classes cannot be counted by a subclass",
)


class Asked(TargetTable):
    """Counts how often it is queried whether a request could go."""

    times = 0

    def admits(self, now: float, exclude: Collection[int] = ()) -> bool:
        self.times += 1
        return super().admits(now, exclude)


def wire(*names: str, cap: int = 1, max_held: int = 1000) -> Table:
    targets = tuple(Target(name, f"http://{name}:1") for name in names)
    return Table(
        "s", "1", targets, limits=Limits(max_held=max_held), pushing=Pushing(PushMode.FIXED_CAP, cap)
    )


class House:
    """A table, a queue and their dispatcher, and what the owner does with them."""

    def __init__(self, table: Table, targets: TargetTable | None = None) -> None:
        self.table = targets or TargetTable(table, 0.0)
        self.queue: RequestQueue[Request] = RequestQueue()
        self.dispatcher: Scheduler[Request] = Scheduler(self.table, self.queue)
        self.now = 0.0

    def request(self, name: str, tenant: str = "", tried: tuple[Booking, ...] = ()) -> Request:
        return Request(RequestView(name, "POST", "/"), {booking.epoch for booking in tried}, tenant=tenant)

    def come(self, request: Request) -> str:
        """Where it goes; empty if it is held."""
        choice = self.dispatcher.place(request, self.now)
        if choice is None:
            assert self.dispatcher.enqueue(request, self.now) is not None
            return ""
        return self.go(request, choice.target_id)

    def go(self, request: Request, target_id: str) -> str:
        request.booking = self.table.book(request.view, target_id, self.now)
        return target_id

    def end(self, request: Request) -> None:
        assert request.booking is not None
        self.table.release(request.booking, self.now)

    def let_in(self) -> list[str]:
        return [f"{one}>{self.go(one, choice.target_id)}" for one, choice in self.dispatcher.let_in(self.now)]


def test_with_room_it_goes_at_once_and_without_it_waits() -> None:
    house = House(wire("a", "b"))
    requests = [house.request(name) for name in "123"]
    assert [house.come(one) for one in requests] == ["a", "b", ""]
    assert house.let_in() == []
    house.end(requests[1])
    assert house.let_in() == ["3>b"]
    assert len(house.queue) == 0


def test_nobody_overtakes_even_before_the_held_are_let_in() -> None:
    house = House(wire("a"))
    first = house.request("1")
    assert house.come(first) == "a"
    assert house.come(house.request("2")) == ""
    house.end(first)  # there is room, and it is the second's
    assert house.come(house.request("3")) == ""
    assert house.let_in() == ["2>a"]


def test_let_in_goes_on_while_there_is_room_oldest_first() -> None:
    house = House(wire("a", "b", cap=2))
    requests = [house.request(str(number)) for number in range(8)]
    assert [house.come(one) for one in requests] == ["a", "b", "a", "b", "", "", "", ""]
    for request in requests[:3]:
        house.end(request)
    assert house.let_in() == ["4>a", "5>b", "6>a"]
    assert [ticket.item.view.id for ticket in house.queue.walk()] == ["7"]


def test_tenants_take_turns() -> None:
    house = House(wire("a"))
    now_served = house.request("0")
    house.come(now_served)
    for name in ("a1", "a2", "a3", "b1"):
        assert house.come(house.request(name, tenant=name[0])) == ""
    order = []
    for _ in range(4):
        house.end(now_served)
        for now_served, choice in house.dispatcher.let_in(house.now):
            house.go(now_served, choice.target_id)
            order.append(now_served.view.id)
    assert order == ["a1", "b1", "a2", "a3"]


def test_who_has_tried_all_that_have_room_blocks_nobody() -> None:
    house = House(wire("a", "b", cap=2))
    failed = house.request("0")
    house.come(failed)
    burned = failed.booking
    assert burned is not None
    assert burned.key.id == "a"
    house.end(failed)
    fill = [house.request(name) for name in "12"]
    for request in fill:
        house.go(request, "b")
    stuck = house.request("3", tried=(burned,))
    assert house.come(stuck) == ""  # a has room, but has failed it
    assert house.come(house.request("4")) == "a"
    assert house.let_in() == []
    house.end(fill[0])
    assert house.come(house.request("5")) == ""  # now it could go, and is older
    assert house.let_in() == ["3>b", "5>a"]


def test_held_requests_wait_for_a_target_that_comes() -> None:
    house = House(wire())
    assert house.come(house.request("1")) == ""
    assert house.let_in() == []
    house.table.apply(wire("a", cap=9), 1.0)
    assert house.come(house.request("2")) == ""
    assert house.let_in() == ["1>a", "2>a"]


def test_time_alone_may_make_room() -> None:
    house = House(wire("a"))
    request = house.request("1")
    house.come(request)
    assert request.booking is not None
    house.table.failed(request.booking, Blame.EJECT, 0.0)
    house.end(request)
    house.table.apply(wire("a", "b"), 0.0)
    assert house.come(house.request("3")) == "b"
    assert house.come(house.request("4")) == ""  # a is out of favour, b is full
    assert house.let_in() == []
    house.now = 1.0
    assert house.let_in() == ["4>a"]


def test_a_look_at_an_engine_lets_in() -> None:
    table = wire("a")
    house = House(Table(table.service, "1", table.targets, pushing=Pushing()))
    ((key, _, _),) = house.table.probe_list()
    house.table.loaded(key, EngineLoad(5, 0), 0.0, 0.0)
    assert [house.come(house.request(name)) for name in "123456"] == ["a", "a", "a", "a", "", ""]
    assert not house.table.loaded(key, EngineLoad(8, 1), 0.1, 0.1)
    assert house.let_in() == []
    assert house.table.loaded(key, EngineLoad(9, 0), 0.2, 0.2)
    assert house.let_in() == ["5>a", "6>a"]


def test_a_policy_nobody_knows_is_refused_and_not_held() -> None:
    house = House(wire("a"))
    request = house.request("1")
    request.policy = "best"
    with pytest.raises(UnknownPolicyError):
        house.dispatcher.place(request, 0.0)


def test_no_place_in_a_full_room() -> None:
    house = House(wire(max_held=1))
    assert house.come(house.request("1")) == ""
    assert house.dispatcher.enqueue(house.request("2"), 0.0) is None


@counts_calls
def test_nobody_is_asked_twice_while_nothing_has_changed() -> None:
    asked = Asked(wire("a", "b"), 0.0)
    house = House(asked.table, asked)
    failed = house.request("0")
    house.come(failed)
    assert failed.booking is not None
    house.end(failed)
    house.go(house.request("1"), "b")
    stuck = house.request("stuck")
    stuck.tried = {failed.booking.epoch}
    assert house.come(stuck) == ""
    assert house.let_in() == []
    before = asked.times
    for _ in range(100):
        assert house.let_in() == []
        assert house.dispatcher.place(house.request("2"), 0.0) is not None
    assert asked.times == before
    house.table.apply(wire("a", "b", "c"), 0.0)
    assert house.let_in() == ["stuck>c"]


# --- pushing by work: requests wait for the target that is best for them

SHARED = b"a document " * 14_000  # 154 kB: 3.6 s of prefill at the rate that is assumed of new targets


def by_work(*names: str) -> House:
    targets = tuple(Target(name, f"http://{name}:1") for name in names)
    return House(Table("s", "1", targets, policy="gorgo", pushing=Pushing(PushMode.WORK)))


def asks(name: str, prompt: bytes) -> Request:
    return Request(RequestView(name, "POST", "/v1/chat/completions", prompt=prompt, scope="m"))


def pending(house: House, **counts: int) -> None:
    """The engines say so: with something pending their gates are closed."""
    house.now += 0.1
    for key, _, in_flight in house.table.probe_list():
        count = counts.get(key.id, 0)
        house.table.loaded(key, EngineLoad(max(0, in_flight - count), count), house.now, house.now)


def answer(house: House, request: Request) -> None:
    assert request.booking is not None
    house.now += 0.1
    house.table.responded(request.booking, house.now)


def busy_holder() -> tuple[House, list[Request]]:
    """`a` has computed SHARED and is at work for three seconds on a new prompt; `b` is idle."""
    house = by_work("a", "b")
    first = asks("first", SHARED)
    assert house.come(first) == "a"
    answer(house, first)
    house.end(first)
    work = [asks(f"work-{n}", bytes([65 + n]) * 80_000) for n in range(2)]
    for request in work:
        house.go(request, "a")
    pending(house, a=1)
    return house, work


def test_a_request_waits_for_the_busy_holder_although_another_is_idle() -> None:
    house, work = busy_holder()
    assert house.come(asks("hit", SHARED)) == ""
    assert house.let_in() == []
    for request in work:
        answer(house, request)
    assert house.let_in() == ["hit>a"]


def test_what_the_holder_spares_too_little_goes_to_the_idle_one() -> None:
    house, _ = busy_holder()
    assert house.come(asks("miss", b"something else " * 500)) == "b"


def test_with_nothing_pending_a_target_takes_what_is_best_off_there() -> None:
    house, _ = busy_holder()
    pending(house)
    assert house.come(asks("hit", SHARED)) == "a"


def test_what_waits_goes_to_another_once_its_target_is_gone() -> None:
    house, _ = busy_holder()
    assert house.come(asks("hit", SHARED)) == ""
    table = house.table.table
    house.table.apply(Table("s", "2", table.targets[1:], policy="gorgo", pushing=table.pushing), house.now)
    assert house.let_in() == ["hit>b"]


def test_what_waits_leaves_when_another_target_becomes_better() -> None:
    house, _ = busy_holder()
    assert house.come(asks("hit", SHARED)) == ""
    elsewhere = asks("elsewhere", SHARED)
    house.go(elsewhere, "b")  # by a request of another policy
    answer(house, elsewhere)
    house.end(elsewhere)
    assert house.let_in() == ["hit>b"]


@pytest.mark.parametrize("mode", [PushMode.SELECTIVE, PushMode.BLIND], ids=lambda mode: mode.value)
def test_by_other_rules_nobody_waits_for_one_target(mode: PushMode) -> None:
    house, _ = busy_holder()
    hit = asks("hit", SHARED)
    assert house.come(hit) == ""
    table = house.table.table
    house.table.apply(Table("s", "2", table.targets, policy="gorgo", pushing=Pushing(mode)), house.now)
    assert house.let_in() != []
    assert len(house.queue) == 0


def test_hits_overtake_misses_in_the_lane_of_one_target() -> None:
    house = by_work("a")
    first = asks("first", SHARED)
    assert house.come(first) == "a"
    answer(house, first)
    work = [asks(f"work-{n}", bytes([65 + n]) * 80_000) for n in range(2)]
    for request in work:
        house.go(request, "a")
    pending(house, a=1)
    assert [house.come(asks("miss", b"x" * 60_000)), house.come(asks("hit", SHARED))] == ["", ""]
    for request in work:
        answer(house, request)
    assert house.let_in() == ["hit>a", "miss>a"]


def streaming(house: House, target_id: str, count: int) -> list[Request]:
    """`count` short requests that the target has started to respond to; ones before them have lasted 10 s."""
    for number in range(3):
        earlier = asks(f"earlier-{number}", b"")
        house.go(earlier, target_id)
        answer(house, earlier)
        house.now += 10.0
        house.table.release(earlier.booking, house.now, 100)  # type: ignore[arg-type]
    streams = [asks(f"stream-{number}", b"") for number in range(count)]
    for stream in streams:
        house.go(stream, target_id)
        answer(house, stream)
    return streams


def test_a_full_batch_has_one_request_pending_and_no_more() -> None:
    """Ten streams of 10 s: one ends each second, so the engine does not run dry with one."""
    house = by_work("a")
    streams = streaming(house, "a", 10)
    house.go(asks("pending", b""), "a")
    house.now += 0.1  # later than its prefill takes
    pending(house, a=1)
    came = [house.come(asks(f"r{number}", b"")) for number in range(4)]
    assert came == ["", "", "", ""]
    house.now += 10.0
    house.end(streams[0])
    pending(house, a=0)
    assert house.let_in() == ["r0>a", "r1>a"]  # into the free seat, and to wait for the next


class Counted(Asked):
    """Counts how often the state of one target is read."""

    looks = 0

    def entry(self, target_id: str) -> TargetState | None:
        self.looks += 1
        return super().entry(target_id)


@counts_calls
def test_a_pass_looks_only_at_the_lanes_whose_target_was_heard_of() -> None:
    names = [f"t{number}" for number in range(50)]
    house = by_work(*names)
    house.table = counted = Counted(house.table.table, 0.0)
    house.dispatcher = Scheduler(house.table, house.queue)
    work = {}
    for number, name in enumerate(names):
        work[name] = asks(f"work-{name}", number.to_bytes(2, "big") * 50_000)
        house.go(work[name], name)
        house.go(asks(f"more-{name}", bytes([60 + number]) * 150_000), name)
    pending(house, **dict.fromkeys(names, 1))
    for name in names:
        assert house.come(asks(f"hit-{name}", work[name].view.prompt or b"")) == ""
    house.let_in()  # the first pass looks at all
    counted.looks = 0
    assert house.let_in() == []
    assert counted.looks == 0
    house.table.responded(work["t7"].booking, house.now)  # type: ignore[arg-type]
    house.let_in()
    assert 1 <= counted.looks <= 2
    house.now += 0.1
    house.let_in()
    assert counted.looks >= 50  # time may have made them ready


def test_a_pass_that_was_stopped_goes_on_where_it_was() -> None:
    """A turn of the event loop launches a few; the lanes that were not served have their turn in the next one."""
    house = by_work("a", "b")
    hits = []
    for number, name in enumerate(("a", "b")):
        first = asks(f"first-{name}", bytes([60 + number]) * 150_000)
        house.go(first, name)
        answer(house, first)
        house.end(first)
        house.go(asks(f"work-{name}", bytes([70 + number]) * 150_000), name)
        hits.append(asks(f"hit-{name}", first.view.prompt or b""))
    pending(house, a=1, b=1)
    assert [house.come(hit) for hit in hits] == ["", ""]
    house.let_in()  # the first pass looks at all
    pending(house)
    house.now -= 0.1  # no time for a pass that looks at all lanes
    going = house.dispatcher.let_in(house.now)
    first_out, _ = next(going)
    going.close()
    assert [request.view.id for request in (first_out,)] == ["hit-a"]
    assert house.let_in() == ["hit-b>b"]


@counts_calls
def test_those_who_have_tried_the_same_are_one_question_however_many_they_are() -> None:
    asked = Asked(wire("a", "b"), 0.0)
    house = House(asked.table, asked)
    failed = house.request("0")
    house.come(failed)
    assert failed.booking is not None
    house.end(failed)
    served = house.request("1")
    house.go(served, "b")
    for number in range(500):
        assert house.come(house.request(f"stuck{number}", tried=(failed.booking,))) == ""
    before = asked.times
    assert house.come(house.request("2")) == "a"
    assert asked.times - before <= 1
    house.end(served)
    before = asked.times
    assert house.let_in() == ["stuck0>b"]
    assert asked.times - before <= 2


class Crowd(RuleBasedStateMachine):
    """Whatever happens: no request is let in past another of its tenant that could have gone, every request that is let in has room,
    and with everything ended and time passing all are served."""

    names = st.sampled_from("abc")

    @initialize(cap=st.integers(1, 2))
    def start(self, cap: int) -> None:
        self.cap = cap
        self.house = House(wire("a", "b", cap=cap))
        self.number = 0
        self.running: list[Request] = []
        self.held: list[Request] = []

    @rule(tenant=st.sampled_from("xy"), tries=st.booleans())
    def come(self, tenant: str, tries: bool) -> None:
        self.number += 1
        tried = tuple(one.booking for one in self.running[:1] if one.booking) if tries else ()
        request = self.house.request(f"{tenant}{self.number}", tenant, tried)
        could = [one for one in self.held if self.could_go(one)]
        where = self.house.come(request)
        if where:
            assert could == []
            assert request.booking is not None
            assert request.booking.epoch not in request.tried
            self.running.append(request)
        else:
            self.held.append(request)

    def could_go(self, request: Request) -> bool:
        return bool(self.house.table.candidates(self.house.now, request.tried)[1])

    @rule()
    def let_in(self) -> None:
        for request, choice in self.house.dispatcher.let_in(self.house.now):
            older = self.held[: self.held.index(request)]
            assert not any(one.tenant == request.tenant and self.could_go(one) for one in older)
            self.held.remove(request)
            self.house.go(request, choice.target_id)
            self.running.append(request)
        assert not any(self.could_go(one) for one in self.held)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), blame=st.sampled_from(Blame))
    def end(self, data: st.DataObject, blame: Blame) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        assert request.booking is not None
        if blame is Blame.NONE:
            self.house.table.responded(request.booking, self.house.now)
        else:
            self.house.table.failed(request.booking, blame, self.house.now)
        self.house.end(request)

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.house.now += seconds

    @rule(states=st.dictionaries(names, st.sampled_from(Readiness)))
    def push(self, states: dict[str, Readiness]) -> None:
        targets = tuple(Target(name, f"http://{name}:1", state=state) for name, state in states.items())
        table = Table("s", "2", targets, pushing=Pushing(PushMode.FIXED_CAP, self.cap))
        self.house.table.apply(table, self.house.now)

    @invariant()
    def agrees(self) -> None:
        assert audit(self.house.table) == []
        assert len(self.house.queue) == len(self.held)
        for view in self.house.table.views(self.house.now):
            assert 0 <= view.waiting <= view.in_flight <= self.cap

    def teardown(self) -> None:
        for request in self.running:
            self.house.end(request)
        self.house.now += 1e4
        self.house.table.apply(wire("new", cap=1000), self.house.now)
        assert len(self.house.let_in()) == len(self.held)


TestCrowd = Crowd.TestCase
TestCrowd.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- requests that one target alone can serve


POLICIES = ("round_robin", "least_load", "gorgo", "cache_aware", "consistent_hash")


def pinned_house(policy: str = "least_load", cap: int = 1, *states: Readiness) -> House:
    states = states or (Readiness.READY, Readiness.READY)
    targets = tuple(
        Target(name, f"http://{name}:1", state=state) for name, state in zip("ab", states, strict=True)
    )
    pushing = Pushing(PushMode.FIXED_CAP, cap)
    return House(Table("s", "1", targets, policy, pushing=pushing))


def pinned(name: str, pin: str, tenant: str = "") -> Request:
    return Request(RequestView(name, "POST", "/v1/responses"), pin=pin, tenant=tenant)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pin", ["a", "b"])
def test_a_pinned_request_goes_to_its_target_by_every_policy(policy: str, pin: str) -> None:
    house = pinned_house(policy, 9)
    assert [house.come(pinned(str(number), pin)) for number in range(4)] == [pin] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_it_waits_for_its_target_although_another_has_room(policy: str) -> None:
    house = pinned_house(policy)
    first = pinned("1", "a")
    assert (house.come(first), house.come(pinned("2", "a"))) == ("a", "")
    assert house.let_in() == []
    assert house.come(house.request("3")) == "b"
    house.end(first)
    assert house.let_in() == ["2>a"]
    assert len(house.queue) == 0


@pytest.mark.parametrize("state", [Readiness.DRAINING, Readiness.UNHEALTHY])
def test_it_goes_to_a_target_that_takes_nothing_else(state: Readiness) -> None:
    house = pinned_house("least_load", 1, state, Readiness.READY)
    first = pinned("1", "a")
    assert (house.come(first), house.come(pinned("2", "a"))) == ("a", "")
    house.end(first)
    assert house.let_in() == ["2>a"]


def test_it_goes_to_a_target_that_is_left_out() -> None:
    house = pinned_house()
    key = house.table.key("a")
    assert key is not None
    house.table.eject(key, 0.0)
    assert house.come(house.request("1")) == "b"
    assert house.come(pinned("2", "a")) == "a"


def test_those_that_are_pinned_are_not_overtaken_at_their_target() -> None:
    house = pinned_house()
    first, second = pinned("1", "a"), house.request("2")
    assert [house.come(one) for one in (first, pinned("3", "a"), second)] == ["a", "", "b"]
    house.end(first)  # there is room, and it is that of the pinned one
    assert house.come(house.request("4")) == ""
    assert house.come(pinned("5", "a")) == ""
    assert house.let_in() == ["3>a"]
    house.end(second)
    assert house.let_in() == ["4>b"]


def test_pinned_requests_of_tenants_take_turns() -> None:
    house = pinned_house()
    running = pinned("0", "a")
    house.come(running)
    for name, tenant in (("1", "x"), ("2", "x"), ("3", "x"), ("4", "y")):
        assert house.come(pinned(name, "a", tenant)) == ""
    served = []
    for _ in range(4):
        house.end(running)
        running, choice = next(house.dispatcher.let_in(house.now))
        house.go(running, choice.target_id)
        served.append(running.view.id)
    assert served == ["1", "4", "2", "3"]


def test_a_pinned_request_whose_target_leaves_is_stranded() -> None:
    house = pinned_house()
    house.come(pinned("1", "a"))
    waiting = pinned("2", "a")
    assert house.come(waiting) == ""
    assert house.dispatcher.stranded() == []
    house.table.apply(wire("b"), 1.0)
    assert house.let_in() == []
    assert house.dispatcher.stranded() == [waiting]
    (ticket,) = house.queue.walk()
    house.queue.leave(ticket)
    assert house.dispatcher.stranded() == []


def test_it_does_not_wait_in_the_lane_of_a_policy_that_measures_work() -> None:
    """And so does not move to another target, however long that lane is."""
    house = pinned_house("gorgo")
    house.table.apply(Table("s", "2", house.table.table.targets, "gorgo"), 0.0)  # pushing by work
    key = house.table.key("a")
    assert key is not None
    house.table.loaded(key, EngineLoad(1, 5), 0.0, 0.0)
    for number in range(9):  # each has more than three seconds to compute
        prompt = bytes([number]) * 256 * 1024
        view = RequestView(str(number), "POST", "/v1/responses", len(prompt), prompt)
        house.come(Request(view, pin="a"))
    assert len(house.queue) > 4
    house.now = 1.0
    assert house.let_in() == []
    assert house.come(house.request("b")) == "b"
