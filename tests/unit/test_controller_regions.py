"""Load balancer agents on machines of their own: the orders for them, and their view. The pure parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lb.config.regions import PeerAgent
from lb.config.schema import Readiness, Stats, Table, Target
from policies.history import Load
from policies.model import CapacityType, Offer, Replica, ReplicaState, Role, Zone
from provisioners.port.dns import Endpoint
from skyserve_cli.controller.api.views import endpoints_of
from skyserve_cli.controller.reconcile.demand import load_of, merged
from skyserve_cli.controller.reconcile.lb_config import without_loopback
from skyserve_cli.controller.reconcile.mappers import (
    agent_fleet_of,
    agent_order_of,
    agent_requirements_of,
    has_local_agent,
    name_orders_of,
    token_of,
)
from skyserve_cli.controller.reconcile.ports import NameOrder
from skyserve_cli.controller.reconcile.region_tables import (
    drained_elsewhere,
    is_linked,
    own_table,
    reachable_table,
)
from skyserve_cli.spec.load import load_text
from skyserve_cli.spec.model import ServiceSpec, Tls
from skyserve_cli.state.values import ServiceRow
from tests.kit.rows import a_row

S = ReplicaState


def spec(balancers: str = "", service: str = "") -> ServiceSpec:
    section = f"load_balancers: {balancers}" if balancers else ""
    return load_text(f"service: {{{', '.join(filter(None, [section, service]))}}}\nrun: x", name="chat").spec


def agent(
    id: int, region: str = "east", state: ReplicaState = S.READY, version: int = 1, kind: str = "small"
) -> Replica:
    offer = Offer(Zone("aws", region, f"{region}1"), kind, None, 0.0, CapacityType.ON_DEMAND, 0.1)
    return Replica(
        id, version, offer, state, 0.0, 0.0, f"i-{id}", f"http://192.0.2.{id}:8000", role=Role.LOAD_BALANCER
    )


def row(*agents: Replica, **changes: Any) -> ServiceRow:
    return a_row(wanted=1, target=1, balancers=agents, **changes)


EAST_WEST = "{regions: [aws/east, aws/west]}"
NAMED = "{regions: [aws/east, aws/west], dns: {zone: Example.com, name: chat}}"
BEHIND = "{regions: [aws/east, aws/west], url: https://chat.example.com/}"


@pytest.mark.parametrize(
    ("balancers", "found", "local_agent"),
    [
        pytest.param("", row(), True, id="no regions"),
        pytest.param(EAST_WEST, row(), False, id="a new service waits for its regions"),
        pytest.param(EAST_WEST, row(version=2), True, id="an updated one keeps what it had"),
        pytest.param(
            EAST_WEST, row(agent(1, state=S.STARTING), version=2), True, id="until an agent is ready"
        ),
        pytest.param(EAST_WEST, row(agent(1), version=2), False, id="and then no longer"),
        pytest.param(EAST_WEST, row(version=2, down=True), False, id="one that goes down needs none"),
    ],
)
def test_who_has_an_agent_beside_the_controller(balancers: str, found: ServiceRow, local_agent: bool) -> None:
    assert has_local_agent(found, spec(balancers)) is local_agent


def test_the_machine_of_an_agent_gets_its_keeper_and_a_token_and_nothing_else_of_the_service() -> None:
    wanted = spec("{regions: aws/east, port: 443}", "readiness_probe: /health")
    order = agent_order_of("own", "chat", "abcd", agent(7), wanted, "hush")
    assert (order.role, order.port, order.num_nodes) == (Role.LOAD_BALANCER, 443, 1)
    assert order.secrets == {"SKYSERVE_LB_TOKEN": "hush"}
    assert list(order.file_mounts) == ["keeper.py"]
    assert "hush" not in f"{order.run}{order.setup}{order.env}{order!r}"
    assert "ip_unprivileged_port_start=443" in (order.setup or "")
    assert order == agent_order_of("own", "chat", "abcd", agent(7), wanted, "hush")


@pytest.mark.parametrize("balancers", ["{regions: aws/east}", "{regions: aws/east, port: 8443}"])
def test_a_port_that_is_anybodys_needs_no_setup(balancers: str) -> None:
    assert agent_order_of("own", "chat", "abcd", agent(7), spec(balancers), "").setup is None


def test_what_is_asked_of_the_clouds() -> None:
    regional = spec("{regions: [aws/east, gcp/west], instance_type: {gcp: e2-medium}}").regional
    need = agent_requirements_of(regional)
    assert need.role is Role.LOAD_BALANCER
    asked = [
        (one.cloud, one.region, one.instance_type, one.accelerator, one.use_spot) for one in need.candidates
    ]
    assert asked == [("aws", "east", None, None, False), ("gcp", "west", "e2-medium", None, False)]


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        pytest.param("{regions: aws/east}", True, id="any type will do"),
        pytest.param("{regions: aws/east, instance_type: small}", True, id="the type it has"),
        pytest.param("{regions: aws/east, instance_type: large}", False, id="another type"),
        pytest.param("{regions: aws/east, port: 80}", False, id="another port"),
    ],
)
def test_which_agents_fit(wanted: str, fits: bool) -> None:
    specs = {1: spec("{regions: aws/east}"), 2: spec(wanted)}
    fleet = agent_fleet_of(row(agent(5), version=2), [agent(5)], specs.__getitem__)
    assert (5 in fleet.fitting) is fits


def test_a_name_means_the_agents_that_may_answer() -> None:
    agents = [agent(1), agent(2, "west", S.NOT_READY), agent(3, state=S.DRAINING), agent(4, state=S.STARTING)]
    (order,) = name_orders_of("own", row(*agents), agents, lambda version: spec(NAMED))
    assert order == NameOrder(
        "chat",
        "example.com.",
        "chat.example.com.",
        tuple(
            (
                "aws",
                region,
                Endpoint(
                    f"192.0.2.{one.id}",
                    token_of("own", "chat", row().incarnation, one.id, one.offer),
                    8000,
                    "http",
                ),
            )
            for region, one in zip(("east", "west"), agents, strict=False)
        ),
    )


def test_checks_of_a_name_can_be_turned_off_and_go_by_the_scheme_of_the_service() -> None:
    off = spec("{regions: aws/east, dns: {zone: example.com, name: chat, health_check: false}}")
    (order,) = name_orders_of("own", row(), [agent(1)], lambda version: off)
    assert [one.scheme for _, _, one in order.agents] == [""]
    secure = replace(spec(NAMED), tls=Tls("key.pem", "cert.pem"))
    (order,) = name_orders_of("own", row(), [agent(1)], lambda version: secure)
    assert [one.scheme for _, _, one in order.agents] == ["https"]


def test_a_name_of_before_and_the_name_of_a_service_that_goes_down_mean_nothing() -> None:
    versions = {
        1: spec(NAMED),
        2: spec("{regions: aws/east, dns: {zone: example.com, name: talk}}"),
        3: spec(),
    }
    nothing = NameOrder("chat", "example.com.", "chat.example.com.")
    assert name_orders_of("own", row(version=2), [agent(1)], versions.__getitem__)[1:] == [nothing]
    assert name_orders_of("own", row(down=True), [agent(1)], versions.__getitem__) == [nothing]
    assert name_orders_of("own", row(version=3), [], versions.__getitem__) == [
        NameOrder("chat", "example.com.", "talk.example.com.")
    ]


@pytest.mark.parametrize(
    ("balancers", "agents", "local_agent", "endpoints"),
    [
        pytest.param("", [], True, ["http://127.0.0.1:30001"], id="beside the controller"),
        pytest.param(EAST_WEST, [], False, [], id="none is ready yet"),
        pytest.param(
            EAST_WEST,
            [agent(1, "west"), agent(2, "east"), agent(3, "east", S.DRAINING)],
            False,
            ["http://192.0.2.2:8000", "http://192.0.2.1:8000"],
            id="in the order of the file",
        ),
        pytest.param(
            NAMED,
            [agent(1, "west")],
            False,
            ["http://chat.example.com:8000", "http://192.0.2.1:8000"],
            id="the name before all",
        ),
        pytest.param(
            BEHIND,
            [agent(1, "west")],
            False,
            ["https://chat.example.com", "http://192.0.2.1:8000"],
            id="what is before the load balancers",
        ),
        pytest.param(BEHIND, [], False, [], id="before nothing"),
    ],
)
def test_where_a_service_answers(
    balancers: str, agents: list[Replica], local_agent: bool, endpoints: list[str]
) -> None:
    assert endpoints_of(row(*agents), spec(balancers), "127.0.0.1", is_local=local_agent) == endpoints


def load(**values: Any) -> Load:
    return Load(**{"known": True, **values})


@pytest.mark.parametrize(
    ("loads", "whole"),
    [
        pytest.param([], Load(), id="nobody to ask"),
        pytest.param([load(requests=5)], load(requests=5), id="one agent"),
        pytest.param([Load(), Load()], Load(), id="nobody has said anything"),
        pytest.param(
            [load(requests=60, in_flight=1, queued=2), load(requests=30, in_flight=3, ongoing=1.5)],
            load(requests=90, in_flight=4, queued=2, ongoing=1.5),
            id="two agents",
        ),
        pytest.param(
            [load(window_s=60.0, requests=60), load(window_s=10.0, requests=20)],
            load(window_s=60.0, requests=180),
            id="windows of different length: the rates add up",
        ),
        pytest.param(
            [load(empty=frozenset({1, 2})), load(empty=frozenset({2, 3}))],
            load(empty=frozenset({2})),
            id="empty for all is empty",
        ),
        pytest.param([load(empty=frozenset({1})), Load()], load(), id="who is silent has not said empty"),
    ],
)
def test_the_load_of_all_agents(loads: list[Load], whole: Load) -> None:
    assert merged(loads) == whole


def test_an_agent_elsewhere_is_not_told_of_replicas_on_this_machine() -> None:
    here = [
        Target(str(i), url)
        for i, url in enumerate(("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"))
    ]
    there = Target("9", "http://192.0.2.9:8000")
    table = Table("chat", "7", (*here, there))
    assert without_loopback(table).targets == (there,)
    assert without_loopback(table).revision != table.revision
    plain = Table("chat", "7", (there,))
    assert without_loopback(plain) is plain


def replica(id: int, region: str, state: ReplicaState = S.READY) -> Replica:
    offer = Offer(Zone("aws", region, f"{region}1"), "gpu", "L4", 1.0, CapacityType.SPOT, 0.3)
    return Replica(id, 1, offer, state, 0.0, 0.0, f"i-{id}", f"http://198.51.100.{id}:8000")


def split(*agents: Replica, replicas: tuple[Replica, ...]) -> dict[str, Table]:
    """The table of each agent, by its region."""
    drained = {ReplicaState.DRAINING: Readiness.DRAINING}
    targets = tuple(
        Target(str(one.id), one.endpoint or "", state=drained.get(one.state, Readiness.READY))
        for one in replicas
    )
    whole = Table("chat", "r1", targets)
    return {
        one.zone.region: own_table(whole, replicas, agents, one, lambda agent: f"token-{agent.id}")[0]
        for one in agents
    }


def ids(table: Table) -> list[str]:
    return [target.id for target in table.targets]


REPLICAS = (replica(11, "east"), replica(12, "east"), replica(13, "west"), replica(14, "north"))


def test_each_agent_has_the_replicas_of_its_region_and_the_others_as_peers() -> None:
    found = split(agent(1, "east"), agent(2, "west"), replicas=REPLICAS)
    assert ids(found["east"]) == [
        "11",
        "12",
        "14",
    ]  # no distance is known to north: the first by name
    assert ids(found["west"]) == ["13"]
    regions = found["west"].regions
    assert regions is not None
    assert (regions.agent, regions.here, regions.owned) == ("aws/west#2", "aws/west", ("aws/west",))
    (peer,) = regions.peers
    assert peer == PeerAgent(
        "aws/east#1",
        "aws/east",
        "https://192.0.2.1:8443",
        "token-1",
        egress_usd_per_gb=0.02,
        ingress_usd_per_gb=0.02,
    )
    assert Table.from_json(found["west"].to_json()) == found["west"]


def test_the_replicas_of_a_dead_agent_are_adopted_and_handed_back_when_it_is_ready() -> None:
    dead = split(agent(1, "east"), agent(2, "west", S.NOT_READY), replicas=REPLICAS)
    assert ids(dead["east"]) == ["11", "12", "13", "14"]
    assert ids(dead["west"]) == ["13"]  # what it will own, before the other one lets go
    assert [peer.id for peer in dead["east"].regions.peers] == ["aws/west#2"]  # type: ignore[union-attr]
    starting = split(agent(1, "east"), agent(3, "west", S.STARTING), replicas=REPLICAS)
    assert starting["east"].regions.peers == ()  # type: ignore[union-attr]
    assert ids(starting["west"]) == ["13"]


def test_two_agents_of_a_region_share_its_replicas_and_are_no_peers() -> None:
    first, second, other = agent(1, "east"), agent(2, "east"), agent(3, "west")
    whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))
    tables = [
        own_table(whole, REPLICAS, (first, second, other), one, lambda agent: "t")[0]
        for one in (first, second)
    ]
    assert ids(tables[0]) == ids(tables[1])
    for table in tables:
        assert [peer.region for peer in table.regions.peers] == ["aws/west"]  # type: ignore[union-attr]


def test_a_table_has_another_revision_when_a_peer_or_a_replica_comes() -> None:
    one = split(agent(1, "east"), agent(2, "west"), replicas=REPLICAS)
    same = split(agent(1, "east"), agent(2, "west"), replicas=REPLICAS)
    third = split(agent(1, "east"), agent(2, "west"), agent(3, "north"), replicas=REPLICAS)
    assert one["east"].revision == same["east"].revision
    assert len({one["east"].revision, third["east"].revision, one["west"].revision}) == 3


def test_a_draining_replica_is_empty_for_an_agent_that_does_not_have_it() -> None:
    replicas = (replica(11, "east", S.DRAINING), replica(13, "west"))
    whole = Table(
        "chat", "r1", (Target("11", "http://x", state=Readiness.DRAINING), Target("13", "http://y"))
    )
    agents = (agent(1, "east"), agent(2, "west"))
    east, not_east = own_table(whole, replicas, agents, agents[0], lambda agent: "t")
    west, not_west = own_table(whole, replicas, agents, agents[1], lambda agent: "t")
    assert drained_elsewhere(not_west, west) == {11}
    assert drained_elsewhere(not_east, east) == frozenset()
    stats = Stats("chat", "west", "r1", 60.0, 60.0, 0, 0, 0, 0)
    loads = [load_of(stats, east), load_of(stats, west, frozenset({11}))]
    assert merged(loads).empty == {11}
    assert drained_elsewhere(not_west, reachable_table(west, not_west, ())) == frozenset()


def test_an_agent_has_the_replicas_of_regions_that_it_cannot_reach() -> None:
    agents = (agent(1, "east"), agent(2, "west"), agent(3, "south"))
    whole = Table("chat", "r1", tuple(Target(str(one.id), one.endpoint or "") for one in REPLICAS))
    own, elsewhere = own_table(whole, REPLICAS, agents, agents[1], lambda agent: "t")
    alone = reachable_table(own, elsewhere, ())
    assert sorted(ids(alone)) == ["11", "12", "13", "14"]
    assert reachable_table(own, elsewhere, {"aws/east"}) is own
    assert alone.revision != own.revision
    assert alone.regions == own.regions


@pytest.mark.parametrize(
    ("balancers", "linked"),
    [
        ("", False),
        ("{regions: aws/east}", False),
        ("{regions: aws/east, count: 2}", True),
        (EAST_WEST, True),
    ],
)
def test_agents_are_linked_where_there_are_several(balancers: str, linked: bool) -> None:
    wanted = spec(balancers)
    assert is_linked(wanted) is linked
    if balancers:
        assert agent_order_of("own", "chat", "abcd", agent(7), wanted, "hush").has_peers is linked
