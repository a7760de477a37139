"""With many targets a few are compared, and the choice is nearly as good."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from policies.routing.base import Choice, RequestView, RoutingPolicy, TargetView
from policies.routing.prefix_policy import HOLDERS
from policies.routing.radix_tree import RadixTree
from policies.routing.registry import POLICIES, make_policy
from policies.routing.sampling import ALL, SAMPLE
from policies.routing.target_list import TargetList

PREFIX_POLICIES = ("cache_aware", "gorgo", "prefix_tree")
MANY = 1000


def fleet_of(count: int) -> TargetList:
    views = [TargetView(f"t{number}") for number in range(count)]
    return TargetList(enumerate(views), views)


def request(number: int, prompt: bytes | None = None) -> RequestView:
    return RequestView(f"r{number}", "POST", "/", 500, prompt, "m", f"session-{number}")


def chosen(policy: RoutingPolicy, targets: TargetList, one: RequestView, now: float = 0.0) -> Choice:
    choice = policy.choose(one, targets, now)
    assert choice is not None
    return choice


def send(policy: RoutingPolicy, targets: TargetList, one: RequestView, now: float = 0.0) -> str:
    """The request is sent where the policy wants it, and stays there."""
    target_id = chosen(policy, targets, one, now).target_id
    view = targets.get(target_id)
    assert view is not None
    view.in_flight += 1
    policy.record(one, target_id, now)
    return target_id


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"power_of_two", "consistent_hash"}))
def test_of_a_few_all_are_compared(name: str) -> None:
    targets = fleet_of(ALL)
    assert len(chosen(make_policy(name), targets, request(0, b"x" * 500)).scored) == ALL


@pytest.mark.parametrize("name", ["least_load", "instance_aware_least_load", "round_robin"])
def test_of_many_a_sample_is_compared_and_it_differs_from_request_to_request(name: str) -> None:
    policy, targets = make_policy(name), fleet_of(MANY)
    seen: set[str] = set()
    for number in range(100):
        rows = chosen(policy, targets, request(number)).scored
        assert rows == chosen(policy, targets, request(number)).scored  # to ask costs no randomness
        assert 1 < len(rows) <= SAMPLE
        seen |= {str(row[0]) for row in rows}
        send(policy, targets, request(number))
    assert len(seen) > 80 * SAMPLE / 2


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_same_numbers_make_the_same_choices(name: str) -> None:
    def run(seed: int) -> list[str]:
        policy, targets = make_policy(name, Random(seed)), fleet_of(100)
        return [send(policy, targets, request(number, b"%04d" % number * 50)) for number in range(50)]

    assert run(1) == run(1)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["least_load", "instance_aware_least_load", "cache_aware", "gorgo", "prefix_tree"]
)
def test_the_load_is_nearly_as_even_as_if_all_were_compared(name: str) -> None:
    policy, targets = make_policy(name), fleet_of(200)
    for number in range(20 * 200):
        send(policy, targets, request(number, b"%08d" % number * 20))
    loads = [view.in_flight for view in targets]
    assert max(loads) <= 22  # the mean is 20; drawn at random the busiest would have 33
    assert min(loads) >= 16


def test_round_robin_comes_to_everyone() -> None:
    policy, targets = make_policy("round_robin"), fleet_of(200)
    served = Counter(send(policy, targets, request(number)) for number in range(10 * 200))
    assert len(served) == 200
    assert max(served.values()) - min(served.values()) <= 5


@pytest.mark.parametrize("name", PREFIX_POLICIES)
def test_the_holder_of_a_conversation_is_found_among_many(name: str) -> None:
    policy, targets = make_policy(name), fleet_of(MANY)
    shared = b"the instructions of the system, the same for all. " * 10
    for number in range(MANY):
        policy.record(request(number, shared + b"%05d" % number * 100), f"t{number}", 0.0)
    for number in range(0, MANY, 50):
        choice = chosen(policy, targets, request(5000, shared + b"%05d" % number * 100 + b"and then?" * 10))
        assert choice.target_id == f"t{number}"
        assert choice.matched_bytes >= 900
        assert len(choice.scored) <= SAMPLE + HOLDERS + 1  # and the session's own


@pytest.mark.parametrize("name", PREFIX_POLICIES)
def test_a_holder_that_is_not_offered_is_passed_over(name: str) -> None:
    policy, targets = make_policy(name), fleet_of(MANY)
    prompt = b"a conversation of some length " * 30
    for number in (3, 7):
        policy.record(request(number, prompt), f"t{number}", 0.0)
        policy.responded(request(number, prompt), f"t{number}", 0.1)
    targets.drop(3)
    assert chosen(policy, targets, request(8, prompt)).target_id == "t7"
    assert chosen(policy, targets.without([7]), request(8, prompt)).target_id not in {"t3", "t7"}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PREFIX_POLICIES)
def test_a_holder_that_is_too_busy_does_not_get_more(name: str) -> None:
    policy, targets = make_policy(name), fleet_of(MANY)
    prompt = b"a conversation of some length " * 30
    policy.record(request(0, prompt), "t3", 0.0)
    targets[3].in_flight = 500
    assert chosen(policy, targets, request(1, prompt)).target_id != "t3"


def test_a_session_stays_with_its_target_and_within_the_bound() -> None:
    policy, targets = make_policy("consistent_hash"), fleet_of(200)
    homes = {number: chosen(policy, targets, request(number)).target_id for number in range(50)}
    assert {number: chosen(policy, targets, request(number)).target_id for number in homes} == homes
    for number in range(2000):
        send(policy, targets, request(number % 40))
    assert max(view.in_flight for view in targets) <= 1.25 * 2000 / 200 + 1


def test_the_match_of_many_holders_is_that_of_each() -> None:
    tree = RadixTree(2**20)
    shared, prompts = b"s" * 160, {f"t{number}": b"%016d" % (number // 3) * 4 for number in range(100)}
    for name, rest in prompts.items():
        tree.insert("m", shared + rest, name)
    tree.forget("t30")
    match = tree.match("m", shared + prompts["t31"])
    order = list(match.longest_first(12345))
    assert set(order[:2]) == {"t31", "t32"}
    assert sorted(order) == sorted(set(prompts) - {"t30"})
    assert [match.get(name, 0) for name in ("t31", "t32", "t33", "t30", "unknown")] == [224, 224, 160, 0, 0]
    assert {next(iter(tree.match("m", shared).longest_first(drawn))) for drawn in range(100)} > {"t1", "t50"}
