"""What `provisioners.port.base` promises, checked on every cloud.

A cloud joins by a `Subject`: how to make it, how to empty a zone, how to lose a response. See docs/plugins.md.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from policies.model import CapacityType, FailureKind, Zone
from provisioners.contract.subject import LIVE_STATES, ON_DEMAND, SPOT, Subject
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, ReportSource, Requirements
from provisioners.port.errors import CapacityError, InvalidRequestError, ProvisionError

# --- launch -------------------------------------------------------------------------------------------------


def test_a_launched_instance_is_listed_with_what_was_ordered(subject: Subject) -> None:
    order = subject.order(replica_id=7)
    launched = subject.cloud.launch(order)
    listed = subject.listed()[order.token]
    assert listed.id == launched.id
    assert (listed.owner, listed.service, listed.replica_id) == ("owner-1", "chat", 7)
    assert (listed.zone, listed.capacity_type) == (order.offer.zone, order.offer.capacity_type)
    assert listed.state in LIVE_STATES


def test_it_gets_to_run_and_has_an_endpoint_by_then(subject: Subject) -> None:
    token = subject.cloud.launch(subject.order()).token
    assert subject.eventually(lambda: subject.listed()[token].state is InstanceState.RUNNING)
    assert (subject.listed()[token].endpoint or "").startswith("http://")


def test_the_same_token_twice_is_the_same_instance(subject: Subject) -> None:
    order = subject.order()
    assert subject.cloud.launch(order).id == subject.cloud.launch(order).id
    assert len(subject.listed()) == 1


def test_the_same_token_from_many_threads_is_the_same_instance(subject: Subject) -> None:
    order = subject.order()
    with ThreadPoolExecutor(8) as pool:
        ids = {instance.id for instance in pool.map(subject.cloud.launch, [order] * 8)}
    assert len(ids) == 1
    assert len(subject.listed()) == 1


def test_different_tokens_from_many_threads_are_different_instances(subject: Subject) -> None:
    orders = [subject.order(replica_id) for replica_id in range(1, 6)]
    with ThreadPoolExecutor(5) as pool:
        launched = list(pool.map(subject.cloud.launch, orders))
    assert len({instance.id for instance in launched}) == 5
    running = [until(subject, instance.token, InstanceState.RUNNING) for instance in launched]
    assert len({instance.endpoint for instance in running}) == 5
    assert subject.listed().keys() == {order.token for order in orders}


def test_the_token_of_a_dead_instance_gives_the_dead_instance(subject: Subject) -> None:
    order = subject.order()
    launched = subject.cloud.launch(order)
    subject.cloud.terminate(launched)
    assert subject.eventually(lambda: subject.cloud.launch(order).state is InstanceState.TERMINATED)
    assert subject.cloud.launch(order).id == launched.id


def test_after_a_lost_answer_the_instance_is_listed_and_its_token_returns_it(subject: Subject) -> None:
    order = subject.order()
    subject.lose_response(order)
    listed = subject.listed()[order.token]
    assert listed.state in LIVE_STATES
    assert subject.cloud.launch(order).id == listed.id
    assert len(subject.listed()) == 1


def test_an_order_that_is_sent_again_with_rotated_keys_finds_its_instance(subject: Subject) -> None:
    order = subject.order()
    subject.lose_response(order)
    for _ in range(2):
        subject.cloud = subject.restarted()
        found = subject.insist(lambda: subject.cloud.launch(order))
        listed = subject.insist(subject.listed)
        assert {one.id for one in listed.values()} == {found.id}


@pytest.mark.parametrize("candidate", [SPOT, ON_DEMAND], ids=["spot", "on-demand"])
def test_a_zone_without_room_is_a_capacity_error_and_leaves_nothing(
    subject: Subject, candidate: Candidate
) -> None:
    subject.needs(candidate)
    offer = subject.offer(candidate)
    subject.empty(offer.zone, offer.capacity_type)
    with pytest.raises(CapacityError) as caught:
        subject.cloud.launch(subject.order(offer=offer))
    assert caught.value.kind is FailureKind.CAPACITY
    assert caught.value.zone == offer.zone
    assert not subject.listed()


def test_no_room_for_spot_says_nothing_about_on_demand(subject: Subject) -> None:
    subject.needs(SPOT)
    subject.empty(subject.offer(SPOT).zone, CapacityType.SPOT)
    on_demand = replace(subject.offer(ON_DEMAND), zone=subject.offer(SPOT).zone)
    assert subject.cloud.launch(subject.order(offer=on_demand)).state in LIVE_STATES


def test_a_token_that_was_answered_is_answered_again_when_its_zone_is_full(subject: Subject) -> None:
    offer = subject.offer(ON_DEMAND)
    order = subject.order(offer=offer)
    launched = subject.cloud.launch(order)
    subject.empty(offer.zone, CapacityType.ON_DEMAND)
    assert subject.cloud.launch(order).id == launched.id


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(
            lambda order: replace(order, offer=replace(order.offer, zone=Zone("nowhere", "x", "x-1"))),
            id="a zone that does not exist",
        ),
        pytest.param(lambda order: replace(order, token="../Up"), id="a token that is none"),
    ],
)
def test_a_wrong_order_is_an_invalid_request_and_leaves_nothing(
    subject: Subject, spoil: Callable[[LaunchOrder], LaunchOrder]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        subject.cloud.launch(spoil(subject.order()))
    assert isinstance(caught.value, ProvisionError)
    assert caught.value.kind is FailureKind.CONFIG
    assert caught.value.cloud == subject.cloud.name
    assert not subject.listed()


# --- instances ----------------------------------------------------------------------------------------------


def test_nobody_sees_another_owners_instances(subject: Subject) -> None:
    mine = subject.cloud.launch(subject.order(owner="owner-1"))
    theirs = subject.cloud.launch(subject.order(owner="owner-2"))
    assert subject.listed("owner-1").keys() == {mine.token}
    assert subject.listed("owner-2").keys() == {theirs.token}
    assert not subject.listed("no-owner")


def test_a_service_is_listed_alone_or_with_all_of_its_owner(subject: Subject) -> None:
    chat = subject.cloud.launch(subject.order(service="chat"))
    code = subject.cloud.launch(subject.order(service="code"))
    assert subject.listed(service="chat").keys() == {chat.token}
    assert subject.listed().keys() == {chat.token, code.token}


def test_a_terminated_instance_is_still_listed_as_such(subject: Subject) -> None:
    launched = subject.cloud.launch(subject.order())
    subject.cloud.terminate(launched)
    assert launched.token in subject.listed()
    assert subject.eventually(lambda: subject.listed()[launched.token].state is InstanceState.TERMINATED)


# --- terminate ----------------------------------------------------------------------------------------------


def test_terminating_twice_is_success(subject: Subject) -> None:
    launched = subject.cloud.launch(subject.order())
    subject.cloud.terminate(launched)
    subject.cloud.terminate(launched)
    assert subject.eventually(lambda: subject.listed()[launched.token].state.is_gone)


def test_terminating_from_many_threads_is_success(subject: Subject) -> None:
    launched = subject.cloud.launch(subject.order())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(subject.cloud.terminate, [launched] * 4))
    assert subject.eventually(lambda: subject.listed()[launched.token].state.is_gone)


def test_terminating_what_never_was_is_success(subject: Subject) -> None:
    launched = subject.cloud.launch(subject.order())
    subject.cloud.terminate(replace(launched, id="i-unknown", token="never-was"))
    assert subject.listed().keys() == {launched.token}


def test_terminating_one_spares_the_others(subject: Subject) -> None:
    first, second = (subject.cloud.launch(subject.order(replica_id)) for replica_id in (1, 2))
    subject.cloud.terminate(first)
    assert subject.eventually(lambda: subject.listed()[first.token].state.is_gone)
    assert subject.listed()[second.token].state in LIVE_STATES


def test_a_terminated_instance_gives_its_place_back(subject: Subject) -> None:
    offer = subject.offer()
    launched = [subject.cloud.launch(subject.order(replica_id, offer=offer)) for replica_id in (1, 2)]
    subject.cloud.terminate(launched[0])
    assert subject.eventually(lambda: subject.listed()[launched[0].token].state.is_gone)
    assert subject.cloud.launch(subject.order(3, offer=offer)).state in LIVE_STATES


# --- several nodes ------------------------------------------------------------------------------------------


def until(subject: Subject, token: str, state: InstanceState) -> Instance:
    assert subject.eventually(lambda: subject.listed()[token].state is state), subject.listed()
    return subject.listed()[token]


def test_all_nodes_of_a_replica_are_one_instance(subject: Subject) -> None:
    order = subject.order(num_nodes=3)
    launched = subject.cloud.launch(order)
    running = until(subject, order.token, InstanceState.RUNNING)
    assert subject.listed().keys() == {order.token}
    assert running.id == launched.id
    assert launched.endpoint in (None, running.endpoint)
    assert subject.cloud.launch(order).id == launched.id


@pytest.mark.parametrize("candidate", [SPOT, ON_DEMAND], ids=["spot", "on-demand"])
def test_a_zone_with_room_for_some_of_the_nodes_has_no_room_and_none_is_left(
    subject: Subject, candidate: Candidate
) -> None:
    subject.needs(candidate)
    offer = subject.offer(candidate)
    subject.set_room(offer.zone, offer.capacity_type, 2)
    with pytest.raises(CapacityError) as caught:
        subject.cloud.launch(subject.order(1, offer=offer, num_nodes=3))
    assert caught.value.zone == offer.zone
    assert subject.eventually(lambda: subject.living() == set())
    assert subject.cloud.launch(subject.order(2, offer=offer, num_nodes=2)).state in LIVE_STATES


def test_every_node_takes_a_place_and_gives_it_back(subject: Subject) -> None:
    offer = subject.offer()
    subject.set_room(offer.zone, offer.capacity_type, 3)
    replica = subject.cloud.launch(subject.order(1, offer=offer, num_nodes=2))
    subject.cloud.launch(subject.order(2, offer=offer))
    with pytest.raises(CapacityError):
        subject.cloud.launch(subject.order(3, offer=offer))
    subject.cloud.terminate(replica)
    until(subject, replica.token, InstanceState.TERMINATED)
    assert subject.cloud.launch(subject.order(4, offer=offer, num_nodes=2)).state in LIVE_STATES


@pytest.mark.parametrize("rank", [0, 1], ids=["the head", "another node"])
def test_a_replica_that_lost_a_node_is_broken_until_it_is_terminated(subject: Subject, rank: int) -> None:
    replica = subject.cloud.launch(subject.order(num_nodes=2))
    until(subject, replica.token, InstanceState.RUNNING)
    subject.preempt_node(replica.token, rank)
    broken = until(subject, replica.token, InstanceState.BROKEN)
    assert (broken.id, broken.message.partition(":")[0]) == (replica.id, f"node {rank} of 2 is gone")
    assert not broken.state.is_gone
    subject.cloud.terminate(broken)
    assert subject.eventually(lambda: subject.listed()[replica.token].state.is_gone)


def test_a_replica_that_lost_every_node_was_preempted(subject: Subject) -> None:
    subject.needs(SPOT)
    replica = subject.cloud.launch(subject.order(num_nodes=2))
    for rank in (0, 1):
        subject.preempt_node(replica.token, rank)
    until(subject, replica.token, InstanceState.PREEMPTED)


def test_a_warning_to_any_node_is_one_to_the_replica(subject: Subject) -> None:
    replica = subject.cloud.launch(subject.order(num_nodes=2))
    subject.warn_node(replica.token, 1)
    assert subject.eventually(lambda: subject.listed()[replica.token].preempt_at is not None)
    assert subject.listed()[replica.token].state in LIVE_STATES


@pytest.mark.parametrize("rank", [0, 1])
def test_a_notice_that_a_machine_reports_is_known_before_the_next_listing(
    subject: Subject, rank: int
) -> None:
    replica = subject.cloud.launch(subject.order(num_nodes=2))
    other = subject.cloud.launch(subject.order(replica_id=2))
    for one in (replica, other):
        until(subject, one.token, InstanceState.RUNNING)
    if not isinstance(subject.cloud, ReportSource):
        pytest.skip("its machines report nothing by themselves")
    shown: list[float | None] = []
    cloud = subject.cloud

    def changed() -> None:
        shown.extend(one.preempt_at for one in cloud.reported("owner-1") if one.token == replica.token)

    cloud.on_report(changed)
    assert {one.token for one in cloud.reported("owner-1")} == {replica.token, other.token}
    assert cloud.reported("owner-2") == []
    assert shown == []
    subject.report_notice(replica.token, rank)
    assert len(shown) == 1
    assert shown[0] is not None
    reported = {one.token: one for one in cloud.reported("owner-1")}
    assert (reported[replica.token].state, reported[replica.token].preempt_at) == (
        InstanceState.RUNNING,
        shown[0],
    )
    assert reported[other.token].preempt_at is None
    assert reported == subject.listed()


def test_after_a_lost_answer_all_nodes_are_there(subject: Subject) -> None:
    order = subject.order(num_nodes=2)
    subject.lose_response(order)
    launched = subject.cloud.launch(order)
    until(subject, order.token, InstanceState.RUNNING)
    subject.cloud.terminate(launched)
    assert subject.eventually(lambda: subject.listed()[order.token].state is InstanceState.TERMINATED)


def changed(field: str, value: Any) -> dict[str, Any]:
    return {field: value}


# --- offers -------------------------------------------------------------------------------------------------


def market_of(candidate: Candidate) -> CapacityType:
    return CapacityType.SPOT if candidate.use_spot else CapacityType.ON_DEMAND


def test_the_cheapest_offer_comes_first(subject: Subject) -> None:
    offers = subject.cloud.offers(Requirements(subject.markets))
    assert [offer.price_usd_hour for offer in offers] == sorted(offer.price_usd_hour for offer in offers)
    assert {offer.capacity_type for offer in offers} == {market_of(one) for one in subject.markets}


def test_ordered_candidates_keep_their_order_whatever_they_cost(subject: Subject) -> None:
    subject.needs(SPOT)
    offers = subject.cloud.offers(Requirements((ON_DEMAND, SPOT), ordered=True))
    kinds = [offer.capacity_type for offer in offers]
    assert kinds == sorted(kinds, key=[CapacityType.ON_DEMAND, CapacityType.SPOT].index)


def test_the_same_offer_of_two_candidates_is_offered_once(subject: Subject) -> None:
    offers = subject.cloud.offers(Requirements((subject.usual, subject.usual)))
    assert len(offers) == len(set(offers)) > 0


@pytest.mark.parametrize("field", ["cloud", "region", "zone"])
def test_a_candidate_is_offered_where_it_asks_to_be(subject: Subject, field: str) -> None:
    zone = subject.cloud.offers(Requirements((subject.usual,)))[-1].zone
    has: dict[str, Any] = {"cloud": zone.cloud, "region": zone.region, "zone": zone.name}
    offers = subject.cloud.offers(Requirements((replace(subject.usual, **changed(field, has[field])),)))
    places = [{"cloud": o.zone.cloud, "region": o.zone.region, "zone": o.zone.name}[field] for o in offers]
    assert set(places) == {has[field]}


@pytest.mark.parametrize("field", ["cloud", "region", "zone", "instance_type"])
def test_a_star_is_any(subject: Subject, field: str) -> None:
    starred = subject.cloud.offers(Requirements((replace(subject.usual, **changed(field, "*")),)))
    assert list(starred) == list(subject.cloud.offers(Requirements((subject.usual,))))


@pytest.mark.parametrize("field", ["cloud", "region", "zone"])
def test_a_place_nobody_knows_has_no_offers(subject: Subject, field: str) -> None:
    assert not subject.cloud.offers(Requirements((replace(subject.usual, **changed(field, "atlantis-1")),)))


def test_nothing_dearer_than_the_limit_is_offered(subject: Subject) -> None:
    offers = subject.cloud.offers(Requirements((subject.usual,)))
    limit = offers[1].price_usd_hour
    capped = subject.cloud.offers(Requirements((replace(subject.usual, max_hourly_cost=limit),)))
    assert list(capped) == [offer for offer in offers if offer.price_usd_hour <= limit]


def test_spot_is_never_dearer_than_on_demand(subject: Subject) -> None:
    subject.needs(SPOT)
    for offer in subject.cloud.offers(Requirements((SPOT,))):
        assert offer.on_demand_usd_hour is not None
        assert offer.price_usd_hour <= offer.on_demand_usd_hour


def test_an_offer_is_priced_for_all_nodes(subject: Subject) -> None:
    one, three = (subject.cloud.offers(Requirements((subject.usual,), num_nodes=count)) for count in (1, 3))
    assert [offer.zone for offer in three] == [offer.zone for offer in one]
    for of_three, of_one in zip(three, one, strict=True):
        assert of_three.price_usd_hour == pytest.approx(3 * of_one.price_usd_hour)
        assert of_three.on_demand_usd_hour == pytest.approx(3 * (of_one.on_demand_usd_hour or 0.0))


def test_an_accelerator_is_offered_as_asked(subject: Subject) -> None:
    asked = replace(
        subject.usual, accelerator=subject.accelerator, accelerator_count=subject.accelerator_count
    )
    offer = subject.offer(asked)
    assert (offer.accelerator, offer.accelerator_count) == (subject.accelerator, subject.accelerator_count)
