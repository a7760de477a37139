"""The renderings of `serve status` in docs/status.md are what the command prints."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lb.config.schema import Build, BuildKind
from policies.history import Load
from policies.model import CapacityType, EndReason, Memory, Offer, Replica, ReplicaState, Zone
from skyserve_cli.commands.status_tables import tables
from skyserve_cli.controller.api.views import last_failure, service_view
from skyserve_cli.controller.balancers.local_fleet import AgentView
from skyserve_cli.controller.reconcile.mappers import goal_of
from skyserve_cli.spec.load import load_text
from skyserve_cli.state.values import Spent
from tests.kit.rows import a_row

PAGE = (Path(__file__).parents[2] / "docs" / "status.md").read_text()
SHOWN = re.findall(r"^<!-- (\d+) columns(, wide)? -->\n```text\n(.*?)```$", PAGE, re.MULTILINE | re.DOTALL)
YAML = """
name: chat
service:
  readiness_probe: /health
  replica_policy: {min_replicas: 2, num_overprovision: 1, dynamic_ondemand_fallback: true}
  load_balancing_policy: cache_aware
resources: {accelerators: L4, use_spot: true}
run: serve-it
"""
NOW = 10_000.0
HOUR = 3600.0
OREGON, FRANKFURT = Zone("aws", "us-west-2", "us-west-2a"), Zone("gcp", "europe-west3", "europe-west3-b")
STARTS = "waiting for the readiness probe: Connection refused"
FAILED = "`setup` failed with exit code 1: ValueError: no weights in /models"


def a_replica(replica_id: int, zone: Zone, kind: CapacityType, state: ReplicaState, age_s: float) -> Replica:
    price = 0.8 if kind is CapacityType.ON_DEMAND else 0.24
    offer = Offer(zone, "g6.xlarge", "L4", 1, kind, price, 0.8)
    since = NOW - age_s
    return Replica(
        replica_id, 5, offer, state, since, since, launched_at=since, instance_id=f"i-0{replica_id:07d}",
        endpoint=f"http://203.0.113.{replica_id}:8080",
    )  # fmt: skip


SPOT, ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND
REPLICAS = (
    a_replica(17, OREGON, SPOT, ReplicaState.READY, 2 * HOUR),
    a_replica(21, OREGON, ON_DEMAND, ReplicaState.READY, 700.0),
    replace(a_replica(22, FRANKFURT, SPOT, ReplicaState.STARTING, 80.0), message=STARTS),
)
GONE = replace(
    a_replica(20, FRANKFURT, SPOT, ReplicaState.GONE, 900.0),
    version=6, ended_at=NOW - 750.0, end_reason=EndReason.SETUP_FAILED, message=FAILED,
)  # fmt: skip
ROW = a_row(
    *REPLICAS,
    created_at=NOW - 3 * HOUR,
    version=6,
    wanted=2,
    target=3,
    memory=Memory(rollout={"failed": [6]}),
)


def rendering(width: int, *, wide: bool) -> str:
    spec = load_text(YAML).spec
    view = service_view(
        ROW, spec, goal_of(ROW, spec), local_agent=AgentView(True, True, 2, 0, build=Build(BuildKind.NATIVE, fast_path=True)), agents={}, load=Load(requests=126, in_flight=9, queued=2, known=True),
        spent=Spent(2.61, 7.2), host="127.0.0.1", ended=(), num_nodes={5: 1, 6: 1}, now=NOW, failure=last_failure(ROW, [GONE]),
    )  # fmt: skip
    console = Console(width=width)
    with console.capture() as capture:
        for each in tables([view], NOW, wide=wide):
            console.print(each)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def test_there_are_renderings() -> None:
    assert {(int(width), bool(wide)) for width, wide, _ in SHOWN} == {(80, False), (200, False), (200, True)}


@pytest.mark.parametrize(("width", "wide", "text"), SHOWN, ids=[f"{w} columns{e}" for w, e, _ in SHOWN])
def test_a_rendering_is_what_the_command_prints(width: str, wide: str, text: str) -> None:
    assert rendering(int(width), wide=bool(wide)) == text
