"""What an agent knows of its peers."""

from __future__ import annotations

import pytest

from lb.config.options import Pushing
from lb.config.schema import Table, Target
from lb.core.peers import Peers, QueuePace, RegionReport, local_cost, region_report
from lb.core.targets import TargetTable
from policies.regions.base import PeerView
from policies.routing.base import Choice, RequestView

REPORT = RegionReport(available=2, room=4, queued=0, wait_s=0.5, s_per_byte=1e-4, decode_s=0.2)
RTT_S = 0.1
EVERY_S = 0.5


def request(name: str = "r", prompt: bytes = b"x" * 1000) -> RequestView:
    return RequestView(name, "POST", "/v1/chat/completions", len(prompt), prompt, "tenant")


def heard(regions: tuple[str, ...] = ("eu",), report: RegionReport = REPORT, now: float = 10.0) -> Peers:
    peers = Peers(regions)
    for region in regions:
        peers.reported(region, report, now - RTT_S / 2, RTT_S, EVERY_S, now)
    return peers


def view(peers: Peers, now: float, name: str = "new") -> PeerView:
    (found,) = peers.views(request(name), now)
    return found


def test_a_peer_that_never_reported_is_not_offered() -> None:
    assert Peers(["eu"]).views(request(), 0.0) == []


@pytest.mark.parametrize(
    ("now", "fresh"),
    [pytest.param(11.6, True, id="three intervals and a round trip"), pytest.param(11.7, False, id="later")],
)
def test_a_peer_whose_reports_are_late_is_not_offered(now: float, fresh: bool) -> None:
    assert bool(heard().views(request(), now)) is fresh


def test_a_draining_peer_is_not_offered() -> None:
    assert heard(report=REPORT._replace(draining=True)).views(request(), 10.0) == []


def test_a_peer_outside_of_the_zone_is_not_offered() -> None:
    peers = heard(("asia", "eu"))
    found = peers.views(request(), 10.0, lambda region: region == "eu")
    assert [one.region for one in found] == ["eu"]


def test_what_was_forwarded_counts_until_a_report_knows_of_it() -> None:
    peers = heard()
    peers.forwarded(request("a"), "eu", 10.1)
    after = view(peers, 10.1)
    assert after.forwarded == 1
    assert after.forwarded_s == pytest.approx(1000 * 1e-4 / 2)  # over two available replicas
    peers.reported("eu", REPORT, 10.14, RTT_S, EVERY_S, 10.2)  # it had not arrived when this was written
    assert view(peers, 10.2).forwarded == 1
    peers.reported("eu", REPORT, 10.15, RTT_S, EVERY_S, 10.3)
    assert view(peers, 10.3).forwarded == 0


def test_the_prompt_is_remembered_for_the_region_it_went_to() -> None:
    peers = heard()
    assert view(peers, 10.0).matched_bytes == 0
    peers.forwarded(request("a"), "eu", 10.0)
    assert view(peers, 10.0).matched_bytes == 992  # whole blocks of 16 bytes
    peers.forget("eu")
    peers.reported("eu", REPORT, 10.0, RTT_S, EVERY_S, 10.1)
    assert view(peers, 10.1).matched_bytes == 0


def test_a_peer_that_refused_gets_nothing_before_its_next_report() -> None:
    peers = heard()
    peers.forwarded(request("a"), "eu", 10.0)
    peers.refused(request("a"), "eu")
    assert (view(peers, 10.1).forwarded, view(peers, 10.1).credit) == (0, 0)
    peers.reported("eu", REPORT, 10.2, RTT_S, EVERY_S, 10.3)
    assert view(peers, 10.3).credit == 6


@pytest.mark.parametrize(("room", "regions", "credit"), [(4, 1, 6), (4, 3, 2), (0, 2, 1), (1, 4, 1)])
def test_credit_is_shared_between_the_regions(room: int, regions: int, credit: int) -> None:
    names = tuple(f"r{number}" for number in range(regions))
    peers = heard(names, REPORT._replace(room=room))
    assert {one.credit for one in peers.views(request(), 10.0)} == {credit}


def test_the_cost_here_is_what_the_routing_policy_says() -> None:
    terms = ("rtt_s", "prefill_s", "burden_s", "wait_s", "decode_s", "trouble_s")
    row = ("a", 1.0, 0.01, 0.2, 0.2, 0.4, 0.3, 0.0)
    cost = local_cost(Choice("a", "", terms, (row,), wait=True), request(), 9.0)
    assert cost == (False, 0.01, 0.4, 0.2, 0.3)


def test_without_a_choice_the_cost_here_is_the_queue() -> None:
    cost = local_cost(None, request(), 3.0)
    assert not cost.admits
    assert cost.wait_s == 3.0


def test_a_report_counts_the_replicas_that_have_room() -> None:
    targets = tuple(Target(id=name, url=f"http://127.0.0.1:{port}") for port, name in enumerate("ab", 1))
    table = TargetTable(Table("s", "1", targets, policy="gorgo", pushing=Pushing()), 0.0)
    report = region_report(table, 0, 0.0, 0.0)
    assert (report.available, report.queued) == (2, 0)
    assert report.s_per_byte > 0


def test_the_distance_to_a_target_enters_its_cost() -> None:
    targets = tuple(Target(id=name, url=f"http://127.0.0.1:{port}") for port, name in enumerate("ab", 1))
    table = TargetTable(Table("s", "1", targets, policy="gorgo", pushing=Pushing()), 0.0)
    for far in ("a", "b"):
        key = table.key(far)
        assert key is not None
        for name in "ab":
            other = table.key(name)
            assert other is not None
            table.measured(other, 0.15 if name == far else 0.001)
        choice = table.choose(request(), 0.0)
        assert choice is not None
        assert choice.target_id == ("b" if far == "a" else "a")


def test_the_queue_is_as_slow_as_its_departures() -> None:
    pace = QueuePace()
    assert pace.wait_s(0, 0.0) == 0.0
    for number in range(11):
        pace.left(float(number))
    assert pace.wait_s(5, 10.0) == pytest.approx(5 / 1.1)
