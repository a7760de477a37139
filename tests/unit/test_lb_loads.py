"""When the poller polls which target, in virtual time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from lb.config.options import Pushing, PushMode
from lb.config.schema import Readiness, Table, Target
from lb.core.admission import EngineLoad
from lb.core.targets import Key
from lb.engines.kinds import EngineKind, Fetched
from lb.engines.load_poller import FORGET_AFTER_S, LoadPoller

NOT_FOUND = Fetched(404, b"")
VLLM_PAGE = (
    b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
)
SGLANG_LOADS = json.dumps({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 0}]}).encode()
Server = dict[str, Fetched]


def vllm() -> Server:
    return {"/metrics": Fetched(200, VLLM_PAGE), "/version": Fetched(200, b'{"version":"0.33.0"}')}


def sglang() -> Server:
    return {"/v1/loads?include=core": Fetched(200, SGLANG_LOADS)}


@dataclass
class Told:
    key: Key
    load: EngineLoad | None
    polled_at: float
    now: float


@dataclass
class World:
    """A table, servers by URL and a clock that only `run` moves. A server that is None does not respond."""

    pushing: Pushing = field(default_factory=Pushing)
    now: float = 1000.0
    targets: dict[Key, Target] = field(default_factory=dict)
    in_flight: Counter[Key] = field(default_factory=Counter)
    servers: dict[str, Server | None] = field(default_factory=dict)
    asked: list[tuple[float, str, str]] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    lets_in: bool = False
    changes: int = 0
    held: bool = False
    under_way: Counter[str] = field(default_factory=Counter)
    hold: asyncio.Event | None = None
    bug: Exception | None = None
    takes_s: float = 0.0
    every_s: float = 0.0
    busy: set[Key] = field(default_factory=set)
    pushes: int = 1
    reviews: int = 0
    kept: Table | None = None

    def __post_init__(self) -> None:
        self.prober = LoadPoller(self, self.fetch, lambda: self.now, self.changed, lambda: self.held)

    # what the prober sees

    @property
    def table(self) -> Table:
        targets = tuple(self.targets.values())
        if self.kept is None or self.kept.targets != targets or self.kept.pushing != self.pushing:
            self.kept = Table("default", "r1", targets, pushing=self.pushing)
        return self.kept  # a table is checked when it is made, and asked for at each probe

    @property
    def replaced(self) -> int:
        return self.pushes

    def newly_busy(self) -> list[Key]:
        before, self.busy = self.busy, {key for key in self.targets if self.in_flight[key]}
        return [key for key in self.targets if key in self.busy - before]

    def is_busy(self, key: Key) -> bool:
        return key in self.targets and self.in_flight[key] > 0

    def probe_list(self) -> list[tuple[Key, Target, int]]:
        self.reviews += 1
        return [(key, target, self.in_flight[key]) for key, target in self.targets.items()]

    def loaded(
        self, key: Key, load: EngineLoad | None, polled_at: float, now: float, every_s: float = 0.0
    ) -> bool:
        self.every_s = every_s
        self.told.append(Told(key, load, polled_at, now))
        return self.lets_in

    def changed(self) -> None:
        self.changes += 1

    async def fetch(self, target: Target, path: str, timeout_s: float) -> Fetched:
        self.asked.append((self.now, target.url, path))
        self.under_way[target.url] += 1
        assert self.under_way[target.url] == 1
        try:
            if self.hold is not None:
                await self.hold.wait()
            if self.bug is not None:
                raise self.bug
            server = self.servers.get(target.url)
            self.now += self.takes_s
            if server is None:
                raise asyncio.TimeoutError if self.now % 2 < 1 else ConnectionRefusedError
            return server.get(path, NOT_FOUND)
        finally:
            self.under_way[target.url] -= 1

    # what a test does

    def add(self, name: str, server: Server | None, in_flight: int = 0, generation: int = 1) -> Key:
        key = Key(name, generation)
        self.targets[key] = Target(name, f"http://{name}:8000")
        self.in_flight[key] = in_flight
        self.servers[f"http://{name}:8000"] = server
        self.pushes += 1
        return key

    def remove(self, key: Key) -> None:
        del self.targets[key]
        self.pushes += 1

    async def run(self, for_s: float) -> None:
        end = self.now + for_s
        while self.now < end:
            pause_s = self.prober.poll_due()
            await settle()
            self.now += pause_s

    def times(self, name: str, path: str) -> list[float]:
        return [at for at, url, what in self.asked if (url, what) == (f"http://{name}:8000", path)]


async def settle() -> None:
    """Until the probes are over, or wait for something."""
    for _ in range(40):
        alone = len(asyncio.all_tasks()) == 1
        await asyncio.sleep(0)
        if alone:
            return


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


@pytest.fixture
def w() -> World:
    return World()


async def test_a_busy_target_is_asked_every_probe_interval(w: World) -> None:
    key = w.add("a", sglang(), in_flight=1)
    await w.run(5.0)
    times = w.times("a", "/v1/loads?include=core")
    assert 48 <= len(times) <= 52
    assert all(0.05 <= gap <= 0.15 for gap in gaps(times[2:]))
    assert {told.load for told in w.told} == {EngineLoad(2, 0)}
    assert w.prober.kind(key) is EngineKind.SGLANG


async def test_an_idle_target_is_asked_every_five_seconds(w: World) -> None:
    w.add("a", sglang())
    await w.run(60.0)
    assert 11 <= len(w.times("a", "/v1/loads?include=core")) <= 15


async def test_an_idle_target_that_gets_a_request_is_asked_at_once(w: World) -> None:
    key = w.add("a", sglang())
    await w.run(20.0)
    w.in_flight[key] = 1
    since = w.now
    await w.run(1.0)
    assert min(at for at, _, _ in w.asked if at >= since) - since <= 0.21


async def test_all_are_asked_often_while_requests_are_held(w: World) -> None:
    w.add("a", sglang())
    await w.run(10.0)
    before = len(w.asked)
    w.held = True
    await w.run(5.0)
    assert 48 <= len(w.asked) - before <= 52


async def test_the_slower_the_service_wants_it_the_fewer_questions() -> None:
    w = World(Pushing(probe_s=2.0))
    w.add("a", sglang(), in_flight=1)
    await w.run(60.0)
    assert 29 <= len(w.asked) <= 33


async def test_busy_targets_are_not_asked_all_at_once(w: World) -> None:
    keys = [w.add(f"t{number}", sglang()) for number in range(16)]
    await w.run(10.0)
    w.in_flight.update(dict.fromkeys(keys, 1))
    since = w.now
    await w.run(2.0)
    at_once = Counter(at for at, _, _ in w.asked if at > since + 0.2)
    assert max(at_once.values()) <= 4
    assert min(Counter(url for at, url, _ in w.asked if at > since).values()) >= 18


@pytest.mark.long
async def test_many_busy_targets_share_one_budget() -> None:
    w = World()
    keys = [w.add(f"t{number}", sglang()) for number in range(300)]
    await w.run(1.0)  # what they are is known
    w.in_flight.update(dict.fromkeys(keys, 1))
    await w.run(1.0)
    before = len(w.asked)
    await w.run(2.0)
    assert 1900 <= len(w.asked) - before <= 2100
    assert w.every_s == pytest.approx(0.3)
    assert set(Counter(url for _, url, _ in w.asked[before:]).values()) <= {6, 7, 8}


@pytest.mark.long
async def test_many_idle_targets_are_asked_evenly() -> None:
    w = World()
    for number in range(1000):
        w.add(f"t{number}", sglang())
    await w.run(30.0)
    before = len(w.asked)
    await w.run(40.0)
    assert 1950 <= len(w.asked) - before <= 2050
    assert max(Counter(at for at, _, _ in w.asked[before:]).values()) <= 4
    assert set(Counter(url for _, url, _ in w.asked[before:]).values()) <= {1, 2, 3}


async def test_a_fleet_that_begins_to_be_busy_is_not_asked_all_at_once() -> None:
    w = World()
    keys = [w.add(f"t{number}", sglang()) for number in range(300)]
    await w.run(10.0)
    w.in_flight.update(dict.fromkeys(keys, 1))
    since = w.now
    await w.run(2.0)
    at_once = Counter(at for at, _, _ in w.asked if at >= since)
    assert max(at_once.values()) <= 40


@pytest.mark.long
async def test_a_few_busy_targets_among_many_that_were_are_asked_often_again() -> None:
    w = World()
    keys = [w.add(f"t{number}", sglang()) for number in range(300)]
    w.in_flight.update(dict.fromkeys(keys, 1))
    await w.run(5.0)
    w.in_flight = Counter({keys[0]: 1})
    await w.run(1.0)
    before = len(w.times("t0", "/v1/loads?include=core"))
    await w.run(2.0)
    assert 18 <= len(w.times("t0", "/v1/loads?include=core")) - before <= 21
    assert w.every_s == pytest.approx(0.1)


async def test_all_targets_are_gone_through_only_when_something_has_changed_for_all_of_them(w: World) -> None:
    keys = [w.add(f"t{number}", sglang()) for number in range(20)]
    await w.run(30.0)
    w.in_flight.update(dict.fromkeys(keys[:5], 1))
    await w.run(30.0)
    w.in_flight.clear()
    await w.run(30.0)
    assert w.reviews == 1
    for _ in range(10):  # held and let in again and again
        w.held = not w.held
        await w.run(0.2)
    w.held = False
    await w.run(30.0)
    assert w.reviews == 3


async def test_one_question_at_a_time(w: World) -> None:
    w.add("a", sglang(), in_flight=1)
    w.add("b", sglang(), in_flight=1)
    await w.run(1.0)
    before = len(w.asked)
    w.hold = asyncio.Event()
    await w.run(3.0)
    assert len(w.asked) - before == 2
    w.hold.set()
    w.hold = None
    await w.run(1.0)
    assert len(w.asked) - before > 18


@pytest.mark.parametrize("start", range(1000, 1060, 10))
async def test_what_nobody_knows_is_asked_again_after_a_minute(w: World, start: int) -> None:
    w.now = float(start)
    key = w.add("a", {}, in_flight=1)
    await w.run(20.0)
    assert len(w.times("a", "/metrics")) == 1
    assert [told.load for told in w.told] == [None]
    assert w.prober.kind(key) is EngineKind.UNKNOWN
    await w.run(280.0)
    times = w.times("a", "/metrics")
    assert 4 <= len(times) <= 6
    assert all(30.0 <= gap <= 91.0 for gap in gaps(times))
    w.servers["http://a:8000"] = vllm()
    await w.run(91.0)
    assert w.prober.kind(key) is EngineKind.VLLM


async def test_a_new_generation_is_asked_at_once_what_it_is(w: World) -> None:
    old = w.add("a", {})
    await w.run(10.0)
    w.remove(old)
    new = w.add("a", vllm(), generation=2)
    await w.run(0.3)
    assert w.prober.kind(new) is EngineKind.VLLM


async def test_a_newcomer_is_taken_for_what_the_others_are_until_it_has_been_asked(w: World) -> None:
    w.add("a", sglang())
    await w.run(0.3)
    newcomer = w.add("b", vllm())
    assert w.prober.kind(newcomer) is EngineKind.SGLANG
    await w.run(0.3)
    assert w.prober.kind(newcomer) is EngineKind.VLLM


async def test_a_target_that_does_not_answer_yet_is_asked_soon_again_then_less_often(w: World) -> None:
    key = w.add("a", None)
    await w.run(10.0)
    assert 3 <= len(w.asked) <= 6
    await w.run(590.0)
    assert len(w.asked) <= 20
    assert not w.told
    w.servers["http://a:8000"] = vllm()
    await w.run(91.0)
    assert w.prober.kind(key) is EngineKind.VLLM


async def test_the_load_is_as_old_as_the_question(w: World) -> None:
    w.add("a", sglang(), in_flight=1)
    await w.run(1.0)
    w.told.clear()
    w.takes_s = 0.25
    await w.run(3.0)
    assert w.told
    assert {round(told.now - told.polled_at, 6) for told in w.told} == {0.25}


async def test_silence_is_no_verdict_but_after_a_while_the_load_is_unknown(w: World) -> None:
    key = w.add("a", vllm(), in_flight=1)
    await w.run(2.0)
    w.servers["http://a:8000"] = None
    w.told.clear()
    await w.run(FORGET_AFTER_S - 1.0)
    assert w.told == []
    await w.run(2.0)
    assert [told.load for told in w.told] == [None]
    assert w.prober.kind(key) is EngineKind.VLLM  # until it reports otherwise
    w.servers["http://a:8000"] = sglang()
    await w.run(95.0)
    assert w.prober.kind(key) is EngineKind.SGLANG
    assert w.told[-1].load == EngineLoad(2, 0)


async def test_a_short_silence_changes_nothing(w: World) -> None:
    w.add("a", vllm(), in_flight=1)
    for _ in range(5):
        w.servers["http://a:8000"] = vllm()
        await w.run(2.0)
        w.servers["http://a:8000"] = None
        await w.run(FORGET_AFTER_S - 1.0)
    assert {told.load for told in w.told} == {EngineLoad(3, 1)}


@pytest.mark.parametrize("mode", [PushMode.BLIND, PushMode.FIXED_CAP])
async def test_load_that_nobody_wants_is_not_asked_for(mode: PushMode) -> None:
    w = World(Pushing(mode=mode))
    key = w.add("a", vllm(), in_flight=9)
    await w.run(200.0)
    assert w.prober.kind(key) is EngineKind.VLLM
    assert len(w.asked) == 3  # only what it is
    assert w.told == []
    w.pushing = Pushing()
    w.pushes += 1
    await w.run(1.0)
    assert 9 <= len(w.told) <= 11


async def test_a_draining_target_is_left_alone(w: World) -> None:
    key = w.add("a", sglang(), in_flight=3)
    await w.run(1.0)
    w.targets[key] = Target("a", "http://a:8000", state=Readiness.DRAINING)
    w.pushes += 1
    before = len(w.asked)
    await w.run(20.0)
    assert len(w.asked) == before
    assert w.prober.kind(key) is EngineKind.SGLANG


async def test_a_target_that_left_is_not_waited_for(w: World) -> None:
    key = w.add("a", sglang(), in_flight=1)
    w.hold = asyncio.Event()
    await w.run(0.5)
    assert w.under_way["http://a:8000"] == 1
    w.remove(key)
    await w.run(0.1)
    assert w.under_way["http://a:8000"] == 0
    assert w.told == []


@pytest.mark.parametrize("lets_in", [True, False])
async def test_it_is_said_when_somebody_may_go(w: World, lets_in: bool) -> None:
    w.lets_in = lets_in
    w.add("a", sglang(), in_flight=1)
    await w.run(1.0)
    assert w.changes == (len(w.told) if lets_in else 0)
    assert w.told


async def test_a_fault_in_a_probe_is_told_and_the_next_one_comes(
    w: World, caplog: pytest.LogCaptureFixture
) -> None:
    key = w.add("a", sglang(), in_flight=1)
    w.bug = ZeroDivisionError("of the client")
    with caplog.at_level(logging.ERROR, "lb.engines.load_poller"):
        await w.run(0.5)
    assert "of the client" in caplog.text
    w.bug = None
    await w.run(0.5)
    assert w.prober.kind(key) is EngineKind.SGLANG


@pytest.mark.parametrize(
    ("url", "metrics_url"),
    [
        ("http://a:8000", "http://a:8002"),
        ("http://a", "http://a:8002"),
        ("https://a:8000/base/", "https://a:8002"),
        ("http://[::1]:8000", "http://[::1]:8002"),
    ],
)
async def test_an_engine_may_have_its_metrics_on_another_port(w: World, url: str, metrics_url: str) -> None:
    key = Key("a", 1)
    w.targets[key], w.in_flight[key] = Target("a", url), 1
    page = b'\nnv_trt_llm_request_metrics{request_type="waiting"} 4\n'
    w.servers = {
        url: {"/v2": Fetched(200, b'{"name":"triton"}')},
        metrics_url: {"/metrics": Fetched(200, page)},
    }
    await w.run(1.0)
    assert w.prober.kind(key) is EngineKind.TRITON
    assert w.told[-1].load == EngineLoad(None, 4)


async def test_stopping_ends_what_is_under_way(w: World) -> None:
    w.add("a", sglang(), in_flight=1)
    w.hold = asyncio.Event()
    await until(lambda: advance(w) and w.under_way["http://a:8000"] == 1)
    await w.prober.close()
    assert w.under_way["http://a:8000"] == 0


def advance(w: World) -> bool:
    w.now += 0.01
    w.prober.poll_due()
    return True


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true")
