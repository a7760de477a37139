"""The simulation of several regions: it is deterministic, loses nothing, and shows what distances cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.regions.__main__ import main
from benchmarks.regions.measure import Figures, measure, parts_of
from benchmarks.regions.reference import alone, death, idle, one_way, roaming, trees
from benchmarks.regions.rules import RULES
from benchmarks.regions.scenario import RTT_MS, Clients, Pause, Scenario, ScenarioError, load, three
from benchmarks.regions.world import Result, World

SHORT_S = 45.0


def play(scenario: Scenario, rule: str, seed: int = 1) -> Result:
    return World(scenario, RULES[rule], seed).play()


def figures(scenario: Scenario, rule: str) -> Figures:
    return measure(play(scenario, rule))


@pytest.mark.long
@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_request_is_served_once(rule: str) -> None:
    result = play(idle(10.0), rule)
    names = [one.call_id for one in result.responses]
    assert len(names) == len(set(names)) > 50
    assert result.lost == 0


@pytest.mark.long
def test_the_same_seed_gives_the_same_run() -> None:
    assert play(idle(10.0), "one_cost").digest == play(idle(10.0), "one_cost").digest
    assert play(idle(10.0), "one_cost").digest != play(idle(10.0), "one_cost", seed=2).digest


@pytest.mark.long
def test_without_distances_requests_leave_their_region_for_nothing() -> None:
    blind, measured, local = (figures(idle(SHORT_S), rule) for rule in ("all_view", "all_view_rtt", "local"))
    assert blind.left > 0.5
    assert measured.left < blind.left / 2
    assert measured.ttft_p50 < 0.85 * blind.ttft_p50
    assert local.ttft_p50 < 0.65 * blind.ttft_p50


@pytest.mark.long
def test_an_idle_region_keeps_its_requests() -> None:
    assert figures(idle(SHORT_S), "one_cost").left < 0.08


@pytest.mark.long
@pytest.mark.parametrize("scenario", [roaming(90.0), alone(3)(90.0)], ids=["roaming", "siblings"])
def test_digests_bring_a_conversation_back_to_its_cache(scenario: Scenario) -> None:
    own, shared = figures(scenario, "one_cost_own"), figures(scenario, "one_cost")
    assert shared.hit_rate > own.hit_rate + 0.15
    assert own.digest_kb_per_s == 0.0 < shared.digest_kb_per_s < 20.0


def flooded(region: str) -> Scenario:
    """One replica per region, and one region with more than a replica can serve."""
    shares = {name: 0.9 if name == region else 0.05 for name in ("us", "eu", "asia")}
    clients = Clients("day", {"load": 1.2, "length_s": 20.0, "shares": shares, "swing": 0.0})
    return Scenario("flooded", three(1), RTT_MS, clients)


@pytest.mark.long
def test_a_region_that_overflows_is_helped() -> None:
    alone, helped = figures(flooded("us"), "local"), figures(flooded("us"), "one_cost")
    assert helped.left > 0.1
    assert helped.ttft_p90 < 0.8 * alone.ttft_p90


@pytest.mark.long
@pytest.mark.parametrize("rule", ["one_cost", "skywalker", "gorgo"])
def test_no_byte_of_a_pinned_request_leaves_its_zone(rule: str) -> None:
    free = play(flooded("eu"), rule)
    assert any(one.engine_region != "eu" for one in free.responses if one.region == "eu")
    result = play(replace(flooded("eu"), stay={"eu": frozenset({"eu"})}), rule)
    assert all(one.engine_region == "eu" for one in result.responses if one.region == "eu")
    assert result.outside_bytes == 0


@pytest.mark.parametrize(("rule", "outside"), [("all_view", False), ("central_ll", True)])
def test_one_layer_obeys_zones_and_a_central_balancer_is_outside_of_them(rule: str, outside: bool) -> None:
    result = play(replace(short(), stay={"eu": frozenset({"eu"})}), rule)
    pinned = [one for one in result.responses if one.region == "eu"]
    assert pinned
    assert all(one.engine_region == "eu" for one in pinned)
    assert (result.outside_bytes > 0) is outside


def short(**change: object) -> Scenario:
    """A few conversations in three regions of one replica each."""
    clients = Clients("day", {"load": 1.2, "length_s": 8.0, "demand_replicas": 3, "swing": 0.0})
    return replace(Scenario("short", three(1), RTT_MS, clients), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_clients_of_a_region_without_replicas_are_served_elsewhere(rule: str) -> None:
    result = play(short(regions=three({"us": 1, "eu": 1, "asia": 0})), rule)
    assert {one.region for one in result.responses} == {"us", "eu", "asia"}
    assert {one.engine_region for one in result.responses} == {"us", "eu"}


def test_engines_of_a_region_have_profiles_of_their_own() -> None:
    us, *others = three(1)
    fast = replace(us, replicas=0, engines={"a100-7b": 1})
    result = play(short(regions=(fast, *others)), "local")
    pace = {
        region: min(
            (one.ended_at - one.first_at) / one.response_tokens
            for one in result.responses
            if one.engine_region == region
        )
        for region in ("us", "eu")
    }
    assert pace["us"] < 0.3 * pace["eu"]


def test_messages_between_regions_take_more_or_less_with_jitter() -> None:
    plain = play(short(), "all_view")
    shaken = play(short(jitter=0.2), "all_view")
    assert shaken.digest != plain.digest
    assert shaken.digest == play(short(jitter=0.2), "all_view").digest
    assert all(one.arrived_at < one.first_at <= one.ended_at for one in shaken.responses)


def test_a_crowd_adds_conversations_of_its_region_in_its_time() -> None:
    about = {"region": "eu", "at_s": 2.0, "until_s": 4.0, "times": 6.0}
    calm = short()
    loud = replace(calm, clients=replace(calm.clients, options={**calm.clients.options, "crowds": [about]}))
    starts = [
        {(one.region, one.arrived_at) for one in play(it, "local").responses if ".0" in one.call_id}
        for it in (calm, loud)
    ]
    added = starts[1] - starts[0]
    assert starts[0] <= starts[1]
    assert added
    assert all(region == "eu" and 2.0 < at_s < 4.0 for region, at_s in added)


def test_agents_of_one_region_share_its_replicas() -> None:
    result = play(short(regions=tuple(replace(one, agents=2) for one in three(1))), "one_cost")
    assert {one.engine_region for one in result.responses} == {"us", "eu", "asia"}
    assert result.lost == 0


def test_clients_of_an_agent_that_is_stopped_wait_and_lose_nothing() -> None:
    pause = Pause("eu", 2.0, 10.0)
    result = play(short(pauses=(pause,)), "one_cost")
    held = [one for one in result.responses if one.region == "eu" and 2.0 < one.arrived_at < 6.0]
    assert held
    assert all(one.first_at > pause.until_s for one in held)
    assert result.lost == 0


@pytest.mark.long
def test_money_keeps_requests_in_their_region() -> None:
    dear = tuple(replace(one, egress_usd_per_gb=100.0) for one in three(1))
    crowded = replace(flooded("us"), regions=dear)
    options = {**crowded.clients.options, "length_s": 6.0}
    crowded = replace(crowded, clients=replace(crowded.clients, options=options))
    free, priced = (measure(play(replace(crowded, usd_per_second=usd), "one_cost")) for usd in (None, 0.001))
    assert priced.left < 0.5 * free.left


@pytest.mark.long
def test_parts_of_a_run_have_figures_of_their_own() -> None:
    scenario = replace(death(60.0), stay={"us": frozenset({"us"})})
    (dead,) = scenario.deaths
    scenario = replace(scenario, deaths=(replace(dead, clients_find_s=6.0),))
    result = play(scenario, "one_cost")
    parts = parts_of(scenario)
    assert [part.name for part in parts] == [
        "",
        "eu dead",
        "eu dead, clients moved",
        "clients of us",
        "clients of asia, eu",
    ]
    whole, outage, moved, pinned, others = (
        measure(result, part.since_s, part.until_s, part.regions) for part in parts
    )
    assert whole.requests == pinned.requests + others.requests
    assert whole.requests > outage.requests > moved.requests > 0
    assert outage.ttft_p99 > moved.ttft_p99, "clients wait until they find another agent"
    assert pinned.left == 0


@pytest.mark.long
def test_the_death_of_an_agent_loses_only_what_it_held() -> None:
    scenario = death(90.0)
    (dead,) = scenario.deaths
    dead = replace(dead, clients_find_s=6.0)
    result = play(replace(scenario, deaths=(dead,)), "one_cost")
    assert result.lost > 0
    names = [one.call_id for one in result.responses]
    assert len(names) == len(set(names))
    since = dead.at_s + dead.clients_find_s
    without = [
        one for one in result.responses if one.region == "eu" and since <= one.arrived_at < dead.until_s
    ]
    assert any(one.engine_region == "eu" for one in without), "adopted replicas serve"


@pytest.mark.long
def test_a_one_way_partition_only_closes_that_way() -> None:
    scenario = one_way(15.0)
    (cut,) = scenario.cuts
    result = play(scenario, "one_cost")
    names = [one.call_id for one in result.responses]
    assert len(names) == len(set(names))
    assert cut.source == "us"


def test_trees_enter_in_every_region() -> None:
    scenario = replace(
        trees(60.0), clients=Clients("trees", {"clients": {"us": 2, "eu": 1, "asia": 1}, "trees": 1})
    )
    result = play(scenario, "one_cost")
    assert len(result.responses) == 4 * 15
    assert {one.region for one in result.responses} == {"us", "eu", "asia"}


FILE = """
regions: {here: {replicas: 1}, there: {replicas: 2}}
rtt_ms: {here-there: 80}
clients: {kind: day, load: 0.2, length_s: 15, demand_replicas: 3}
deaths: [{region: here, at_s: 5, until_s: 8}]
"""


def test_a_scenario_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(FILE)
    scenario = load(path)
    assert scenario.name == "two"
    assert {one.region for one in play(scenario, "one_cost").responses} == {"here", "there"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rtt_ms: {here-there: 80}", "rtt_ms: {}"), "rtt_ms.here-there is missing"),
        (("here-there: 80", "here-moon: 80"), "rtt_ms.here-moon"),
        (("deaths:", "dead:"), "unknown key 'dead'"),
        (("clients: {kind: day, ", "clients: {"), "'kind' is missing"),
        (("replicas: 1", "count: 1"), "count"),
        (("replicas: 1}", "engines: {h200: 1}}"), "unknown profile 'h200'"),
        (("replicas: 1}", "replicas: 1, agents: 0}"), "regions.here.agents"),
        (("region: here,", "region: moon,"), "deaths: no such region: moon"),
        (("rtt_ms:", "jitter: 1.5\nrtt_ms:"), "jitter"),
        (("there: {replicas: 2}}", "there: {}}\nstay: {here: [there]}"), "stay.here"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "wrong.yaml"
    assert change[0] in FILE
    path.write_text(FILE.replace(*change))
    with pytest.raises(ScenarioError, match=message):
        load(path)


def test_the_command_prints_a_table_of_a_scenario_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "regions: {a: {replicas: 1}, b: {replicas: 1}}\n"
        "rtt_ms: {a-b: 80}\n"
        "clients: {kind: day, load: 0.1, length_s: 20}\n"
    )
    words = [
        "regions",
        "table",
        "--scenario",
        str(path),
        "--rules",
        "local,one_cost",
        "--seeds",
        "2",
        "--jobs",
        "1",
    ]
    monkeypatch.setattr("sys.argv", words)
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "two: 2 seeds" in lines
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")][2:] == [
        "local",
        "one_cost",
    ]


@pytest.mark.long
def test_the_example_of_a_scenario_file_plays() -> None:
    path = Path(__file__).parents[2] / "benchmarks/regions/scenarios/uneven.yaml"
    scenario = load(path)
    short = replace(scenario.clients, options={**scenario.clients.options, "load": 0.2})
    found = play(replace(scenario, clients=short), "one_cost")
    pinned = [one for one in found.responses if one.region == "eu"]
    assert pinned
    assert all(one.engine_region == "eu" for one in pinned)
