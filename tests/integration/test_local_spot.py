"""The spot market of the local cloud at work: who is preempted, how, and who is not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from policies.model import CapacityType
from provisioners.local import controls as local_controls
from provisioners.local import process_tree as local_process
from provisioners.local.cloud import LocalProvisioner
from provisioners.local.store import LocalStore
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import CapacityError, InvalidRequestError
from tests.kit.eventually import eventually

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the local cloud needs Linux")

OWNER = "owner-1"
CLOUD_YAML = """
cold_start_s: 0
stop_grace_s: 0.5
regions:
  us:
    us-a: {spot_usd_hour: 0.3, on_demand_usd_hour: 1.0, spot_capacity: 3}
    us-b: {spot_usd_hour: 0.3, on_demand_usd_hour: 1.0, spot_capacity: 3}
"""


class Market:
    """A local cloud with two zones, and its instances by number."""

    def __init__(self, home: Path) -> None:
        self.home = home
        store = LocalStore(home)
        store.create()
        store.config_path.write_text(CLOUD_YAML)
        self.cloud = LocalProvisioner(home)

    def launch(
        self, number: int, zone: str = "us-a", use_spot: bool = True, run: str = "exec sleep 1000"
    ) -> Instance:
        need = Requirements((Candidate(zone=zone, use_spot=use_spot),))
        offer = self.cloud.offers(need)[0]
        order = LaunchOrder(f"chat-{number}", OWNER, "chat", number, 1, offer, setup=None, run=run)
        return self.cloud.launch(order)

    def now(self, instance: Instance) -> Instance:
        return {known.token: known for known in self.cloud.instances(OWNER)}[instance.token]

    def states(self) -> list[str]:
        ordered = sorted(self.cloud.instances(OWNER), key=lambda instance: instance.replica_id)
        return [instance.state.value for instance in ordered]

    def until(self, *states: str) -> None:
        eventually(lambda: self.states() == list(states), f"states are {states}")


@pytest.fixture
def market(tmp_path: Path) -> Iterator[Market]:
    made = Market(tmp_path / "home")
    yield made
    for instance in made.cloud.instances(OWNER):
        made.cloud.terminate(instance)
        assert not local_process.marked(instance.id)


def is_answering(instance: Instance) -> bool:
    try:
        with urlopen(instance.endpoint or "", timeout=5) as response:
            return bool(response.status == 200)
    except URLError:
        return False


SERVE = 'exec python3 -u -m http.server "$SKYSERVE_REPLICA_PORT"'


def test_without_notice_it_is_gone_like_a_machine_that_was_unplugged(market: Market) -> None:
    instance = market.launch(1, run=f"trap 'echo never said' TERM; {SERVE}")
    eventually(lambda: is_answering(instance), "it answers")
    assert local_controls.preempt(market.home, instance.token) == [instance.token]
    market.until("preempted")
    assert not is_answering(instance)
    assert not local_process.marked(instance.id)
    assert b"never said" not in market.cloud.read_log(instance, 0, 1 << 20)


@pytest.mark.long
def test_with_notice_it_answers_until_its_time_is_up(market: Market) -> None:
    instance = market.launch(1, run=SERVE)
    eventually(lambda: is_answering(instance), "it answers")
    local_controls.preempt(market.home, instance.token, notice_s=3)
    eventually(lambda: market.now(instance).preempt_at is not None, "the notice is seen")
    assert market.now(instance).state is InstanceState.RUNNING
    assert is_answering(instance)
    market.until("preempted")
    assert market.now(instance).preempt_at is None
    assert not is_answering(instance)


def test_who_is_terminated_under_notice_was_not_preempted(market: Market) -> None:
    instance = market.launch(1)
    local_controls.preempt(market.home, instance.id, notice_s=600)
    eventually(lambda: market.now(instance).preempt_at is not None, "the notice is seen")
    market.cloud.terminate(instance)
    assert market.states() == ["terminated"]


def test_a_zone_is_preempted_as_a_whole_but_for_its_on_demand_instances(market: Market) -> None:
    market.launch(1)
    market.launch(2)
    market.launch(3, use_spot=False)
    market.launch(4, zone="us-b")
    assert local_controls.preempt(market.home, "us-a") == ["chat-1", "chat-2"]
    market.until("preempted", "preempted", "running", "running")
    assert market.launch(5).state is InstanceState.PENDING  # its room is as it was


@pytest.mark.parametrize(
    ("target", "says"),
    [
        pytest.param("us-q", "did you mean 'us-", id="a zone misspelt"),
        pytest.param("chat-1", "only spot is preempted", id="an on-demand instance"),
    ],
)
def test_what_cannot_be_preempted(market: Market, target: str, says: str) -> None:
    market.launch(1, use_spot=False)
    with pytest.raises(InvalidRequestError, match=says):
        local_controls.preempt(market.home, target)


def test_less_room_takes_the_newest_and_refuses_the_next(market: Market) -> None:
    for number in (1, 2, 3):
        market.launch(number)
    local_controls.set_capacity(market.home, "us-a", 1)
    market.until("running", "preempted", "preempted")
    with pytest.raises(CapacityError, match="room for 1"):
        market.launch(4)
    local_controls.set_capacity(market.home, "us-a", None)
    assert market.launch(4).state is InstanceState.PENDING


def test_on_demand_instances_keep_their_place_whatever_room_there_is(market: Market) -> None:
    market.launch(1, use_spot=False)
    market.launch(2)
    local_controls.set_capacity(market.home, "us-a", 0, CapacityType.ON_DEMAND)
    local_controls.set_capacity(market.home, "us-a", 0, CapacityType.SPOT)
    market.until("running", "preempted")
    with pytest.raises(CapacityError):
        market.launch(3, use_spot=False)


def test_a_full_zone_says_so(market: Market) -> None:
    for number in (1, 2, 3):
        market.launch(number)
    with pytest.raises(CapacityError, match="local/us/us-a has no spot capacity left"):
        market.launch(4)
    us_a, us_b = local_controls.zones(market.home)
    assert (us_a.zone, us_a.spot_capacity, us_a.spot_live, us_a.on_demand_capacity) == ("us-a", 3, 3, None)
    assert (us_b.zone, us_b.spot_live, us_b.on_demand_live) == ("us-b", 0, 0)


def test_a_timeline_takes_and_gives(market: Market, tmp_path: Path) -> None:
    for number in (1, 2):
        market.launch(number)
    market.launch(3, zone="us-b")
    market.until("running", "running", "running")
    timeline = tmp_path / "market.yaml"
    timeline.write_text(
        "speed: 100\ntimeline:\n  - {at: 60s, zone: us-a, spot: 1}\n  - {at: 20m, zone: us-a, spot: 2}\n"
    )
    local_controls.play_market(market.home, timeline)
    market.until("running", "preempted", "running")
    with pytest.raises(CapacityError):
        market.launch(4)
    local_controls.play_market(market.home, timeline, speed=1e6)  # the same, and over at once
    eventually(lambda: local_controls.zones(market.home)[0].spot_capacity == 2, "room for two again")
    assert market.launch(4).state is InstanceState.PENDING


def test_a_timeline_may_give_notice(market: Market, tmp_path: Path) -> None:
    instance = market.launch(1)
    timeline = tmp_path / "market.yaml"
    timeline.write_text("timeline: [{at: 0, zone: '*', spot: 0, notice: 1s}]")
    local_controls.play_market(market.home, timeline)
    eventually(lambda: market.now(instance).preempt_at is not None, "the notice is seen")
    market.until("preempted")


def test_a_trace_is_the_whole_world_and_calm_ends_it(market: Market, tmp_path: Path) -> None:
    market.launch(1)
    market.launch(2)
    market.launch(3, zone="us-b")
    trace = tmp_path / "trace"
    trace.mkdir()
    (trace / "us-east-1a.json").write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [2, 2, 1]}))
    local_controls.play_market(market.home, trace, speed=1000)
    market.until("running", "preempted", "preempted")  # the trace has no second zone
    local_controls.calm(market.home)
    assert [zone.spot_capacity for zone in local_controls.zones(market.home)] == [3, 3]
