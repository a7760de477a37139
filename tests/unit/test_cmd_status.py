"""How `serve status` words a fleet that is partly spot and partly not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from skyserve_cli.commands.status_tables import ages, tables


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
        "name": "chat", "version": 1, "serving_version": 1, "status": "READY", "wanted": wanted, "target": target,
        "ready": sum(each["state"] == "READY" for each in replicas), "created_at": 0.0, "endpoint": "http://127.0.0.1:12345", "endpoint_reach": "network",
        "notes": notes, "failed_versions": [], "last_failure": None, "availability": None, "replicas": list(replicas), "load_balancers": agents or [], "load": {"requests_per_s": None},
        "cost": {"usd_per_hour": 1.0, "usd_per_hour_wanted_on_demand": 2.0} | cost,
    }  # fmt: skip


def shown(view: dict[str, Any], width: int = 200, *, wide: bool = False) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        for each in tables([view], 60.0, wide=wide):
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


def test_replicas_whose_caches_are_filled_have_a_note() -> None:
    assert any(
        line.endswith("their share of the requests: 3, 4") for line in shown(service() | {"warming": [3, 4]})
    )
    assert not any("share of the requests" in line for line in shown(service() | {"warming": []}))


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


def a_build(kind: str, *, fast_path: bool = True, not_compiled: str = "") -> dict[str, Any]:
    return {"kind": kind, "fast_path": fast_path, "not_compiled": not_compiled}


def test_wide_tables_show_how_load_balancers_run() -> None:
    agent = {
        **replica(7, "on_demand"), "endpoint": "http://192.0.2.1:8000", "agent_version": "4610500197bd", "newest": True,
        "instance_id": None, "message": "", "build": a_build("interpreted", fast_path=False),
    }  # fmt: skip
    old = {key: value for key, value in agent.items() if key != "build"}
    more = {
        "usd_total": 0.0, "usd_on_demand_equivalent": 0.0, "load_balancer": {"build": a_build("native")},
        "load": {"requests_per_s": None, "in_flight": 0, "queued": 0}, "load_balancing_policy": "gorgo",
    }  # fmt: skip
    view = service(agents=[agent, old], usd_total=0.0, usd_on_demand_equivalent=0.0) | more
    lines = [words(line) for line in shown(view, wide=True)]
    assert lines[0].endswith("POLICY LB BUILD")
    assert lines[1].endswith("gorgo native")
    (title, first, second) = lines[-3:]
    assert "CODE BUILD $/H" in title
    assert "4610500197bd interpreted, no C helper 0.3000" in first
    assert "4610500197bd - 0.3000" in second
    assert shown(view | {"load_balancer": None}, wide=True)[1].split()[-1] == "-"
    slow = {"build": a_build("native") | {"slow_tls": "OpenSSL is a part of this Python"}}
    assert words(shown(view | {"load_balancer": slow}, wide=True)[1]).endswith("native, no C helper for TLS")
    many = {"build": a_build("native") | {"workers": 8}}
    assert words(shown(view | {"load_balancer": many}, wide=True)[1]).endswith("native, 8 workers")


def test_why_a_load_balancer_is_interpreted_is_shown_once() -> None:
    failed = {"build": a_build("interpreted", not_compiled="fatal error: Python.h: {gone}")}
    lines = shown(service() | {"load_balancer": failed}, width=400)
    (line,) = [line for line in lines if "interpreted" in line]
    assert line.startswith("chat: the load balancer is interpreted")
    assert line.endswith("more CPU: fatal error: Python.h: {gone}")
    fine = service() | {"load_balancer": {"build": a_build("interpreted")}}
    assert not any("interpreted" in line for line in shown(fine))


def test_linked_load_balancers_show_distances_spill_and_whom_they_serve() -> None:
    peer = {
        "region": "aws/west", "rtt_ms": 60.4, "forwarded_out": 3, "forwarded_in": 4, "dead": False, "egress_usd": 0.125,
    }  # fmt: skip
    gone = {"region": "aws/eu", "rtt_ms": None, "forwarded_out": 0, "forwarded_in": 0, "dead": True}
    agent = {
        **replica(7, "on_demand"), "endpoint": "http://192.0.2.1:8000", "agent_version": "4610500197bd", "newest": True,
        "message": "", "owned": ["aws/east", "aws/north"], "taken_over": ["aws/eu"], "peers": [peer, gone],
        "ttft_p50_s": 0.2814, "ttft_p90_s": None,
    }  # fmt: skip
    (title, first, second) = [words(line) for line in shown(service(agents=[agent]))][-3:]
    assert title == "LOAD BALANCER TTFT P50 P90 PEER RTT MS SENT THERE CAME FROM THERE $ THERE SERVES"
    assert first == "chat/7 281 ms - aws/west 60 3 4 0.1250 aws/east, aws/north, aws/eu (taken over)"
    assert second == "chat/7 aws/eu (dead) - 0 0 0.0000"


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


def test_what_risk_hedge_was_asked_for_and_what_came_of_it() -> None:
    kept = {
        "target": 0.999, "since": -5 * 86_400.0, "realised": 0.9986, "realised_month": 0.9986, "predicted": 0.9992, "outages": 3,
    }  # fmt: skip
    view = service(replica(1, "READY"))
    lines = "\n".join(shown(view | {"availability": kept | {"outages_left": 9.2}}))
    assert "target 99.9%; 99.860% in 5 d" in lines.replace("5d", "5 d")
    assert "(3 outages), 99.860% in 30 days (9.2 more outages allowed), 99.920% predicted now" in lines
    lines = "\n".join(shown(view | {"availability": kept | {"outages_left": -1.5}}))
    assert "1.5 outages more than allowed" in lines
    assert "target" not in "\n".join(shown(view))


def test_a_replica_that_stands_in_says_so_unless_it_has_more_to_say() -> None:
    lines = shown(
        service(replica(1, "on_demand"), replica(2, "on_demand", message="503"), replica(3, "spot"))
    )
    assert [words(line).split(" 1m")[1].strip() for line in lines[-3:]] == ["stands in for spot", "503", ""]


@pytest.mark.parametrize(
    ("serving", "failed", "shown_as"),
    [
        pytest.param(6, [], "6", id="the newest one serves"),
        pytest.param(6, [5], "6", id="an older one failed"),
        pytest.param(5, [6], "5 (6 failed)", id="the newest one failed"),
        pytest.param(5, [], "5 (6 coming)", id="the newest one is not ready yet"),
        pytest.param(None, [6], "6", id="no version serves"),
    ],
)
def test_the_version_shown_is_the_one_that_serves(
    serving: int | None, failed: list[int], shown_as: str
) -> None:
    view = service() | {"version": 6, "serving_version": serving, "failed_versions": failed}
    assert words(shown(view)[1]).startswith(f"chat {shown_as} READY")


def test_an_endpoint_that_only_this_machine_reaches_says_what_opens_it() -> None:
    lines = shown(service() | {"endpoint_reach": "this_machine"})
    assert lines[2] == (
        "chat: only this machine can reach it; set service.load_balancer.host to 0.0.0.0 to open it"
    )
    assert shown(service())[2:] == []


CLOUD = {
    "cloud": "aws", "region": "ap-southeast-2", "zone": "ap-southeast-2a", "accelerator": "A100-80GB", "accelerator_count": 8,
    "price_usd_hour": 27.44, "instance_id": "i-0123456789abcdef0", "endpoint": "http://203.0.113.7:30001",
}  # fmt: skip
MESSAGE = "the readiness probe fails: 503, the model is still being loaded"


def long_names(name: str = "translation-of-documents") -> dict[str, Any]:
    load = {"requests_per_s": 3.5, "in_flight": 12, "queued": 3}
    cost = {"usd_total": 12.5, "usd_on_demand_equivalent": 50.0}
    view = service(replica(123, "on_demand", "TERMINATING", **CLOUD, message=MESSAGE), **cost)
    return view | {"name": name, "load": load, "load_balancing_policy": "cache_aware"}


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_narrow_terminal_shows_ids_endpoints_and_states_whole(width: int) -> None:
    lines = shown(long_names(), width)
    assert max(map(len, lines)) <= width
    text = " ".join(words(line) for line in lines)
    for whole in ("translation-of-documents/123", "TERMINATING", "http://127.0.0.1:12345"):
        assert whole in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    (head,) = [line for line in lines if line.startswith("REPLICA")]
    at = head.index("MESSAGE")
    message = " ".join(line[at:].strip() for line in lines[lines.index(head) + 1 :])
    assert message.replace(" ", "") == MESSAGE.replace(" ", "")


def test_columns_leave_in_the_order_of_their_importance() -> None:
    def columns(width: int) -> list[str]:
        (head,) = [line for line in shown(long_names("chat"), width) if line.startswith("REPLICA")]
        return head.split()

    everything = ["REPLICA", "VERSION", "STATE", "ZONE", "CAPACITY", "ACCELERATOR", "$/H", "AGE", "MESSAGE"]
    gone = [set(everything) - set(columns(width)) for width in range(140, 40, -1)]
    assert gone[0] == set()
    assert all(less <= more for less, more in pairwise(gone))
    assert gone[-1] == {"VERSION", "ZONE", "CAPACITY", "ACCELERATOR", "$/H", "AGE"}
    assert columns(80) == ["REPLICA", "STATE", "ZONE", "MESSAGE"]


@pytest.mark.parametrize("width", [30, 80, 200])
def test_wide_shows_every_column_and_every_cell_on_any_terminal(width: int) -> None:
    lines = shown(long_names(), width, wide=True)
    assert max(map(len, lines)) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
    every = "".join("".join(lines).split())
    for whole in ("translation-of-documents/123", "i-0123456789abcdef0", "http://203.0.113.7:30001", MESSAGE):
        assert "".join(whole.split()) in every


def test_ages_are_what_changes_with_time_alone() -> None:
    """`--watch` draws again if they differ, so they must cover every cell that depends on the time."""
    view = service(replica(1, "spot", created_at=30.5), replica(2, "spot", "GONE", ended_at=5.0))
    for now in (59.0, 100.0, 100.2, 9000.0, 9001.0, 1e6):
        for later in (now + 0.3, now + 0.7, now + 100.0):
            same = ages([view], now) == ages([view], later)
            assert same == (at(view, now) == at(view, later)), (now, later)
    assert ages([], 59.0) == ()
    assert len(ages([service(agents=[{"created_at": 0.0}])], 59.0)) == 2


def at(view: dict[str, Any], now: float) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for each in tables([view], now, wide=False):
            console.print(each)
    return capture.get()
