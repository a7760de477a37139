"""What `serve status` receives about on-demand replicas and of money."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lb.config.schema import Build, BuildKind
from policies.health import FailedProbe
from policies.history import Load
from policies.model import CapacityType, EndReason, Memory, Offer, Replica, ReplicaState, Zone
from provisioners.port.base import Instance, InstanceState
from skyserve_cli.controller.api.views import failure_view, last_failure, service_view, serving_version
from skyserve_cli.controller.balancers.local_fleet import AgentView
from skyserve_cli.controller.balancers.regional_view import RegionalView
from skyserve_cli.controller.reconcile.leases import LeaseWatch
from skyserve_cli.controller.reconcile.mappers import goal_of
from skyserve_cli.spec.load import load_text
from skyserve_cli.state.values import ServiceRow, Spent
from tests.kit import rows

S = ReplicaState
YAML = """
name: chat
service: {{readiness_probe: /health, replica_policy: {{min_replicas: 2, {policy}}}}}
resources: {{use_spot: true}}
run: x
"""
FALLBACK = "dynamic_ondemand_fallback: true"


def spot(replica_id: int, state: S = S.READY) -> Replica:
    return _replica(replica_id, state, CapacityType.SPOT, 0.3)


def on_demand(replica_id: int, state: S = S.READY) -> Replica:
    return _replica(replica_id, state, CapacityType.ON_DEMAND, 1.0)


def _replica(replica_id: int, state: S, kind: CapacityType, price: float) -> Replica:
    offer = Offer(Zone("sky", "east", "east-a"), "m", None, 0.0, kind, price, 1.0)
    return Replica(replica_id, 1, offer, state, 0.0, 0.0, launched_at=None if state is S.REQUESTED else 0.0)


def a_row(*replicas: Replica) -> ServiceRow:
    return rows.a_row(*replicas, wanted=2, target=3)


def view(
    policy: str,
    *replicas: Replica,
    build: Build | None = None,
    balancers: tuple[Replica, ...] = (),
    seen: RegionalView | None = None,
    row: ServiceRow | None = None,
    failed_probes: dict[int, FailedProbe] | None = None,
    printed: dict[tuple[str, int], str] | None = None,
    machines: dict[str, Instance] | None = None,
) -> dict[str, Any]:
    spec = load_text(YAML.format(policy=policy)).spec
    row = row or replace(a_row(*replicas), balancers=balancers)
    agents = {agent.id: seen or RegionalView() for agent in balancers}
    return service_view(
        row, spec, goal_of(row, spec), local_agent=AgentView(True, True, 2, 0, build=build), agents=agents, load=Load(), spent=Spent(0.0, 0.0),
        host="127.0.0.1", ended=(), num_nodes={1: 1}, now=10.0, failed_probes=failed_probes or {},
        printed=printed or {}, machines={"sky": machines or {}},
    )  # fmt: skip


def test_what_the_last_probe_met_is_the_message_of_a_replica_that_has_no_other() -> None:
    refused = FailedProbe(9.0, reached=False, why="probe failed: Connection refused")
    slow = FailedProbe(9.0, reached=True, timed_out=True, why="probe took longer than 15 s")
    wrong = FailedProbe(9.0, reached=True, why="probe returned 307, to /health/")
    failing = replace(spot(4, S.NOT_READY), message="probe returned 503")
    fleet = [spot(1, S.STARTING), spot(2), spot(3), failing, spot(5, S.STARTING), spot(6)]
    shown = view(
        "num_overprovision: 0", *fleet, failed_probes={1: refused, 2: slow, 3: wrong, 4: slow, 5: wrong}
    )
    assert [one["message"] for one in shown["replicas"]] == [
        "waiting for the readiness probe: Connection refused",
        "loaded: its readiness probe waits behind requests (probe took longer than 15 s)",
        "",  # the next tick says what it is
        "probe returned 503",
        "waiting for the readiness probe: probe returned 307, to /health/",
        "",
    ]
    assert shown["load"]["loaded"] == 1


def test_what_is_known_of_the_machine_of_a_replica_that_serves_is_its_message() -> None:
    zone, note = Zone("sky", "east", "east-a"), "TLS in front of it is interpreted, and slower: no OpenSSL"
    machine = Instance(
        "i-1", "t", "own", "chat", 1, zone, CapacityType.SPOT, InstanceState.RUNNING, message=note
    )
    watch = LeaseWatch(lambda service, id_, sentence: None)
    quiet = replace(machine, id="i-2", message="")
    assert watch.observe([machine, quiet, replace(machine, id="i-3", state=InstanceState.TERMINATED)], 0.0)
    assert list(watch.by_id) == ["i-1"]
    fleet = [replace(spot(1), instance_id="i-1"), replace(spot(2), instance_id="i-2")]
    failing = replace(spot(3, S.NOT_READY), instance_id="i-1", message="probe returned 503")
    shown = view("num_overprovision: 0", *fleet, failing, machines=dict(watch.by_id))
    assert [one["message"] for one in shown["replicas"]] == [note, "", "probe returned 503"]


@pytest.mark.parametrize(
    ("replica", "probe", "message"),
    [
        pytest.param(S.PROVISIONING, "", "it prints: 45% of weights", id="newer than why it was launched"),
        pytest.param(S.STARTING, "probe failed: Connection refused", "waiting for the readiness probe: Connection refused; it prints: 45% of weights", id="beside its probe"),
        pytest.param(S.STARTING, "", "", id="no probe was sent yet"),
        pytest.param(S.READY, "", "", id="it serves"),
    ],
)  # fmt: skip
def test_what_a_replica_prints_while_it_comes_up_is_in_its_message(
    replica: ReplicaState, probe: str, message: str
) -> None:
    failed = {1: FailedProbe(9.0, reached=False, why=probe)} if probe else {}
    fleet = replace(spot(1, replica), message="no replica there yet" if replica is S.PROVISIONING else "")
    name = a_row().name
    shown = view("num_overprovision: 0", fleet, failed_probes=failed, printed={(name, 1): "45% of weights"})
    assert [one["message"] for one in shown["replicas"]] == [message]


@pytest.mark.parametrize(
    ("policy", "replicas", "stand_ins"),
    [
        pytest.param(FALLBACK, [spot(1), on_demand(2), on_demand(3)], [2, 3], id="all that are on demand"),
        pytest.param(
            f"{FALLBACK}, base_ondemand_fallback_replicas: 1", [on_demand(2), spot(3), on_demand(4)], [4],
            id="but the oldest, which is always there",
        ),
        pytest.param("base_ondemand_fallback_replicas: 1", [on_demand(1), spot(2)], [], id="no fallback"),
        pytest.param("spot_placer: risk_hedge", [on_demand(1), spot(2)], [1], id="a placer that chooses by itself"),
    ],
)  # fmt: skip
def test_which_replicas_stand_in_for_spot(policy: str, replicas: list[Replica], stand_ins: list[int]) -> None:
    shown = view(policy, *replicas)["replicas"]
    assert [replica["id"] for replica in shown if replica["stands_in"]] == stand_ins


@pytest.mark.parametrize(
    ("replicas", "now", "same_on_demand", "wanted_on_demand"),
    [
        pytest.param([spot(1), spot(2), spot(3)], 0.9, 3.0, 2.0, id="one more than is wanted"),
        pytest.param([on_demand(1), on_demand(2), spot(3)], 2.3, 3.0, 2.0, id="dearer than on demand"),
        pytest.param([spot(1, S.REQUESTED)], 0.0, 0.0, 0.0, id="nothing bought yet"),
    ],
)
def test_what_it_costs_now_and_on_demand(
    replicas: list[Replica], now: float, same_on_demand: float, wanted_on_demand: float
) -> None:
    cost = view(FALLBACK, *replicas)["cost"]
    assert (cost["usd_per_hour"], cost["usd_per_hour_on_demand"]) == (now, same_on_demand)
    assert cost["usd_per_hour_wanted_on_demand"] == wanted_on_demand


CAPACITY, SETUP, PREEMPTED = EndReason.CAPACITY, EndReason.SETUP_FAILED, EndReason.PREEMPTED


def ended(replica_id: int, reason: EndReason) -> Replica:
    return replace(spot(replica_id, S.GONE), ended_at=5.0, end_reason=reason, message="why")


@pytest.mark.parametrize(
    ("live", "gone", "failed", "told"),
    [
        pytest.param([spot(4), spot(5)], [ended(3, CAPACITY)], [], None, id="it is well again"),
        pytest.param([spot(4)], [ended(5, CAPACITY), ended(6, CAPACITY)], [], 6, id="the last to fail"),
        pytest.param([spot(4)], [ended(3, CAPACITY)], [], None, id="not what has been overcome since"),
        pytest.param([], [ended(3, PREEMPTED)], [], None, id="a preemption is no failure"),
        pytest.param([ended(4, SETUP)], [ended(3, SETUP)], [], 4, id="while its machine is given back"),
        pytest.param([spot(4), spot(5)], [ended(3, SETUP)], [1], 3, id="the version was given up"),
    ],
)
def test_why_a_service_is_not_well(
    live: list[Replica], gone: list[Replica], failed: list[int], told: int | None
) -> None:
    row = a_row(*live)
    row = replace(row, memory=replace(row.memory, rollout={"failed": failed}))
    failure = last_failure(row, gone)
    assert (None if failure is None else failure.id) == told


CRASHES = "version 1 crashes: 4 lives in a row shorter than 60 s; the last: exit code 3; one replica in trial"


@pytest.mark.parametrize(
    ("changed", "notes", "next_launch_at"),
    [
        pytest.param({}, f"{CRASHES}, next launch in 40s; and a budget", 50.0, id="it waits"),
        pytest.param({"retry_at": 9.0}, f"{CRASHES}; and a budget", None, id="a replica is tried"),
        pytest.param({"failed": [1]}, f"{CRASHES}; and a budget", None, id="it was given up"),
    ],
)
def test_a_version_that_crashes(changed: dict[str, Any], notes: str, next_launch_at: float | None) -> None:
    known = {"version": 1, "short": 4, "limit_s": 60.0, "at": [1.0]}
    crashing = {
        "failing": 1,
        "failures": 4,
        "retry_at": 50.0,
        "why": "exit code 3",
        "crashes": known,
        **changed,
    }
    row = replace(a_row(), notes=f"{CRASHES}; and a budget", memory=Memory(rollout=crashing))
    shown = view("", row=row)
    assert shown["notes"] == notes
    if "failed" in changed:
        assert shown["trial"] is None
        return
    trial = {"version": 1, "short_lives": 4, "message": CRASHES, "next_launch_at": next_launch_at}
    assert shown["trial"] == trial
    assert view("")["trial"] is None


def test_how_load_balancers_run() -> None:
    assert view("")["load_balancer"]["build"] is None
    native = {"kind": "native", "fast_path": True, "not_compiled": ""}
    assert view("", build=Build(BuildKind.NATIVE, True))["load_balancer"]["build"] == native
    (silent,) = view("", balancers=(on_demand(7),))["load_balancers"]
    assert silent["build"] is None
    seen = RegionalView(build=Build(BuildKind.INTERPRETED, False, "no gcc"))
    (agent,) = view("", balancers=(on_demand(7),), seen=seen)["load_balancers"]
    assert agent["build"] == {"kind": "interpreted", "fast_path": False, "not_compiled": "no gcc"}


def test_a_failure_is_for_programs_and_for_people() -> None:
    shown = view("", ended(3, SETUP))["replicas"][0]
    assert (shown["end_reason"], shown["message"], shown["kept_log"]) == ("SETUP_FAILED", "why", None)
    assert failure_view(ended(3, SETUP)) == {
        "replica_id": 3, "version": 1, "at": 5.0, "cloud": "sky", "region": "east", "zone": "east-a",
        "reason": "SETUP_FAILED", "message": "why",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ready", "same", "given_up", "serves"),
    [
        pytest.param([], [], [], None, id="no replica is ready"),
        pytest.param([5, 5], [], [], 5, id="the new version is not ready yet"),
        pytest.param([5, 6], [], [], 6, id="both serve"),
        pytest.param([5, 6], [], [6], 5, id="a replica of the failed version still ends"),
        pytest.param([4, 5], [4, 5], [], 6, id="the new version keeps the replicas"),
    ],
)
def test_which_version_serves(
    ready: list[int], same: list[int], given_up: list[int], serves: int | None
) -> None:
    replicas = [replace(spot(number), version=version) for number, version in enumerate(ready, 1)]
    row = replace(a_row(*replicas, spot(9, S.STARTING)), version=6, same_replicas=frozenset(same))
    assert serving_version(replace(row, memory=replace(row.memory, rollout={"failed": given_up}))) == serves


def test_the_view_says_who_can_reach_the_endpoint() -> None:
    shown = view("", spot(1))
    assert (shown["endpoint"], shown["endpoint_reach"]) == ("http://127.0.0.1:30001", "this_machine")
