"""What `provisioners.port.base` and `provisioners.port.errors` promise when a cloud is not at its best.

Every kind of error, lost memory, late lists, and orders that are accepted and then fail.
"""

from __future__ import annotations

import pytest

from policies.model import FailureKind, Offer
from provisioners.contract.subject import LIVE_STATES, Subject
from provisioners.port.base import InstanceState, RegionalSource, Requirements, is_silent
from provisioners.port.errors import AuthError, QuotaError, Refusal


def test_a_quota_error_names_the_quota_and_leaves_nothing(subject: Subject) -> None:
    offer = subject.offer()
    name = subject.exhaust_quota(offer)
    with pytest.raises(QuotaError) as caught:
        subject.cloud.launch(subject.order(offer=offer))
    assert caught.value.kind is FailureKind.QUOTA
    assert name in caught.value.message
    assert caught.value.zone == offer.zone
    assert subject.living() == set()


def test_without_valid_credentials_it_is_said_so_and_nothing_is_launched(subject: Subject) -> None:
    order = subject.order()
    subject.refuse_us()
    with pytest.raises(AuthError) as caught:
        subject.cloud.launch(order)
    assert caught.value.kind is FailureKind.AUTH
    subject.know_us_again()
    assert subject.living() == set()
    assert subject.cloud.launch(order).state in LIVE_STATES


def test_a_throttled_order_goes_through_in_the_end_and_once(subject: Subject) -> None:
    order = subject.order()
    subject.throttle()
    launched = subject.insist(lambda: subject.cloud.launch(order))
    assert launched.state in LIVE_STATES
    assert subject.living() == {order.token}
    assert subject.cloud.launch(order).id == launched.id


def test_what_is_accepted_and_fails_later_is_seen_to_fail_and_can_be_removed(subject: Subject) -> None:
    order = subject.order()
    subject.launch_to_fail(order)
    assert subject.eventually(lambda: subject.listed()[order.token].state not in LIVE_STATES)
    failed = subject.listed()[order.token]
    assert failed.state in (InstanceState.BROKEN, InstanceState.STOPPING) or failed.state.is_gone
    assert failed.refusal == Refusal(FailureKind.CAPACITY)  # as if it had been refused at once
    subject.cloud.terminate(failed)
    assert subject.eventually(lambda: order.token not in subject.living())


def test_what_the_cloud_does_not_list_yet_is_listed_all_the_same(subject: Subject) -> None:
    subject.list_late(15.0)
    launched = subject.cloud.launch(subject.order())
    for _ in range(4):
        assert subject.living() == {launched.token}
        subject.pass_time()


def test_what_the_cloud_does_not_list_yet_can_be_terminated(subject: Subject) -> None:
    subject.list_late(15.0)
    launched = subject.cloud.launch(subject.order())
    subject.cloud.terminate(launched)
    for _ in range(4):
        subject.pass_time()
    assert subject.living() == set()


def test_who_remembers_nothing_finds_what_there_is_and_can_end_it(subject: Subject) -> None:
    order = subject.order(num_nodes=2)
    launched = subject.cloud.launch(order)
    subject.cloud = subject.restarted()
    assert {token: one.id for token, one in subject.listed().items()} == {launched.token: launched.id}
    assert subject.cloud.launch(order).id == launched.id
    subject.cloud.terminate(subject.listed()[launched.token])
    assert subject.eventually(lambda: subject.living() == set())


def test_who_remembers_nothing_and_sees_nothing_yet_launches_nothing_twice(subject: Subject) -> None:
    order = subject.order()
    launched = subject.cloud.launch(order)
    subject.list_late(15.0)
    subject.cloud = subject.restarted()
    assert subject.cloud.launch(order).id == launched.id
    for _ in range(4):
        subject.pass_time()
    assert subject.living() == {order.token}


def test_a_region_that_goes_silent_hides_nothing_of_the_others_and_comes_back(subject: Subject) -> None:
    here, there = two_regions(subject)
    near = subject.cloud.launch(subject.order(1, offer=here))
    far = subject.cloud.launch(subject.order(2, offer=there))
    assert subject.eventually(lambda: subject.living() == {near.token, far.token})
    for _ in range(7):  # what was accepted within the last minute is shown in any case
        subject.pass_time()
    subject.mute(there.zone)
    cloud = subject.cloud
    assert isinstance(cloud, RegionalSource)
    for _ in range(3):
        listing = cloud.listing("owner-1")
        assert {one.token for one in listing.instances if not one.state.is_gone} == {near.token}
        assert is_silent(there.zone, listing.silent)
        assert not is_silent(here.zone, listing.silent)
        subject.pass_time()
    subject.unmute()
    assert subject.eventually(lambda: not cloud.listing("owner-1").silent)
    assert {one.token: one.id for one in cloud.listing("owner-1").instances} == {
        near.token: near.id,
        far.token: far.id,
    }


def test_what_is_in_a_healthy_region_can_be_terminated_while_another_is_silent(subject: Subject) -> None:
    here, there = two_regions(subject)
    near = subject.cloud.launch(subject.order(1, offer=here))
    far = subject.cloud.launch(subject.order(2, offer=there))
    subject.cloud = subject.restarted()  # which has seen none of them
    subject.mute(there.zone)
    subject.cloud.terminate(near)
    subject.unmute()
    assert subject.eventually(lambda: subject.living() == {far.token})


def two_regions(subject: Subject) -> tuple[Offer, Offer]:
    """Return an offer in each of two regions."""
    if not isinstance(subject.cloud, RegionalSource):
        pytest.skip("it has no regions that fail one by one")
    offers = subject.cloud.offers(Requirements((subject.usual,)))
    regions = {offer.zone.region: offer for offer in reversed(offers)}
    if len(regions) < 2:
        pytest.skip("it has one region")
    here, there = sorted(regions)[:2]
    return regions[here], regions[there]
