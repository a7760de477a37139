"""Limits of API keys that several agents share: buckets in virtual time, messages by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.config.options import Access
from lb.core.api_keys import Admission, ApiKeyStore
from lb.core.beats import MAX_FRAME_BYTES, USED, BeatError, UsedReport, decode, encode_used, frames
from lb.core.shared_quota import SLACK, Counters, SharedQuota
from tests.kit.api_keys import api_key

CREDENTIALS = ((b"x-api-key", b"secret"),)


class Agents:
    """Agents that share the limits of one key."""

    def __init__(self, count: int, requests: float = 0.0, tokens: float = 0.0) -> None:
        key = api_key("acme", "secret", requests_per_minute=requests, tokens_per_minute=tokens)
        self.names = [f"agent-{number}" for number in range(count)]
        self.stores = {name: ApiKeyStore(Access((key,)), 0.0) for name in self.names}
        self.quotas = {name: SharedQuota() for name in self.names}
        self._beats = itertools.count(1)
        for name, store in self.stores.items():
            store.quota = self.quotas[name]
            self.reach(name, set(self.names))

    def reach(self, name: str, reachable: set[str], dead: set[str] | None = None) -> None:
        others = set(self.names) - {name}
        self.quotas[name].peers(reachable & others, dead or set(), others)

    def enter(self, name: str, now: float) -> Admission | None:
        found = self.stores[name].admit_head(CREDENTIALS, now)
        return found if isinstance(found, Admission) else None

    def flood(self, name: str, now: float, most: int = 10_000) -> int:
        """Let requests in until one is refused."""
        return sum(1 for _ in itertools.takewhile(lambda _: self.enter(name, now), range(most)))

    def tell(self, source: str, target: str, now: float, answered: bool = True) -> None:
        """Send the changes from one agent to another one, whose next beat acknowledges it."""
        beat = next(self._beats)
        used = self.quotas[source].unsent(target, 1, beat)
        self.stores[target].charge(self.quotas[target].receive(source, 1, used), now)
        if answered:
            self.quotas[source].acknowledged(target, beat)

    def tell_all(self, now: float) -> None:
        for source, target in itertools.permutations(self.names, 2):
            self.tell(source, target, now)


def test_what_one_agent_lets_in_is_charged_at_all() -> None:
    agents = Agents(2, requests=2)
    assert agents.flood("agent-0", 0.0) == 2
    agents.tell_all(0.0)
    assert agents.flood("agent-1", 0.0) == 0
    assert agents.flood("agent-1", 30.0) == 1


@pytest.mark.parametrize("count", [2, 3, 10])
def test_agents_that_are_flooded_at_once_let_in_no_more_than_the_limit(count: int) -> None:
    """No message has come yet: each sees a full bucket."""
    agents = Agents(count, requests=600)
    assert sum(agents.flood(name, 0.0) for name in agents.names) <= 600 + SLACK * count


def test_one_busy_agent_gets_the_whole_limit_as_the_others_acknowledge() -> None:
    agents = Agents(3, requests=600)
    let_in = 0
    for _ in range(30):
        let_in += agents.flood("agent-0", 0.0)
        agents.tell_all(0.0)
    assert let_in == 600


def test_over_a_minute_a_flood_of_all_gets_the_limit() -> None:
    agents = Agents(3, requests=600)
    let_in = []
    for tenth in range(3000):
        now = tenth / 10
        let_in.append(sum(agents.flood(name, now) for name in agents.names))
        if tenth % 3 == 0:
            agents.tell_all(now)
    assert sum(let_in[:600]) <= 1230  # a full bucket, and a minute's worth
    for minute in range(1, 5):
        assert 570 <= sum(let_in[600 * minute : 600 * (minute + 1)]) <= 630


def test_tokens_are_shared_with_their_reservations() -> None:
    agents = Agents(2, tokens=1000)
    admission = agents.enter("agent-0", 0.0)
    assert admission is not None
    assert agents.stores["agent-0"].reserve(admission, "", 600, 400, 0.0) is None
    agents.tell_all(0.0)
    # 856 tokens are reserved: the prompt's, and as many as a request is thought to generate.
    assert next(agents.stores["agent-1"].usage(0.0)).tokens_left == 144
    agents.stores["agent-0"].settle(admission, 600, 100, 0.0)
    agents.tell_all(0.0)
    assert next(agents.stores["agent-1"].usage(0.0)).tokens_left == 300


def test_in_a_partition_each_side_has_its_share() -> None:
    agents = Agents(3, requests=600)
    for name in agents.names:
        agents.flood(name, 0.0)
    agents.reach("agent-0", set())
    for name in ("agent-1", "agent-2"):
        agents.reach(name, {"agent-1", "agent-2"})
    assert agents.quotas["agent-0"].share == pytest.approx(1 / 3)
    assert agents.quotas["agent-1"].share == pytest.approx(2 / 3)
    agents.reach("agent-1", {"agent-2"}, dead={"agent-0"})
    assert agents.quotas["agent-1"].share == 1.0


def test_what_was_let_in_during_a_partition_makes_no_debt() -> None:
    agents = Agents(2, requests=60)
    agents.flood("agent-1", 0.0)
    agents.tell_all(0.0)
    agents.reach("agent-0", set())
    agents.reach("agent-1", set())
    for second in range(600):
        agents.flood("agent-1", float(second))
    agents.tell("agent-1", "agent-0", 600.0)
    assert next(agents.stores["agent-0"].usage(600.0)).requests_left == 0.0


def test_counters_that_come_again_or_late_change_nothing() -> None:
    quota = SharedQuota()
    quota.peers({"other"}, set(), {"other"})
    assert quota.receive("other", 7, {"acme": Counters(5)})[0].used.requests == 5
    assert quota.receive("other", 7, {"acme": Counters(5)})[0].used.requests == 0
    assert quota.receive("other", 7, {"acme": Counters(3)})[0].used.requests == 0
    assert quota.receive("other", 8, {"acme": Counters(3)})[0].used.requests == 3  # another life
    assert quota.receive("stranger", 8, {"acme": Counters(3)}) == []


def test_a_new_connection_gets_all_again() -> None:
    quota = SharedQuota()
    quota.peers({"other"}, set(), {"other"})
    quota.take("acme", 3, 10, 4, 7)
    assert quota.has_unsent
    whole = {"acme": Counters(3, 0, 10, 0, 4, 0, 7)}
    assert quota.unsent("other", 1, 1) == whole
    assert quota.unsent("other", 1, 2) == {}
    assert quota.unsent("other", 2, 3) == whole
    assert quota.reserved("acme") == (0, 10, 4)
    quota.acknowledged("other", 3)
    assert quota.reserved("acme") == (0, 0, 0)


NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=100)
NUMBERS = st.integers(0, 2**53)


@given(st.dictionaries(NAMES, st.builds(Counters, *[NUMBERS] * len(Counters._fields)), max_size=60))
def test_frames_are_short_and_have_all(used: dict[str, Counters]) -> None:
    received, rest = frames(encode_used(9, used))  # raises for one that is too long
    assert rest == b""
    assert all(len(data) <= MAX_FRAME_BYTES for _, data in received)
    found: dict[str, Counters] = {}
    for kind, data in received:
        report = decode(kind, data)
        assert isinstance(report, UsedReport)
        assert report.boot == 9
        found |= report.used
    assert found == used


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b'{"used":[]}', b'{"used":{"a":[1]}}', b'{"used":{"a":[1,2,3,4,5,6,-1]}}', b'{"used":{}}'],
)
def test_what_are_no_counters_is_refused(data: bytes) -> None:
    with pytest.raises(BeatError):
        decode(USED, data)
