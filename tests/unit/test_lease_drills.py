"""Drills of leases in virtual time: what becomes of machines while no one, or only traffic, looks after them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.model import CapacityType, Zone
from provisioners.multi_node import instance_of_nodes
from provisioners.port.base import Instance, InstanceState
from provisioners.port.lease import FIRST_S, LEASE_S, MOST_S, Lease, LeaseTerms, shortest_s, terms_of
from provisioners.port.vm import MachineOrder
from provisioners.remote.ssh_keys import Keys, user_data
from skyserve_cli.controller.reconcile.leases import LeaseWatch, lease_view, warning_of
from tests.clouds.switch_bench import DAY, HOUR, Outcome, live

pytestmark = pytest.mark.long

KEYS = Keys(bytes(range(32)), "owner-1")
TERMS = LeaseTerms(LEASE_S, FIRST_S)

VISITED_FOR_A_DAY = f"[ $i -gt {DAY} ] || [ $((i%{HOUR})) -ne 0 ] || {{ : >lease; : >served; }}"
TRAFFIC_EVERY_HOUR = f"[ $((i%{HOUR})) -ne 0 ] || {{ : >traffic; : >served; }}"


def machine(folder: Path, scenario: str, days: float, terms: LeaseTerms = TERMS, **deletion: str) -> Outcome:
    order = MachineOrder(
        token="t",
        owner="owner-1",
        service="chat",
        replica_id=1,
        rank=0,
        num_nodes=1,
        zone=Zone("aws", "us-east-1", "use1-az1"),
        instance_type="x",
        capacity_type=CapacityType.SPOT,
        public_key=KEYS.login("chat").public,
    )
    ending = "pass" if deletion else ""
    return live(
        user_data(order, KEYS.host("t"), terms, ending), folder, scenario, round(days * DAY), **deletion
    )


def instance(lease: Lease | None, **facts: object) -> Instance:
    zone = Zone("aws", "us-east-1", "use1-az1")
    made = Instance("i-1", "t", "owner-1", "chat", 1, zone, CapacityType.SPOT, InstanceState.RUNNING)
    return replace(made, lease=lease, **facts)  # type: ignore[arg-type]


# --- the machine's side


def test_a_laptop_is_away_for_three_days_and_traffic_keeps_the_machines(tmp_path: Path) -> None:
    outcome = machine(tmp_path, f"{VISITED_FOR_A_DAY}; {TRAFFIC_EVERY_HOUR}", days=4.5)
    assert outcome.ended_at is None


def test_a_laptop_is_away_and_without_traffic_the_machines_end_after_three_days(tmp_path: Path) -> None:
    outcome = machine(tmp_path, VISITED_FOR_A_DAY, days=5)
    assert outcome.ended_at == DAY + LEASE_S // 60


def test_traffic_alone_keeps_a_machine_for_seven_days_at_most(tmp_path: Path) -> None:
    outcome = machine(tmp_path, f"{VISITED_FOR_A_DAY}; {TRAFFIC_EVERY_HOUR}", days=9)
    assert outcome.ended_at == DAY + MOST_S // 60


def test_a_machine_whose_replica_never_responded_ends_after_twelve_hours(tmp_path: Path) -> None:
    assert machine(tmp_path, ":", days=2).ended_at == FIRST_S // 60


def test_a_reboot_renews_nothing(tmp_path: Path) -> None:
    (tmp_path / "count").write_text(f"{FIRST_S // 60 - 3} {FIRST_S // 60 - 3} {FIRST_S // 60} 10080 60\n")
    assert machine(tmp_path, ":", days=1).ended_at == 3


def test_a_count_that_was_cut_off_begins_at_zero(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("")
    assert machine(tmp_path, ":", days=1).ended_at == FIRST_S // 60


def test_the_agent_reads_what_the_switch_writes(tmp_path: Path) -> None:
    from provisioners.remote.host_agent import lease

    assert lease.terms(tmp_path) is None
    assert machine(tmp_path, "[ $i -ne 2 ] || : >served", days=0.01).count[2:] == (LEASE_S // 60, 10080, 60)
    assert lease.terms(tmp_path) == {"lease_s": LEASE_S, "most_s": MOST_S}
    lease.traffic(tmp_path)
    lease.visit(tmp_path)
    assert {"lease", "traffic", "served"} <= {path.name for path in tmp_path.iterdir()}


def test_a_machine_that_its_cloud_must_delete_asks_for_it_before_it_shuts_down(tmp_path: Path) -> None:
    outcome = machine(tmp_path, ":", days=2, deletion="false")
    first = FIRST_S // 60
    assert outcome.deletions == tuple(range(first, first + 10))
    assert outcome.ended_at == first + 10


def test_traffic_in_the_last_minute_keeps_the_machine(tmp_path: Path) -> None:
    late = FIRST_S // 60 - 1
    outcome = machine(tmp_path, f"[ $i -ne {late} ] || {{ : >traffic; : >served; }}", days=1)
    assert outcome.ended_at is None


# --- terms


def test_terms_are_the_settings_and_differ_by_token() -> None:
    assert terms_of(0, "t") is None
    assert shortest_s(None) == FIRST_S
    for minutes, lease_s, first_s in ((None, LEASE_S, FIRST_S), (30, 1800, 1800)):
        terms = [terms_of(minutes, f"own-chat-{number}") for number in range(300)]
        leases = [one.lease_s for one in terms if one is not None]
        assert 0.9 * lease_s <= min(leases) < 0.92 * lease_s
        assert 1.08 * lease_s < max(leases) <= 1.1 * lease_s
        assert len(set(leases)) > 60
        assert all(
            abs(one.first_s / first_s - one.lease_s / lease_s) < 0.01 for one in terms if one is not None
        )
    balancer = terms_of(None, "t", serves_at_once=True)
    assert balancer is not None
    assert balancer.first_s == balancer.lease_s
    long = terms_of(43200, "t")
    assert long is not None
    assert long.most_s >= long.lease_s


# --- the controller's side


@pytest.mark.parametrize(
    ("now", "left_s", "most_left_s", "is_short"),
    [
        pytest.param(0.0, LEASE_S, MOST_S, False, id="just visited"),
        pytest.param(LEASE_S / 2 - 1, LEASE_S / 2 + 1, MOST_S - LEASE_S / 2 + 1, False, id="not yet half"),
        pytest.param(LEASE_S / 2, LEASE_S / 2, MOST_S - LEASE_S / 2, True, id="from half of it on"),
        pytest.param(MOST_S + 1.0, 0.0, 0.0, True, id="over"),
    ],
)
def test_what_is_left(now: float, left_s: float, most_left_s: float, is_short: bool) -> None:
    lease = Lease(LEASE_S, MOST_S, 0.0, "ssh: timed out")
    assert (lease.left_s(now), lease.most_left_s(now), lease.is_short(now)) == (left_s, most_left_s, is_short)


def test_a_lease_that_is_being_renewed_is_never_short() -> None:
    lease = Lease(LEASE_S, MOST_S)
    assert lease.left_s(1e12) == LEASE_S
    assert not lease.is_short(1e12)
    assert lease_view(lease) == {
        "lease_s": LEASE_S,
        "visited_at": None,
        "ends_at": None,
        "ends_at_with_traffic": None,
        "why": "",
    }


def test_ssh_is_closed_while_traffic_goes_on_the_machine_stays_and_one_warning_comes(tmp_path: Path) -> None:
    outcome = machine(tmp_path, f"{VISITED_FOR_A_DAY}; {TRAFFIC_EVERY_HOUR}", days=6)
    assert outcome.ended_at is None
    warned: list[tuple[float, str]] = []
    now = 0.0
    watch = LeaseWatch(lambda service, id_, sentence: warned.append((now, f"{service}/{id_}: {sentence}")))
    silent = instance(Lease(LEASE_S, MOST_S, 86400.0, "ssh: connection timed out"))
    while now < 6 * 86400:
        watch.observe([silent] if now >= 86400 else [instance(Lease(LEASE_S, MOST_S))], now)
        now += 600
    assert [at for at, _ in warned] == [86400 + LEASE_S / 2]
    assert warned[0][1] == (
        "chat/1: no visit for 1d 12h (ssh: connection timed out): the machine ends itself in 1d 12h without traffic, "
        "in 5d 12h with it; make it reachable by ssh from this host, or end the service"
    )


def test_a_second_silence_is_warned_of_again() -> None:
    warned: list[str] = []
    watch = LeaseWatch(lambda service, id_, sentence: warned.append(sentence))
    first, second = (instance(Lease(3600, MOST_S, at, "ssh: refused")) for at in (0.0, 10_000.0))
    assert watch.observe([first], 3000)
    assert not watch.observe([first], 3100)
    watch.observe([instance(Lease(3600, MOST_S))], 10_000)
    watch.observe([second], 12_000)
    watch.observe([replace(second, state=InstanceState.TERMINATED)], 13_000)
    assert len(warned) == 2
    assert watch.by_id == {}


def test_a_gang_has_the_lease_of_the_node_that_ends_first() -> None:
    renewed, early, late = Lease(100, 900), Lease(100, 900, 5.0, "x"), Lease(100, 900, 50.0, "y")
    assert instance_of_nodes([instance(renewed), instance(late), instance(early)]).lease == early
    assert instance_of_nodes([instance(None), instance(renewed)]).lease == renewed
    assert instance_of_nodes([instance(None), instance(None)]).lease is None


def test_a_warning_names_what_is_left() -> None:
    said = warning_of(Lease(7200, 86400, 1000.0, "ssh: refused"), 1000.0 + 5400)
    assert "ends itself in 30m without traffic, in 22h 30m with it" in said
