"""Digests of caches: what is sent to whom, what it reveals, and what a load balancer concludes from it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from lb.config.regions import PeerAgent, Regions
from lb.config.schema import Table, Target
from lb.core.beats import decode, encode_digest, frames
from lb.core.forwarding import Forwarding
from lb.core.peers import RegionReport
from lb.core.shared_caches import BYTES_PER_S
from lb.core.target_choice import choose
from lb.core.targets import TargetTable
from policies.routing.base import RequestView
from policies.routing.cache_digest import (
    KEPT_S,
    MOST_LOGGED,
    PLACES,
    REFRESH_S,
    CacheLog,
    Digest,
    KnownCaches,
    Marker,
    Row,
)

ANYWHERE: frozenset[str] = frozenset()
EU = frozenset({"eu"})
PROMPT = random.Random(1).randbytes(6000)


@pytest.mark.parametrize(
    ("key", "scope", "prompt", "common"),
    [
        pytest.param(b"k", "m", PROMPT, 6000, id="the same"),
        pytest.param(b"k", "m", PROMPT + b"more" * 200, 6000, id="longer"),
        pytest.param(b"k", "m", PROMPT[:1023] + b"?" + PROMPT[1024:], 1023, id="parts after 1023 bytes"),
        pytest.param(b"k", "m", b"?" + PROMPT[1:], 0, id="other from the first byte on"),
        pytest.param(b"other", "m", PROMPT, 0, id="another service"),
        pytest.param(b"k", "n", PROMPT, 0, id="another model or tenant"),
        pytest.param(b"k", "m", PROMPT[:200], 0, id="too short"),
    ],
)
def test_prompts_share_the_marks_of_what_they_begin_with(
    key: bytes, scope: str, prompt: bytes, common: int
) -> None:
    mine, other = Marker(b"k").marks_of("m", PROMPT), Marker(key).marks_of(scope, prompt)
    shared = sum(place <= common for place in PLACES if place <= len(PROMPT))
    assert [one == two for one, two in zip(mine, other, strict=False)].count(True) == shared
    assert mine[:shared] == other[:shared]


def test_places_are_few_and_dense() -> None:
    assert len(PLACES) < 40
    assert all(late - early <= max(256, early / 4) for early, late in pairwise(PLACES))


def read(log: CacheLog, start: int = 0, served: frozenset[str] = ANYWHERE, room: int = 10**6) -> list[Row]:
    return list(log.read(start, served, room, 0.0)[0].rows)


def test_marks_are_logged_once_until_they_are_refreshed() -> None:
    log = CacheLog()
    log.sent("1", [1, 2], ANYWHERE, 0.0)
    log.sent("1", [1, 2, 3], ANYWHERE, 1.0)
    log.sent("2", [1], ANYWHERE, 1.0)
    assert read(log) == [Row("1", (1, 2, 3)), Row("2", (1,))]
    log.sent("1", [1], ANYWHERE, REFRESH_S)
    assert log.end == 4
    log.sent("1", [1], ANYWHERE, REFRESH_S + 0.1)
    assert read(log, 4) == [Row("1", (1,))]


def test_a_peer_gets_nothing_of_requests_that_it_may_not_have() -> None:
    log = CacheLog()
    log.sent("1", [1, 2], EU, 0.0)
    log.sent("1", [1], ANYWHERE, 0.0)
    assert read(log) == [Row("1", (1,))]
    assert read(log, served=frozenset({"eu", "us"})) == [Row("1", (1, 2, 1))]
    assert read(log, served=frozenset({"us"})) == [Row("1", (1,))]


def test_a_reader_goes_on_where_its_room_ended_and_misses_what_is_too_old() -> None:
    log = CacheLog()
    log.sent("1", range(100), ANYWHERE, 5.0)
    first, at = log.read(0, ANYWHERE, 40, 6.0)
    second, end = log.read(at, ANYWHERE, 10**6, 6.0)
    assert first.age_s == 1.0
    assert [*first.rows[0].marks, *second.rows[0].marks] == list(range(100))
    assert len(first.rows[0].marks) <= 10
    assert end == log.end == 100
    log.sent("2", range(3 * MOST_LOGGED), ANYWHERE, 7.0)
    (row,) = read(log, end)
    assert row.marks == tuple(range(2 * MOST_LOGGED, 3 * MOST_LOGGED))


def test_a_replica_that_left_is_reported() -> None:
    log = CacheLog()
    log.sent("1", [1], ANYWHERE, 0.0)
    log.retain({"2"}, 0.0)
    assert read(log) == [Row("1", (1,)), Row("1", ())]
    known = KnownCaches()
    known.reported("us", Digest(0.0, (Row("1", (1,)),)), 0.0)
    known.reported("us", Digest(0.0, (Row("1", ()),)), 0.0)
    assert known.news([1], 0.0) == []


def test_the_longest_beginning_of_each_replica_is_found_once() -> None:
    known = KnownCaches()
    known.reported("us", Digest(0.0, (Row("1", (11, 12, 13)), Row("2", (11,)), Row("3", (12,)))), 0.0)
    assert [tuple(one) for one in known.news([11, 12, 99], 0.0)] == [
        ("us", "1", PLACES[1]),
        ("us", "3", PLACES[1]),
        ("us", "2", PLACES[0]),
    ]
    assert known.news([11, 12, 99], 0.0) == []
    assert [one.bytes for one in known.news([11, 12, 13], 0.0)] == [PLACES[2]]
    known.retain(["eu"])
    assert known.news([11, 12, 13], 0.0) == []


def test_a_replica_that_comes_has_nothing_of_one_that_left() -> None:
    known, chance = KnownCaches(), random.Random(3)
    living: dict[str, set[int]] = {}
    for step in range(4000):
        now, name = step * KEPT_S / 300, f"r{step if chance.random() < 0.3 else step // 40}"
        marks = tuple(chance.sample(range(50), 3))
        if chance.random() < 0.4 and living:
            name, marks = chance.choice(sorted(living)), ()
            del living[name]
        else:
            living.setdefault(name, set()).update(marks)
        known.reported("us", Digest(0.0, (Row(name, marks),)), now)
        asked = chance.randrange(50)
        assert all(asked in living[one.target_id] for one in known.news([asked], now))
    mark = 99
    known.reported("us", Digest(0.0, (Row("last", (mark,)),)), now)
    assert [one.target_id for one in known.news([mark], now)] == ["last"]


@pytest.mark.parametrize(
    ("after_s", "known"), [(KEPT_S, True), (1.5 * KEPT_S, True), (2.2 * KEPT_S, False), (99 * KEPT_S, False)]
)
def test_what_is_not_repeated_is_forgotten(after_s: float, known: bool) -> None:
    caches = KnownCaches()
    caches.reported("us", Digest(0.0, (Row("1", (1,)),)), 0.0)
    for now in (0.9 * KEPT_S, 1.1 * KEPT_S):
        if now < after_s:
            caches.reported("us", Digest(0.0, (Row("1", (2,)),)), now)
    assert bool(caches.news([1], after_s)) is known


# --- agents

REPORT = RegionReport(1, 4, 0, 0.0, 0.00005, 0.0)


class Agents:
    """Agents that decide by the product's code, with what is sent between them as bytes."""

    def __init__(
        self, *names: str, replicas: int = 2, zones: dict[str, tuple[str, ...]] | None = None
    ) -> None:
        self.zones = zones or {}
        self.sent = bytearray()
        self.by_name: dict[str, Forwarding] = {}
        for name in names:
            region = name[:2]
            targets = tuple(
                Target(f"{region}-{number}", f"http://{region}{number}") for number in range(replicas)
            )
            others = [
                PeerAgent(one, one[:2], f"https://{one}", one, self.zones.get(one, ()))
                for one in names
                if one != name
            ]
            regions = Regions(
                name,
                region,
                peers=tuple(one for one in others if one.region != region),
                siblings=tuple(one for one in others if one.region == region),
            )
            table = TargetTable(Table("chat", "r1", targets, policy="gorgo"), 0.0)
            self.by_name[name] = Forwarding(table, regions, 0.0, b"secret of the service")
            for peer in regions.peers:
                self.by_name[name].receive_report(peer.id, REPORT, 0.05, 0.5, 0.0)

    def exchange(self, now: float) -> None:
        for source, one in self.by_name.items():
            for name, other in self.by_name.items():
                digest = None
                if name != source:
                    digest = one.caches.unsent(name, self.zones.get(name, ()), now)
                if digest is None:
                    continue
                data = encode_digest(digest)
                self.sent += data
                for kind, frame in frames(data)[0]:
                    found = decode(kind, frame)
                    assert isinstance(found, Digest)
                    other.caches.reported(source, found, now)

    def serves(self, name: str, view: RequestView, target: str, zones: frozenset[str] = ANYWHERE) -> None:
        agent = self.by_name[name]
        agent.meets(view, 0.0)
        agent._table.release(agent._table.book(view, target, 0.0), 0.0)
        agent.sent(view, target, zones, 0.0)


def chat(prompt: bytes, name: str = "r", session: str = "") -> RequestView:
    return RequestView(name, "POST", "/v1/chat/completions", len(prompt), prompt, "model", session)


@pytest.mark.parametrize("holder", ["us-0", "us-1"])
def test_a_sibling_sends_the_next_turn_where_the_prompt_is(holder: str) -> None:
    agents = Agents("us1", "us2")
    agents.serves("us1", chat(PROMPT), holder)
    agents.exchange(0.5)
    sibling = agents.by_name["us2"]
    view = chat(PROMPT + b"and then?" * 50, "next")
    sibling.meets(view, 0.6)
    found = choose(sibling._table, view, 0.6)
    assert found is not None
    assert found.target_id == holder
    assert found.matched_bytes >= 0.9 * len(PROMPT)
    for word in (PROMPT[:16], PROMPT[300:308], b"model"):
        assert word not in agents.sent


@pytest.mark.parametrize("session", ["one", "two", "three", "four", "five"])
def test_a_sibling_knows_where_a_session_was_served(session: str) -> None:
    """Its prompts begin alike nowhere, and by the ring of sessions each would have another replica."""
    agents = Agents("us1", "us2", replicas=8)
    agents.serves("us1", chat(PROMPT, session=session), "us-5")
    agents.exchange(0.5)
    view, sibling = chat(PROMPT[::-1], "next", session), agents.by_name["us2"]
    sibling.meets(view, 0.6)
    found = choose(sibling._table, view, 0.6)
    assert found is not None
    assert found.target_id == "us-5"


@pytest.mark.parametrize(
    ("zones", "served", "leaves"),
    [
        pytest.param(ANYWHERE, (), True, id="no residency"),
        pytest.param(EU, ("eu",), True, id="the other region serves the zone"),
        pytest.param(EU, (), False, id="it does not"),
    ],
)
def test_a_conversation_that_roams_is_sent_back_to_its_cache(
    zones: frozenset[str], served: tuple[str, ...], leaves: bool
) -> None:
    agents = Agents("us", "eu", zones={"us": ("eu",), "eu": served})
    agents.serves("us", chat(PROMPT * 4), "us-0", zones)
    agents.exchange(0.2)
    assert bool(agents.sent) is leaves
    view, here = chat(PROMPT * 4 + b"more" * 100, "next"), agents.by_name["eu"]
    here.meets(view, 0.3)
    choice = here.elsewhere(view, 0, 60.0, 0.3)
    assert choice is not None
    assert (choice.region == "us") is leaves


@pytest.mark.parametrize("policy", ["skywalker", "gorgo", "local"])
def test_rules_as_published_get_no_digests(policy: str) -> None:
    agents = Agents("us", "eu")
    us = agents.by_name["us"]
    us.apply(Regions("us", "us", policy, peers=us.regions.peers), 0.0)
    agents.serves("us", chat(PROMPT), "us-0")
    agents.exchange(0.5)
    assert not agents.sent


def test_a_hundred_replicas_take_no_more_than_the_bytes_per_second_that_are_allowed() -> None:
    """Ten times the news that there is room for: the rest is late, and what is too late is left out."""
    agents, chance = Agents("us", "eu", "as", replicas=100), random.Random(2)
    us = agents.by_name["us"]
    for tick in range(40):
        for number in range(100):
            us.sent(chat(chance.randbytes(1500)), f"us-{number}", ANYWHERE, tick / 4)
        agents.exchange(tick / 4 + 0.25)
    rate = len(agents.sent) / 10.0
    rows = us.caches.to_json(10.0)
    print(f"{rate:.0f} bytes per second to {len(rows)} agents")
    assert 0.8 * BYTES_PER_S < rate < 1.1 * BYTES_PER_S < 20_000
    seen = agents.by_name["eu"].caches.to_json(10.0)
    assert [one["id"] for one in seen] == ["as", "us"]
    assert seen[1]["age_s"] > 1.0
