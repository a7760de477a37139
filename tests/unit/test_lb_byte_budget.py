"""The budget of bytes that are kept, and what parsing a body costs."""

from __future__ import annotations

import sys
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lb.core.byte_budget import ByteBudget, Holding, parsed_bytes, structure_bytes
from lb.stream.openai_request import is_dense, read, scan
from tests.clouds.schedules import examples

MIB = 1024 * 1024


def test_takers_share_a_limit() -> None:
    budget = ByteBudget(100)
    assert budget.take(60)
    assert not budget.take(60)
    assert (budget.taken, budget.refused) == (60, 1)
    budget.give_back(60)
    assert budget.take(60)


def test_one_taker_alone_may_have_more_than_the_limit() -> None:
    budget = ByteBudget(100)
    assert budget.take(1000)
    assert not budget.take(1)


def test_what_streams_keep_leaves_less_room() -> None:
    budget = ByteBudget(100)
    budget.streams = 70
    assert budget.take(20)
    assert not budget.take(20)
    budget.streams = 30
    assert budget.take(20)
    budget.streams = 500
    assert not budget.take(1)
    budget.give_back(40)
    assert budget.take(20), "one taker may always have what it wants"


def test_what_streams_keep_is_in_no_share() -> None:
    """Two tenants share what the streams have left, and one makes room for the other within that."""
    uploads = Uploads()
    uploads.budget.streams = 40
    assert uploads.upload("a1", 30)
    assert uploads.upload("a2", 20)
    assert not uploads.upload("b1", 40), "more than a half of 60"
    assert uploads.upload("b2", 30)
    assert (uploads.refused, uploads.budget.taken) == (["a2"], 60)


# --- shares


class Uploads:
    """A budget of 100 bytes with uploads, whose refusals are noted by name: `a1` is of tenant `a`."""

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self.budget = ByteBudget(100)
        self.weights = weights or {}
        self.refused: list[str] = []
        self.open: dict[str, Holding] = {}

    def upload(self, name: str, size: int) -> bool:
        """Let more of an upload arrive."""
        if name not in self.open:
            weight = self.weights.get(name[0], 1.0)
            self.open[name] = self.budget.open(lambda: self.refused.append(name), name[0], weight)
        return self.open[name].take(size)

    def begin(self, tenant: str, size: int) -> bool:
        """Let a request begin whose body is here. One whose tenant is a capital letter can be refused."""
        name, weight = tenant.lower(), self.weights.get(tenant.lower(), 1.0)
        if not self.budget.take(size, name, weight):
            return False
        if tenant.isupper():
            self.open[tenant] = self.budget.offer(size, lambda: self.refused.append(tenant), name, weight)
        return True


@pytest.mark.parametrize(
    ("before", "weights", "asks", "refused"),
    [
        pytest.param("a1:60 b1:20", {}, "b2:20", "", id="there is room"),
        pytest.param("a1:60 a2:40", {}, "b1:10", "a2", id="the youngest of the tenant with most"),
        pytest.param("a1:60 a2:40", {}, "b1:45", "a2 a1", id="as many as are needed, down to the share"),
        pytest.param("a1:60 a2:40", {}, "b1:51", None, id="more than the share of the one who asks"),
        pytest.param("a1:60 a2:40", {}, "a3:10", None, id="one tenant alone"),
        pytest.param("a1:50 b1:50", {}, "b2:10", None, id="both have their shares"),
        pytest.param("a1:50 b1:50", {}, "c1:10", "a1", id="two that hold the same"),
        pytest.param("a1:30 b1:35 b2:35", {}, "c1:10", "b2", id="never one that is within its share"),
        pytest.param("a1:80 b1:20", {"a": 3.0}, "b2:10", None, id="shares by weight: a quarter is 25"),
        pytest.param("a1:80 b1:20", {"a": 3.0}, "b2:5", "a1", id="shares by weight, within a quarter"),
        pytest.param("a1:60 b1:40", {"a": 6.0, "b": 2.0}, "c1:10", "b1", id="most for its weight"),
        pytest.param("a:100", {}, "b1:10", None, id="requests that have begun are not refused"),
        pytest.param("a:90 a1:10", {}, "b1:20", None, id="nothing is refused that would not do"),
        pytest.param("a1:40 A:50 a:10", {}, "b1:10", "A", id="a request that no target has read"),
        pytest.param("A:50 a1:50", {}, "b1:10", "a1", id="the youngest of uploads and requests"),
        pytest.param("a:60 a1:30 b:10", {}, "b:20", "a1", id="for a request that begins, too"),
        pytest.param("a1:40 a2:58 a3:1 a4:1", {}, "b1:10", "a2", id="not those that hold nearly nothing"),
        pytest.param("a1:30 a2:30 b:40 b1:0", {}, "c1:10", "a2", id="not one without a byte"),
    ],
)
def test_who_makes_room(before: str, weights: dict[str, float], asks: str, refused: str | None) -> None:
    """`a1:60` is an upload of which 60 bytes are here, `a:60` a request that has started, `A:60` one that can be refused."""
    uploads = Uploads(weights)
    for step in before.split():
        assert take(uploads, step)
    held = uploads.budget.held()
    assert take(uploads, asks) is (refused is not None)
    assert uploads.refused == (refused or "").split()
    assert uploads.budget.evicted == len(uploads.refused)
    assert uploads.budget.taken == sum(uploads.budget.held().values()) <= 100
    if refused is None:
        assert uploads.budget.held() == held


def take(uploads: Uploads, step: str) -> bool:
    name, size = step.split(":")
    return uploads.upload(name, int(size)) if len(name) > 1 else uploads.begin(name, int(size))


def test_a_refused_upload_takes_nothing_more_and_gives_nothing_back_twice() -> None:
    uploads = Uploads()
    uploads.upload("a1", 100)
    assert uploads.upload("b1", 50)
    assert not uploads.upload("a1", 1)
    uploads.open["a1"].release()
    uploads.open["b1"].release()
    uploads.open["b1"].release()
    assert (uploads.budget.taken, uploads.budget.held()) == (0, {})


def test_a_thousand_tenants_that_have_left_take_no_room() -> None:
    uploads = Uploads()
    for number in range(1000):
        assert uploads.budget.take(60, f"tenant {number}")
        uploads.budget.give_back(60, f"tenant {number}")
    assert uploads.upload("a1", 60)
    assert not uploads.upload("a1", 60)
    assert uploads.upload("b1", 50)  # its share is a half
    assert uploads.refused == ["a1"]


WEIGHTS = {"a": 1.0, "b": 2.5, "c": 0.5}
LIMIT = 1000


def test_what_is_kept_again_cannot_be_refused_and_is_given_back_by_its_owner() -> None:
    uploads = Uploads()
    assert uploads.begin("A", 100)
    uploads.open["A"].keep()
    uploads.open["A"].keep()
    uploads.open["A"].release()
    assert not uploads.upload("b1", 10)
    assert uploads.budget.taken == 100
    uploads.budget.give_back(100, "a")
    assert uploads.budget.held() == {}


class BudgetMachine(RuleBasedStateMachine):
    """Any order of uploads and requests of three tenants. `begun` and `uploads` are what each of them holds, as we know it."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = ByteBudget(LIMIT)
        self.begun: list[tuple[str, int]] = []
        self.uploads: list[tuple[str, Holding]] = []
        self.largest_alone = 0

    def held(self, tenant: str) -> int:
        mine = sum(size for owner, size in self.begun if owner == tenant)
        return mine + self.arriving(tenant)

    def arriving(self, tenant: str) -> int:
        return sum(one.size for owner, one in self.uploads if owner == tenant)

    def share(self, tenant: str, asks: str) -> float:
        sharing = [one for one in WEIGHTS if one == asks or self.held(one)]
        return LIMIT * WEIGHTS[tenant] / sum(WEIGHTS[one] for one in sharing)

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)))
    def an_upload_begins(self, tenant: str) -> None:
        holding = self.budget.open(lambda: self.is_refused(holding), tenant, WEIGHTS[tenant])
        self.uploads.append((tenant, holding))

    def is_refused(self, holding: Holding) -> None:
        (tenant,) = [owner for owner, one in self.uploads if one is holding]
        self.refused_now.append((tenant, holding.size))
        assert not holding.is_open

    @rule(
        tenant=st.sampled_from(sorted(WEIGHTS)),
        size=st.one_of(st.integers(0, 120), st.integers(0, 1500)),
        which=st.none() | st.integers(0, 9),
    )
    def somebody_takes(self, tenant: str, size: int, which: int | None) -> None:
        """`which` of the uploads takes more; None: a request begins."""
        upload = None
        if which is not None and self.uploads:
            tenant, upload = self.uploads[which % len(self.uploads)]
        taken, held = self.budget.taken, {one: self.held(one) for one in WEIGHTS}
        shares = {one: self.share(one, tenant) for one in WEIGHTS}
        arriving = {one: self.arriving(one) for one in WEIGHTS}
        self.refused_now: list[tuple[str, int]] = []
        if upload is None:
            got = self.budget.take(size, tenant, WEIGHTS[tenant])
            if got:
                self.begun.append((tenant, size))
        else:
            got = upload.take(size)
        within = held[tenant] + size <= shares[tenant]
        for (
            owner,
            freed,
        ) in self.refused_now:  # each of a tenant that was above its share when it was its turn
            assert owner != tenant
            assert held[owner] > shares[owner]
            held[owner] -= freed
        self.uploads = [(owner, one) for owner, one in self.uploads if one.is_open]
        if got and not taken:
            self.largest_alone = size
        elif got:
            assert within or not self.refused_now
        else:
            assert not self.refused_now
            others = [one for one in WEIGHTS if one != tenant]
            spare = sum(max(0.0, min(arriving[one], held[one] - shares[one])) for one in others)
            assert not within or spare < taken + size - LIMIT

    @rule(which=st.integers(0, 9))
    def a_request_can_be_refused(self, which: int) -> None:
        if self.begun:
            tenant, size = self.begun.pop(which % len(self.begun))
            holding = self.budget.offer(size, lambda: self.is_refused(holding), tenant, WEIGHTS[tenant])
            self.uploads.append((tenant, holding))

    @rule(which=st.integers(0, 9))
    def it_is_kept_again(self, which: int) -> None:
        if self.uploads:
            tenant, holding = self.uploads.pop(which % len(self.uploads))
            holding.keep()
            self.begun.append((tenant, holding.size))

    @rule(which=st.integers(0, 9))
    def an_upload_is_over(self, which: int) -> None:
        if self.uploads:
            _, holding = self.uploads.pop(which % len(self.uploads))
            holding.release()

    @rule(which=st.integers(0, 9))
    def a_request_ends(self, which: int) -> None:
        if self.begun:
            tenant, size = self.begun.pop(which % len(self.begun))
            self.budget.give_back(size, tenant)

    @invariant()
    def the_sum_of_what_is_held_is_taken(self) -> None:
        held = {tenant: self.held(tenant) for tenant in WEIGHTS if self.held(tenant)}
        assert self.budget.held() == held
        assert self.budget.taken == sum(held.values())

    @invariant()
    def never_above_the_limit_but_for_one_taker(self) -> None:
        assert self.budget.taken <= max(LIMIT, self.largest_alone)


BudgetMachine.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
TestBudget = BudgetMachine.TestCase


# --- what parsing costs


def size_of(value: Any) -> int:
    """What an object and all in it take."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(size_of(key) + size_of(one) for key, one in value.items())
    if isinstance(value, list):
        return size + sum(map(size_of, value))
    return size


@pytest.mark.parametrize(
    "item", ["{}", "[]", "1.5", '{"a":1}', '"word"', '{"role":"user","content":"hello you"}']
)
def test_what_parsing_costs_is_not_underestimated_by_much(item: str) -> None:
    body = f'{{"a":[{",".join([item] * 20_000)}]}}'.encode()
    assert parsed_bytes(body) > size_of(orjson.loads(body)) / 3


@given(
    st.lists(st.sampled_from([b"{", b"[", b",", b"x" * 70_000, b'"a":1,']), max_size=12), st.integers(1, 9)
)
def test_what_parsing_costs_is_the_sum_of_its_parts(pieces: list[bytes], parts: int) -> None:
    body = b"".join(pieces) + b"y" * 20_000
    size = len(body) // parts + 1
    counted = sum(structure_bytes(body[at : at + size]) for at in range(0, len(body), size))
    assert parsed_bytes(body) == len(body) + counted
    assert counted == 72 * body.count(b"{") + 64 * body.count(b"[") + 16 * body.count(b",")


def body_of(item: bytes, size: int) -> bytes:
    many = b"[" + (item + b",") * (size // (len(item) + 1)) + item + b"]"
    fields = b'"model":"m","user":"u","stream":true,"max_tokens":7,"messages":[{"role":"user","content":"x"}]'
    return b"{" + fields + b',"metadata":' + many + b"}"


@pytest.mark.parametrize(
    ("item", "size", "dense"),
    [
        pytest.param(b"{}", MIB, True, id="many objects"),
        pytest.param(b"[]", MIB, True, id="many lists"),
        pytest.param(b"{}", 1000, False, id="many objects of a small body"),
        pytest.param(b'"' + b"x" * MIB + b'"', MIB, False, id="a long text"),
    ],
)
def test_a_body_of_many_small_values_is_scanned_and_not_parsed(item: bytes, size: int, dense: bool) -> None:
    body = body_of(item, size)
    assert is_dense(body, parsed_bytes(body)) is dense
    scanned, parsed = scan(body), read(body)
    assert scanned.json is None
    for name in ("model", "max_tokens", "stream", "choices"):
        assert getattr(scanned, name) == getattr(parsed, name)


@pytest.mark.parametrize(
    ("body", "stream"),
    [
        (rb'{"messages":[{"content":"say \"stream\": true"}]}', False),
        (b'{"stream" :  true}', True),
        (b'{"stream":truely}', False),
        (b'{"stream":false}', False),
    ],
)
def test_text_is_not_taken_for_a_field(body: bytes, stream: bool) -> None:
    assert scan(body).stream is stream
