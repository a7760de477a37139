"""The tables of agents in several regions: the time of hand-backs, standby targets, residency zones."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lb.config.regions import Place
from lb.config.schema import Table, Target
from policies.model import ReplicaState
from policies.regions.ownership import NO_DISTANCES, Distances, Ownership
from policies.regions.residency import ResidencyZone, entered_zones, matches, served_zones
from skyserve_cli.controller.balancers.peer_links import PeerLinks, measured
from skyserve_cli.controller.reconcile.lb_config import table_of
from skyserve_cli.controller.reconcile.mappers import goal_of
from skyserve_cli.controller.reconcile.region_tables import (
    entered_table,
    own_table,
    owners_of,
    settles_at,
    unmeasured,
)
from skyserve_cli.spec import SpecError
from skyserve_cli.spec.load import load_text
from tests.unit.test_controller_regions import REPLICAS, agent, ids, replica, row


def test_an_agent_that_comes_back_gets_its_replicas_after_a_while() -> None:
    """Make before break: it has them at once, and the other one lets go of them once it has been ready for 30 s."""

    def owned(west_since: float, now: float) -> dict[str, list[str]]:
        agents = (agent(1, "east"), replace(agent(2, "west"), since=west_since))
        whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))
        return {
            one.zone.region: ids(own_table(whole, REPLICAS, agents, one, lambda agent: "t", now=now)[0])
            for one in agents
        }

    everything = ["11", "12", "13", "14"]
    assert owned(100.0, 129.9) == {"east": everything, "west": ["13"]}
    assert owned(100.0, 130.0) == {"east": ["11", "12", "14"], "west": ["13"]}
    agents = (agent(1, "east"), replace(agent(2, "west"), since=100.0))
    assert settles_at(agents, 110.0) == 130.0
    assert settles_at(agents, 130.0) == float("inf")


def test_when_all_agents_are_new_each_gets_its_own_at_once() -> None:
    agents = tuple(
        replace(agent(number, region), since=100.0) for number, region in ((1, "east"), (2, "west"))
    )
    whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))
    own, _ = own_table(whole, REPLICAS, agents, agents[0], lambda agent: "t", now=101.0)
    assert ids(own) == ["11", "12", "14"]


def test_an_agent_has_what_it_would_inherit_as_standby() -> None:
    agents = (agent(1, "east"), agent(2, "west"))
    whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))
    own, _ = own_table(whole, REPLICAS, agents, agents[0], lambda agent: "t")
    assert [(one.owner, [target.id for target in one.targets]) for one in own.standby] == [
        ("aws/west", ["13"])
    ]
    assert Table.from_json(own.to_json()) == own


def test_agents_of_one_region_know_each_other_as_siblings() -> None:
    agents = (agent(1, "east"), agent(2, "east"), agent(3, "west"))
    whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))
    own, _ = own_table(whole, REPLICAS, agents, agents[0], lambda agent: f"t{agent.id}")
    assert own.regions is not None
    assert [one.id for one in own.regions.siblings] == ["aws/east#2"]
    assert [one.id for one in own.regions.peers] == ["aws/west#3"]
    assert Table.from_json(own.to_json()) == own


def test_the_nearest_agent_owns_a_region_without_agents_and_all_measure_it() -> None:
    agents = (agent(1, "east"), agent(2, "west"))
    whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))

    def owned(distances: Distances, before: Ownership | None = None) -> dict[str, tuple[str, ...]]:
        tables = [
            own_table(whole, REPLICAS, agents, one, lambda agent: "t", distances.rtt_s, before=before)[0]
            for one in agents
        ]
        regions = [table.regions for table in tables]
        assert all(one is not None for one in regions)
        assert all(Table.from_json(table.to_json()) == table for table in tables)
        assert {one.places for one in regions if one} == {(Place("aws/north", north),)}
        return {one.here: one.owned for one in regions if one}

    north = next(one.endpoint or "" for one in REPLICAS if one.zone.region == "north")
    assert owned(NO_DISTANCES) == {"aws/east": ("aws/east", "aws/north"), "aws/west": ("aws/west",)}
    near_west = Distances({("aws/east", "aws/north"): 0.08, ("aws/west", "aws/north"): 0.03})
    assert owned(near_west) == {"aws/east": ("aws/east",), "aws/west": ("aws/west", "aws/north")}
    even = Distances({("aws/east", "aws/north"): 0.029, ("aws/west", "aws/north"): 0.03})
    assert owned(even, Ownership(0, {"aws/north": "aws/west"}))["aws/west"] == ("aws/west", "aws/north")


def test_until_the_owners_are_decided_regions_without_agents_belong_to_all() -> None:
    agents = (agent(1, "east"), agent(2, "west"))
    whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))
    tables = [
        own_table(whole, REPLICAS, agents, one, lambda agent: "t", is_decided=False)[0] for one in agents
    ]
    assert [ids(table) for table in tables] == [["11", "12", "14"], ["13", "14"]]


@pytest.mark.parametrize(("has_tls", "scheme"), [(False, "http"), (True, "https")])
def test_an_agent_knows_where_clients_reach_all_that_are_ready(has_tls: bool, scheme: str) -> None:
    agents = (agent(1, "east"), agent(2, "west"), agent(3, "south", ReplicaState.NOT_READY))
    whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))
    own, _ = own_table(whole, REPLICAS, agents, agents[0], lambda agent: "t", zones=ZONES, has_tls=has_tls)
    assert own.regions is not None
    east, west = own.regions.endpoints
    assert (east.region, east.zones, west.region, west.zones) == (
        "aws/east",
        ("atlantic", "all"),
        "aws/west",
        (),
    )
    assert east.url.startswith(f"{scheme}://192.0.2.")
    assert Table.from_json(own.to_json()) == own


def test_owners_stand_when_all_agents_have_measured_all_regions_without_agents() -> None:
    agents = (agent(1, "east"), agent(2, "west"))
    owners = owners_of(REPLICAS, agents, NO_DISTANCES.rtt_s, inf, (), Ownership())
    assert owners.owners["aws/north"] == "aws/east"
    living = {"aws/east", "aws/west"}
    assert unmeasured(owners, living, NO_DISTANCES.rtt_s)
    half = Distances({("aws/east", "aws/north"): 0.1})
    assert unmeasured(owners, living, half.rtt_s)
    assert not unmeasured(owners, {"aws/east"}, NO_DISTANCES.rtt_s), "there is no choice"
    both = Distances({("aws/east", "aws/north"): 0.1, ("aws/west", "aws/north"): 0.1})
    south = {("aws/east", "aws/south"): 0.1, ("aws/west", "aws/south"): 0.1}
    assert not unmeasured(owners, living, Distances({**both.rtts_s, **south}).rtt_s)


def test_what_agents_measure_and_own_is_put_together() -> None:
    def links(rtts_s: dict[str, float], *owned: str) -> PeerLinks:
        one = PeerLinks(lambda: 0.0)
        one.rtts_s, one.owned = rtts_s, owned
        return one

    found = measured(
        [
            ("aws/east", links({"aws/north": 0.08, "aws/west": 0.07}, "aws/east", "aws/north")),
            ("aws/east", links({"aws/north": 0.07}, "aws/east", "aws/north")),
            ("aws/west", links({"aws/mars": 9.0}, "aws/west", "aws/north")),
        ]
    )
    assert found.rtt_s("aws/north", "aws/east") == 0.07, "the least of two agents"
    assert found.rtt_s("aws/west", "aws/east") == found.rtt_s("aws/east", "aws/west") == 0.07
    assert found.rtt_s("aws/north", "aws/west") is None
    assert found.owners == {"aws/east": "aws/east", "aws/west": "aws/west"}, "north is being handed over"


ZONES = (
    ResidencyZone("atlantic", ("aws/east", "aws/north"), ("aws/east",)),
    ResidencyZone("all", ("aws/*", "!aws/west")),
)


def test_tables_say_which_zones_are_served_where() -> None:
    agents = (agent(1, "east"), agent(2, "west"), agent(3, "south"))
    whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))
    own, _ = own_table(whole, REPLICAS, agents, agents[1], lambda agent: "t", zones=ZONES)
    assert own.regions is not None
    assert {peer.region: peer.zones for peer in own.regions.peers} == {
        "aws/east": ("atlantic", "all"),
        "aws/south": ("all",),
    }
    entered = entered_table(whole, ZONES, "aws/east")
    assert entered.residency == ("atlantic",)
    assert entered.revision != whole.revision
    assert entered_table(whole, ZONES, "aws/west") is whole
    # north has no agent: east serves all its zones, and comes before south.
    east, _ = own_table(whole, REPLICAS, agents, agents[0], lambda agent: "t", zones=ZONES)
    assert east.regions is not None
    assert east.regions.owned == ("aws/east", "aws/north")


async def test_a_region_that_was_lost_is_reached_again_after_a_while() -> None:
    clock = [100.0]
    links = PeerLinks(lambda: clock[0])
    rows = {"east": 0.1, "south": 0.1}
    admin = web.Application()

    async def regions(request: web.Request) -> web.Response:
        peers = [
            {"region": f"aws/{name}", "silent_s": silent_s, "rtt_ms": 100.0}
            for name, silent_s in rows.items()
        ]
        found = {
            "peers": peers,
            "taken_over": ["aws/west"],
            "owned": ["aws/south"],
            "distances_ms": {"aws/mars": 90.0},
        }
        return web.json_response(found)

    admin.router.add_get("/-/regions", regions)
    async with TestServer(admin) as server, aiohttp.ClientSession() as session:

        async def changes(at: float, east_silent_s: float) -> bool:
            clock[0], rows["east"] = at, east_silent_s
            return await links.poll(session, str(server.make_url("")).rstrip("/"), {})

        assert await changes(100.0, 0.1)  # heard for the first time: at once
        assert links.shown(None)[1:] == (tuple(links.rows), ("aws/west",))
        assert links.rtts_s == {"aws/east": 0.1, "aws/south": 0.1, "aws/mars": 0.09}
        assert links.owned == ("aws/south",)
        assert await changes(110.0, 5.0)
        assert not await changes(120.0, 0.1)
        assert not await changes(149.9, 0.1)
        assert await changes(150.0, 0.1)


@pytest.mark.parametrize(
    ("region", "patterns", "held"),
    [
        ("aws/eu-west-1", ["aws/eu-*"], True),
        ("aws/us-east-1", ["aws/eu-*"], False),
        ("gcp/europe-west2", ["!gcp/europe-west2", "gcp/europe-*"], False),
        ("gcp/europe-west4", ["gcp/europe-*", "!gcp/europe-west2"], True),
        ("aws/eu-west-1", [], False),
    ],
)
def test_a_zone_is_a_list_of_regions(region: str, patterns: list[str], held: bool) -> None:
    assert matches(region, patterns) is held
    zone = ResidencyZone("eu", tuple(patterns), tuple(patterns))
    assert served_zones([zone], region) == entered_zones([zone], region) == (("eu",) if held else ())


FILE = """
service:
  residency: {eu: {served_in: [aws/eu-*], entered_in: aws/eu-west-1}}
  load_balancer: {api_keys: [{name: acme, sha256: "%s", residency: %s}]}
  load_balancers: {regions: [aws/eu-west-1, aws/us-east-1], spill: skywalker}
resources: {any_of: [{infra: aws/eu-west-1}, {infra: aws/us-east-1}]}
run: x
"""


def test_a_file_says_which_zones_there_are_and_a_table_which_a_replica_serves() -> None:
    spec = load_text(FILE % ("0" * 64, "eu"), name="chat").spec
    assert spec.residency == (ResidencyZone("eu", ("aws/eu-*",), ("aws/eu-west-1",)),)
    assert spec.regional.spill == "skywalker"
    replicas = (replica(11, "eu-central-1"), replica(12, "us-east-1"))
    table = table_of("chat", spec, replicas, goal_of(row(), spec), {}, 0.0)
    assert [one.zones for one in table.targets] == [("eu",), ()]
    assert [key.residency for key in table.access.keys] == ["eu"]
    assert Table.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("old", "new", "path", "message"),
    [
        ("residency: eu", "residency: us", "service.load_balancer.api_keys[0].residency", "known: eu"),
        (
            "[aws/eu-*]",
            "[aws/ap-*]",
            "service.residency.eu.served_in",
            "has no region where a replica may be",
        ),
        ("[aws/eu-*]", "[europe]", "service.residency.eu.served_in[0]", "must be cloud/region"),
        ("[aws/eu-*]", "['!aws/eu-*']", "service.residency.eu.served_in", "only takes regions out"),
        ("skywalker", "nearest", "service.load_balancers.spill", "must be one of"),
    ],
)
def test_a_file_that_is_wrong_names_the_key(old: str, new: str, path: str, message: str) -> None:
    text = (FILE % ("0" * 64, "eu")).replace(old, new)
    with pytest.raises(SpecError) as caught:
        load_text(text, name="chat")
    (problem,) = caught.value.problems
    assert problem.path == path
    assert message in problem.message
