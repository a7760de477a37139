"""Three agents in virtual time, one of which is stopped for a while: who takes over what, and until when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

import pytest

from lb.core.link_state import LinkState
from lb.core.peers import RegionReport
from lb.core.region_watch import MOST_GAP_S, Link, RegionWatch
from policies.regions.ownership import BACK_AFTER_S

RTT_S = {frozenset(("us", "eu")): 0.09, frozenset(("us", "asia")): 0.15, frozenset(("eu", "asia")): 0.22}
NAMES = ("us", "eu", "asia")
BACKUPS = {"us": "eu", "eu": "us", "asia": "us"}  # who stands in for whom
TICK_S, BEAT_S = 0.1, 0.5
STOPPED_AT = 10.0


class Stopped:
    """What is stopped: nothing that is due for it happens before `until`, and then all of it at once."""

    def __init__(self) -> None:
        self.since, self.until = float("inf"), float("inf")

    def when(self, at: float) -> float:
        return self.until if self.since <= at < self.until else at


class Node:
    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.boot = number
        self.links: dict[str, Link] = {}
        self.watch = RegionWatch(0.0)
        self.heard: dict[str, tuple[str, ...]] = {}  # by peer: who is silent to it
        self.stopped = Stopped()
        self.took: set[str] = set()

    def agrees(self, other: str, silent: str) -> bool:
        return silent in self.heard.get(other, ())


class Three:
    """The agents, and what is under way between them."""

    def __init__(self) -> None:
        self.nodes = {name: Node(name, number) for number, name in enumerate(NAMES, 1)}
        self.holds: list[tuple[float, str, frozenset[str]]] = []
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        for name, node in self.nodes.items():
            node.links = {other: Link(other, LinkState(node.boot, 0.0)) for other in NAMES if other != name}
            self._at(node, 0.0, lambda now, node=node: self._tick(node, now))  # type: ignore[misc]

    def _at(self, node: Node, at: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._due, (at, next(self._order), lambda now: self._act(node, act, now)))

    def _act(self, node: Node, act: Callable[[float], None], now: float) -> None:
        later = node.stopped.when(now)
        if later > now:
            self._at(node, later, act)
        else:
            act(now)

    def _tick(self, node: Node, now: float) -> None:
        node.watch.attend(node.links, now)
        node.watch.look(node.links, node.agrees, now)
        taken = frozenset(one for one in node.watch.takeovers.regions if BACKUPS[one] == node.name)
        node.took |= taken
        self.holds.append((now, node.name, taken))
        if round(now / TICK_S) % round(BEAT_S / TICK_S) == 0 or node.watch.silent:
            for other, link in node.links.items():
                report = RegionReport(1, 1, 0, 0.0, 0.0, 0.0, silent=node.watch.silent)
                beat = link.state.next_beat(report, BEAT_S, 0, now)
                way_s = RTT_S[frozenset((node.name, other))] / 2
                there = self.nodes[other]
                self._at(there, now + way_s, lambda now, t=there, b=beat: self._hears(t, node.name, b, now))  # type: ignore[misc]
        self._at(node, now + TICK_S, lambda now: self._tick(node, now))

    def _hears(self, node: Node, source: str, beat: object, now: float) -> None:
        node.watch.attend(node.links, now)
        node.links[source].state.receive(beat, now)  # type: ignore[arg-type]
        node.heard[source] = beat.report.silent  # type: ignore[attr-defined]

    def play(self, until: float) -> None:
        while self._due[0][0] < until:
            now, _, act = heapq.heappop(self._due)
            act(now)

    def last_taken(self, name: str) -> float | None:
        """When that agent held a region in place of another one for the last time."""
        return max((at for at, who, taken in self.holds if who == name and taken), default=None)


@pytest.mark.parametrize("stopped_s", [1.0, 8.0, 20.0, 60.0, 600.0])
def test_an_agent_that_was_stopped_takes_over_no_region_and_gets_its_own_back(stopped_s: float) -> None:
    three = Three()
    eu = three.nodes["eu"]
    eu.stopped.since, eu.stopped.until = STOPPED_AT, STOPPED_AT + stopped_s
    three.play(STOPPED_AT + stopped_s + 60.0)
    assert eu.took == set()
    assert three.nodes["asia"].took == set()
    assert three.nodes["us"].took == ({"eu"} if stopped_s > 6.0 else set())
    last = three.last_taken("us")
    assert last is None or last < eu.stopped.until + 2.0


def test_one_that_is_stopped_again_and_again_gets_its_region_back_once_it_lasts() -> None:
    three = Three()
    eu = three.nodes["eu"]
    eu.stopped.since, eu.stopped.until = STOPPED_AT, STOPPED_AT + 8.0
    three.play(STOPPED_AT + 20.0)
    eu.stopped.since, eu.stopped.until = STOPPED_AT + 20.0, STOPPED_AT + 28.0
    three.play(STOPPED_AT + 28.0 + BACK_AFTER_S + 5.0)
    assert eu.took == set()
    last = three.last_taken("us")
    assert last is not None
    assert BACK_AFTER_S - 1.0 < last - eu.stopped.until < BACK_AFTER_S + 1.0


def test_an_agent_without_cpu_does_not_take_over_either() -> None:
    """It runs for a moment every 3 s, for a minute."""
    three = Three()
    eu = three.nodes["eu"]
    for turn in range(20):
        eu.stopped.since = STOPPED_AT + 3.0 * turn
        eu.stopped.until = eu.stopped.since + 2.9
        three.play(eu.stopped.until + 0.05)
    three.play(STOPPED_AT + 70.0)
    assert eu.took == set()


def test_a_dead_agent_is_taken_over_by_one_that_was_stopped_before() -> None:
    three = Three()
    us, eu = three.nodes["us"], three.nodes["eu"]
    us.stopped.since, us.stopped.until = STOPPED_AT, STOPPED_AT + 4.0
    eu.stopped.since, eu.stopped.until = STOPPED_AT + 2.0, 1e9
    three.play(STOPPED_AT + 4.0 + 8.0)
    assert us.took == {"eu"}


@pytest.mark.parametrize(
    ("gap_s", "away_s"),
    [(0.1, 0.0), (MOST_GAP_S, 0.0), (3.0, 3.0 - MOST_GAP_S)],
    ids=["a tick", "late", "away"],
)
def test_of_a_gap_only_what_a_tick_may_be_late_counts_as_silence(gap_s: float, away_s: float) -> None:
    watch, link = RegionWatch(100.0), Link("c/eu", LinkState(1, 100.0))
    assert watch.attend({"eu": link}, 100.0 + gap_s) == pytest.approx(away_s)
    assert link.state.silent_s(100.0 + gap_s) == pytest.approx(gap_s - away_s)
