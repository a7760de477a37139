"""What load balancers counted is kept in three rings, and folding loses no request."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.observe.counters import TIME_TO_FIRST_BYTE_S
from skyserve_cli.state.database import Database
from skyserve_cli.state.samples import (
    BOUNDS_S,
    WHOLE,
    Sample,
    added,
    busiest,
    combined,
    folded,
    packed,
    quantile,
    unpacked,
)
from skyserve_cli.state.series import RINGS
from skyserve_cli.state.store import Store
from tests.unit.databases import KINDS, empty_database

START = 1_800_000_000  # a multiple of 900
DAY_S = 86_400


def sample(requests: int = 1, bucket: int = 4, **more: float) -> Sample:
    ttft = [0] * (len(BOUNDS_S) + 1)
    ttft[bucket] = requests
    return Sample(polls=1, requests=requests, ttft=tuple(ttft))._replace(**more)


numbers = st.integers(0, 1000)
samples = st.builds(
    Sample, *[numbers] * 9,
    ttft=st.lists(numbers, min_size=len(BOUNDS_S) + 1, max_size=len(BOUNDS_S) + 1).map(tuple),
)  # fmt: skip


def test_the_buckets_are_those_of_the_agents() -> None:
    assert BOUNDS_S == TIME_TO_FIRST_BYTE_S


@given(st.lists(samples, min_size=1, max_size=12), st.integers(1, 12))
def test_folding_in_steps_and_at_once_is_the_same(found: list[Sample], cut: int) -> None:
    slots = [{WHOLE: each} for each in found]
    in_steps = folded([folded(slots[start : start + cut]) for start in range(0, len(slots), cut)])
    assert in_steps == folded(slots)


@given(st.dictionaries(st.integers(0, 99), samples, max_size=5))
def test_a_packed_slot_comes_back(slot: dict[int, Sample]) -> None:
    assert unpacked(packed(slot)) == slot


def test_agents_beside_each_other_add_their_loads_and_times_average_them() -> None:
    one, other = sample(3, in_flight=4), sample(5, in_flight=2)
    assert combined([one, other]).view()["in_flight"] == 6
    assert added([one, other]).view()["in_flight"] == 3
    assert combined([one, other]).requests == added([one, other]).requests == 8


@pytest.mark.parametrize(
    ("counts", "share", "seconds"),
    [
        pytest.param((0,) * 15, 0.5, None, id="nothing was observed"),
        pytest.param((0, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 0.5, 0.175, id="the middle of a bucket"),
        pytest.param(
            (5, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), 0.5, 0.01, id="the end of the first half"
        ),
        pytest.param((0,) * 14 + (3,), 0.9, 160.0, id="beyond the last bound"),
    ],
)
def test_quantiles(counts: tuple[int, ...], share: float, seconds: float | None) -> None:
    assert quantile(counts, share) == seconds


def test_a_slot_keeps_the_service_and_its_busiest_replicas() -> None:
    slot = {WHOLE: sample(0), 1: sample(1), 2: sample(9), 3: sample(5)}
    assert set(busiest(slot, 2)) == {WHOLE, 2, 3}


def test_unknown_numbers_are_none() -> None:
    view = Sample().view()
    assert (view["ttft_p50_s"], view["hit_rate"], view["in_flight"]) == (None, None, None)
    assert Sample(prompt_bytes=200, matched_bytes=50).view()["hit_rate"] == 0.25


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(Database(empty_database(request.param, tmp_path)))


def counted(store: Store, span_s: int, until: int) -> int:
    return sum(slot[WHOLE].requests for _, slot in store.series("chat", span_s, since=0, until=until))


@pytest.mark.long
def test_rings_have_the_same_sums(store: Store) -> None:
    end = START + 3 * 900
    for at in range(START, end + 10, 10):
        store.put_series(at, {"chat": {WHOLE: sample(2), 7: sample(1)}})
    assert [counted(store, ring.span_s, end) for ring in RINGS] == [2 * 270] * 3
    assert [at for at, _ in store.series("chat", 900, since=0, until=end)] == [
        START,
        START + 900,
        START + 1800,
    ]
    assert store.series("chat", 60, since=START, until=START + 60)[0][1][7].requests == 6
    store.fold_series(end)  # again: nothing is counted twice
    assert [counted(store, ring.span_s, end) for ring in RINGS] == [2 * 270] * 3


def test_what_was_not_folded_when_the_controller_died_is_folded_later(store: Store) -> None:
    """A transaction with one slot is all that a killed controller left; weeks later it becomes one of 15 minutes."""
    store.put_series(START + 10, {"chat": {WHOLE: sample(5)}})
    store.put_series(START + 20 * DAY_S, {"chat": {WHOLE: sample(1)}})
    store.fold_series(START + 20 * DAY_S + 900)
    assert counted(store, 900, START + 21 * DAY_S) == 6
    assert store.series("chat", 10, since=0, until=START + 1) == []


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"{ring.span_s} s")
def test_each_ring_forgets_what_is_too_old(store: Store, ring: object) -> None:
    span_s, keep_s = ring  # type: ignore[misc]
    store.put_series(START, {"chat": {WHOLE: sample(1)}})
    store.fold_series(START + keep_s)
    assert counted(store, span_s, START + 1) == 1
    store.fold_series(START + keep_s + 1)
    assert counted(store, span_s, START + 1) == 0


def test_services_are_apart(store: Store) -> None:
    store.put_series(START, {"chat": {WHOLE: sample(1)}, "other": {WHOLE: sample(4)}})
    assert counted(store, 10, START + 10) == 1
