"""What an agent knows of its peers."""

from __future__ import annotations

import random
from math import ceil

import pytest

from lb.config.options import Pushing
from lb.config.schema import Table, Target
from lb.core.hop import ReportId
from lb.core.peers import (
    MOST_CLASSES,
    ClassReport,
    Peers,
    QueuePace,
    RegionReport,
    local_cost,
    region_report,
)
from lb.core.target_choice import choose
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
    [pytest.param(10.85, True, id="a late report"), pytest.param(10.95, False, id="no report")],
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
    peers.forwarded("a", request("a"), "eu", 10.1)
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
    peers.forwarded("a", request("a"), "eu", 10.0)
    assert view(peers, 10.0).matched_bytes == 992  # whole blocks of 16 bytes
    peers.forget("eu")
    peers.reported("eu", REPORT, 10.0, RTT_S, EVERY_S, 10.1)
    assert view(peers, 10.1).matched_bytes == 0


def test_a_peer_that_refused_gets_nothing_before_its_next_report() -> None:
    peers = heard()
    peers.forwarded("a", request("a"), "eu", 10.0)
    peers.refused("a", "eu")
    assert (view(peers, 10.1).forwarded, view(peers, 10.1).credit) == (0, 0)
    peers.reported("eu", REPORT, 10.2, RTT_S, EVERY_S, 10.3)
    assert view(peers, 10.3).credit == 6


FIRST, SECOND = ReportId(7, 1), ReportId(7, 2)


def told(
    peers: Peers, report_id: ReportId, made_at: float, now: float, report: RegionReport = REPORT
) -> None:
    peers.reported("eu", report, made_at, RTT_S, EVERY_S, now, report_id)


def left(peers: Peers, now: float) -> int:
    """How many more requests may be forwarded."""
    found = view(peers, now)
    return found.credit - found.forwarded if found.available else 0


def full(peers: Peers) -> Peers:
    """Forward all that the first report has given credit for."""
    told(peers, FIRST, 10.0, 10.0)
    for number in range(6):
        peers.forwarded(number, request(str(number)), "eu", 10.1)
    assert left(peers, 10.1) == 0
    return peers


def test_a_response_gives_the_credit_of_its_request_back_if_the_peer_has_room() -> None:
    peers = full(Peers(["eu"]))
    assert not peers.responded(0, "eu", None)
    assert left(peers, 10.2) == 0
    assert peers.responded(1, "eu", FIRST)
    assert left(peers, 10.2) == 1
    assert not peers.responded(1, "eu", FIRST)  # once
    assert not peers.ended(1, "eu")
    assert left(peers, 10.2) == 1


@pytest.mark.parametrize("known", [False, True], ids=["not reported yet", "reported"])
def test_a_request_that_ends_without_a_response_costs_no_credit(known: bool) -> None:
    peers = full(Peers(["eu"]))
    if known:
        told(peers, SECOND, 10.2, 10.25, REPORT._replace(room=0))
        before = left(peers, 10.3)
        assert not peers.ended(0, "eu")  # whether its place is free is for the peer to say
        assert left(peers, 10.3) == before == 1
    else:
        assert peers.ended(0, "eu")
        assert left(peers, 10.3) == 1


def test_a_response_to_a_request_that_was_reported_gives_its_place_back_once() -> None:
    peers = full(Peers(["eu"]))
    told(peers, SECOND, 10.2, 10.25, REPORT._replace(available=0, room=0))
    assert left(peers, 10.3) == 0
    assert peers.responded(0, "eu", SECOND)
    assert (left(peers, 10.3), view(peers, 10.3).available) == (2, 1)
    assert not peers.responded(0, "eu", SECOND)
    assert left(peers, 10.3) == 2


def test_a_response_older_than_the_report_gives_nothing_that_the_report_has_counted() -> None:
    peers = full(Peers(["eu"]))
    told(peers, SECOND, 10.2, 10.25)
    before = left(peers, 10.3)
    assert not peers.responded(0, "eu", FIRST)
    assert left(peers, 10.3) == before
    assert not peers.responded(0, "eu", SECOND)


def test_a_response_of_an_earlier_life_of_the_peer_gives_nothing() -> None:
    peers = full(Peers(["eu"]))
    peers.forget("eu")
    told(peers, ReportId(8, 1), 10.3, 10.35, REPORT._replace(available=0, room=0))
    for number in range(6):
        assert not peers.responded(number, "eu", FIRST)
        assert not peers.ended(number, "eu")
    assert left(peers, 10.4) == 0


def test_a_refusal_stands_until_the_next_report_or_response() -> None:
    peers = full(Peers(["eu"]))
    peers.refused(0, "eu")
    assert left(peers, 10.2) < 0
    for number in range(1, 6):
        peers.ended(number, "eu")
    assert left(peers, 10.2) == 0
    told(peers, SECOND, 10.2, 10.3)
    assert left(peers, 10.3) == 6


@pytest.mark.parametrize("seed", range(20))
def test_no_more_is_at_a_peer_than_it_granted_and_no_credit_is_lost(seed: int) -> None:
    """Random traffic: in flight without a response are at most those that ran at the last report and what it granted."""
    rng = random.Random(seed)
    peers = Peers(["eu"])
    now, report_id, granted, open_ = 10.0, FIRST, 0, set[int]()
    for number in range(2000):
        now += 0.01
        what = rng.random()
        if what < 0.1 or number == 0:
            room = rng.randrange(4)
            report_id = ReportId(report_id.boot, report_id.seq + 1)
            told(peers, report_id, now - 0.005, now, REPORT._replace(available=room, room=room))
            arrived = [one for one in open_ if one < number - 5]  # half a round trip takes 5 steps
            granted = len(arrived) + max(1, ceil(1.5 * room))
        elif what < 0.12:
            report_id = ReportId(report_id.boot + 1, 0)
            peers.forget("eu")
            open_.clear()
            granted = 0
        elif open_ and what < 0.4:
            one = rng.choice(sorted(open_))
            last = rng.choice([None, report_id, ReportId(report_id.boot - 1, 9)])
            if peers.responded(one, "eu", last):
                open_.discard(one)
            elif rng.random() < 0.5:
                if not peers.ended(one, "eu"):
                    granted = max(0, granted - 1)  # its place is the peer's again
                open_.discard(one)
        elif peers.report("eu") is not None and peers.views(request(), now) and left(peers, now) > 0:
            peers.forwarded(number, request(str(number)), "eu", now)
            open_.add(number)
            assert len(open_) <= granted
    for one in open_:
        peers.ended(one, "eu")
    told(peers, ReportId(report_id.boot, report_id.seq + 1), now, now)
    assert left(peers, now) == 6


@pytest.mark.parametrize(("room", "regions", "credit"), [(4, 1, 6), (4, 3, 2), (0, 2, 1), (1, 4, 1)])
def test_credit_is_shared_between_the_regions(room: int, regions: int, credit: int) -> None:
    names = tuple(f"r{number}" for number in range(regions))
    peers = heard(names, REPORT._replace(room=room))
    assert {one.credit for one in peers.views(request(), 10.0)} == {credit}


def test_the_cost_here_is_what_the_routing_policy_says() -> None:
    terms = ("rtt_s", "prefill_s", "burden_s", "wait_s", "decode_s", "trouble_s")
    row = ("a", 1.0, 0.01, 0.2, 0.2, 0.4, 0.3, 0.0)
    cost = local_cost(Choice("a", "", terms, (row,), wait=True), request(), 9.0)
    assert cost == (False, 0.01, 0.4, 0.2, 0.3, 0, 0.2 / 1000)


def test_the_longest_match_here_is_that_of_any_replica() -> None:
    terms = ("prefill_s", "matched_bytes")
    rows = (("a", 1.0, 0.2, 500), ("b", 2.0, 0.1, 900))
    cost = local_cost(Choice("a", "", terms, rows, matched_bytes=500), request(), 0.0)
    assert (cost.matched_bytes, cost.s_per_byte) == (900, 0.2 / 500)


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


FAST, SLOW = ClassReport(1, 3, 0.4, 1e-5, 0.1), ClassReport(2, 0, 0.0, 1e-4, 0.2)


@pytest.mark.parametrize(
    ("size", "fast", "slow", "expected"),
    [
        pytest.param(1000, FAST, SLOW, SLOW, id="a short prompt goes where nothing waits"),
        pytest.param(10_000, FAST, SLOW, FAST, id="a long one where prefill is fast"),
        pytest.param(10_000, FAST._replace(available=0), SLOW, SLOW, id="which has no room"),
    ],
)
def test_the_cost_at_a_peer_is_that_of_its_best_class(
    size: int, fast: ClassReport, slow: ClassReport, expected: ClassReport
) -> None:
    found = heard(report=REPORT._replace(classes=(fast, slow))).views(request(prompt=b"x" * size), 10.0)[0]
    assert (found.wait_s, found.s_per_byte, found.decode_s) == expected[2:]


def test_a_peer_without_classes_is_as_it_reports_on_the_whole() -> None:
    for classes in ((), (FAST._replace(available=0),)):
        found = view(heard(report=REPORT._replace(classes=classes)), 10.0)
        assert (found.wait_s, found.s_per_byte, found.decode_s) == (0.5, 1e-4, 0.2)


def test_a_view_knows_how_old_its_report_is() -> None:
    assert view(heard(), 10.3).age_s == pytest.approx(0.3)


def test_a_report_has_a_row_for_each_accelerator_where_there_are_several() -> None:
    def of(*accelerators: str) -> RegionReport:
        targets = tuple(
            Target(id=f"t{port}", url=f"http://127.0.0.1:{port}", accelerator=name)
            for port, name in enumerate(accelerators, 1)
        )
        table = TargetTable(Table("s", "1", targets, policy="gorgo", pushing=Pushing()), 0.0)
        return region_report(table, 0, 0.0, 0.0)

    assert of("L4", "L4").classes == ()
    assert [one.available for one in of("L4", "A100", "L4").classes] == [2, 1]
    assert len(of(*"abcdef").classes) == MOST_CLASSES


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
        choice = choose(table, request(), 0.0)
        assert choice is not None
        assert choice.target_id == ("b" if far == "a" else "a")


def test_the_queue_is_as_slow_as_its_departures() -> None:
    pace = QueuePace()
    assert pace.wait_s(0, 0.0) == 0.0
    for number in range(11):
        pace.left(float(number))
    assert pace.wait_s(5, 10.0) == pytest.approx(5 / 1.1)
