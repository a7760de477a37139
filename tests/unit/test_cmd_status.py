"""How `serve status` words a fleet that is partly spot and partly not."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from skyserve_cli.commands.status import tables


def replica(replica_id: int, kind: str, state: str = "READY", **more: Any) -> dict[str, Any]:
    return {
        "id": replica_id, "version": 1, "state": state, "cloud": "sky", "region": "east", "zone": "east-a",
        "capacity_type": kind, "accelerator": None, "num_nodes": 1, "price_usd_hour": 0.3, "created_at": 0.0,
        "ended_at": None, "end_reason": None, "message": "", "stands_in": kind == "on_demand",
    } | more  # fmt: skip


def service(
    *replicas: dict[str, Any],
    wanted: int = 2,
    target: int = 3,
    notes: str = "",
    agents: list[dict[str, Any]] | None = None,
    **cost: float,
) -> dict[str, Any]:
    return {
        "name": "chat", "version": 1, "status": "READY", "wanted": wanted, "target": target,
        "ready": sum(each["state"] == "READY" for each in replicas), "created_at": 0.0, "endpoint": "http://127.0.0.1:12345",
        "notes": notes, "failed_versions": [], "last_failure": None, "replicas": list(replicas), "load_balancers": agents or [], "load": {"requests_per_s": None},
        "cost": {"usd_per_hour": 1.0, "usd_per_hour_wanted_on_demand": 2.0} | cost,
    }  # fmt: skip


def shown(view: dict[str, Any], width: int = 200) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        for each in tables([view], 60.0, wide=False):
            console.print(each)
    return capture.get().splitlines()


def words(line: str) -> str:
    return " ".join(line.split())


@pytest.mark.parametrize(
    ("view", "line"),
    [
        pytest.param(
            service(*[replica(i, "spot") for i in (1, 2, 3)], usd_per_hour=0.9),
            "chat 1 READY 3/2+1 0.9000 55% 1m http://127.0.0.1:12345", id="spot, and one more than wanted",
        ),
        pytest.param(
            service(replica(1, "on_demand"), replica(2, "on_demand"), replica(3, "spot", "STARTING"), usd_per_hour=2.3),
            "chat 1 READY 2/2+1 2.30 -15% 1m http://127.0.0.1:12345", id="on demand, and spot on its way back",
        ),
        pytest.param(
            service(wanted=0, target=0, usd_per_hour=0.0, usd_per_hour_wanted_on_demand=0.0),
            "chat 1 READY 0/0 0.0000 - 1m http://127.0.0.1:12345", id="scaled to nothing",
        ),
    ],
)  # fmt: skip
def test_the_line_of_a_service(view: dict[str, Any], line: str) -> None:
    assert words(shown(view)[1]) == line


def test_load_balancers_in_regions_have_a_table_of_their_own() -> None:
    agent = {
        **replica(7, "on_demand"), "endpoint": "http://192.0.2.1:8000", "agent_version": "4610500197bd", "newest": False,
        "message": "",
    }  # fmt: skip
    lines = [words(line) for line in shown(service(agents=[agent]))]
    (title, line) = lines[-2:]
    assert title == "LOAD BALANCER STATE ZONE ENDPOINT CODE $/H AGE MESSAGE"
    assert line.startswith("chat/7 READY")
    assert "http://192.0.2.1:8000 4610500197bd (old)" in line


def test_on_eighty_columns_nothing_is_missing() -> None:
    lines = shown(
        service(replica(1, "on_demand"), replica(2, "spot", "STARTING"), notes="spot is out"), width=80
    )
    assert words(lines[1]) == "chat 1 READY 1/2+1 1.00 50% 1m http://127.0.0.1:12345"
    assert lines[2:4] == [
        "chat: spot is out",
        "chat: 1 on-demand replica stands in for spot; spot ready: 0 (1 coming)",
    ]


def test_a_service_that_is_not_well_says_why() -> None:
    why = {
        "replica_id": 7,
        "cloud": "sky",
        "region": "east",
        "zone": "east-a",
        "reason": "QUOTA",
        "message": "no more",
    }
    lines = shown(service(replica(8, "spot", "REQUESTED")) | {"last_failure": why})
    assert lines[2] == "chat: replica 7 in sky/east/east-a ended: QUOTA, no more"


def test_a_replica_that_stands_in_says_so_unless_it_has_more_to_say() -> None:
    lines = shown(
        service(replica(1, "on_demand"), replica(2, "on_demand", message="503"), replica(3, "spot"))
    )
    assert [words(line).split(" 1m")[1].strip() for line in lines[-3:]] == ["stands in for spot", "503", ""]
