"""A controller that crashes before or after any call to a cluster, starts again and knows nothing: one Pod per node of an order in the
end, with all that belongs to it, and nothing that no one remembers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from provisioners.port.base import InstanceState
from provisioners.port.errors import CapacityError, ProvisionError, TransientError
from tests.clouds.kubernetes.kube_controller import Controller, controller, order_of
from tests.clouds.schedules import CALL_STEP, by_decades

pytestmark = pytest.mark.long

S = InstanceState
GANG = order_of(num_nodes=2, secrets={"TOKEN": "s3cret"})
BEFORE_OR_AFTER = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


def crashing(kube: Controller, call: int, after: bool, act: Callable[[], object]) -> bool:
    """Do it with a controller that crashes at that call. Whether it came to that; afterwards a new one is there."""
    kube.world.troubles.crash = call, after
    try:
        act()
    except CapacityError:
        pass  # it died after that, or not at all
    except ProvisionError:
        assert kube.world.troubles.is_down  # there is no other reason
    died = kube.world.troubles.is_down
    kube.restart()
    return died


def kinds(kube: Controller) -> dict[str, int]:
    """Return how many of our objects there are, by kind."""
    found = {kind: len(kube.world.store.list(kind, "ml")) for kind in ("pods", "secrets", "services")}
    return {kind: count for kind, count in found.items() if count}


@BEFORE_OR_AFTER
def test_a_controller_that_dies_while_it_launches(after: bool) -> None:
    call, died = 0, True
    while died:
        with controller() as kube:
            died = crashing(kube, call, after, lambda kube=kube: kube.cloud.launch(GANG))
            launched = kube.insist(lambda kube=kube: kube.cloud.launch(GANG))
            assert kube.world.launches == {"chat-1": 1, "chat-1-n1": 1}
            assert kinds(kube) == {"pods": 2, "secrets": 1, "services": 2}
            assert kube.listed()[GANG.token].id == launched.id
            assert kube.listed()[GANG.token].state is S.RUNNING
        call += 1
    assert call > 6  # two Pods, two Services, a Secret, the mark that they are complete, a look at each Pod


def test_what_was_launched_in_part_shows_that_its_order_is_needed_again() -> None:
    order = order_of(secrets={"TOKEN": "s3cret"})
    with controller() as kube:
        kube.cloud.instances("owner-1")  # so that the next calls are those of the launch
        assert crashing(kube, 2, False, lambda: kube.cloud.launch(order))  # nodes, the Pod, its Secret
        assert kinds(kube) == {"pods": 1}
        pod = kube.world.store.get("pods", "ml", order.token)
        pod["status"] = {
            "phase": "Pending",
            "conditions": pod["status"]["conditions"],
        }  # the kubelet waits for the Secret
        kube.world.store.update("pods", pod)
        assert kube.listed()[order.token].state is S.UNSUPERVISED
        kube.cloud.launch(order)
        assert kinds(kube) == {"pods": 1, "secrets": 1}
        assert kube.listed()[order.token].state is S.SETUP


@BEFORE_OR_AFTER
def test_a_controller_that_dies_while_there_is_no_room(after: bool) -> None:
    call, died = 0, True
    while died:
        with controller(pods=1) as kube:
            died = crashing(kube, call, after, lambda kube=kube: kube.cloud.launch(GANG))
            try:
                launched = kube.insist(lambda kube=kube: kube.cloud.launch(GANG))
            except CapacityError:
                pass
            else:  # it died while it took back what it had launched
                assert launched.state in (S.STOPPING, S.BROKEN)
            for one in kube.listed().values():
                kube.insist(lambda kube=kube, one=one: kube.cloud.terminate(one))
            kube.advance(60.0)
            assert kinds(kube) == {}
            assert all(one.state.is_gone for one in kube.listed().values())
        call += CALL_STEP
    assert call > 6


@BEFORE_OR_AFTER
def test_a_controller_that_dies_while_it_terminates(after: bool) -> None:
    call, died = 0, True
    while died:
        with controller() as kube:
            launched = kube.cloud.launch(GANG)
            died = crashing(kube, call, after, lambda kube=kube, one=launched: kube.cloud.terminate(one))
            for listed in kube.listed().values():
                kube.insist(lambda kube=kube, listed=listed: kube.cloud.terminate(listed))
            kube.advance(60.0)
            assert kinds(kube) == {}
        call += 1
    assert call >= 4  # a mark and a deletion for each Pod


@by_decades
def test_whatever_happens_there_is_one_pod_per_order_and_none_is_lost(seeds: range) -> None:
    for seed in seeds:
        with controller(strict=False, pods=4) as kube:
            live_through(kube, random.Random(seed))


def live_through(kube: Controller, rng: random.Random) -> None:
    """Thirty steps of work and mishap; then everything works again, and all must come right."""
    world, troubles = kube.world, kube.world.troubles
    orders = {
        f"chat-{n}": order_of(f"chat-{n}", replica_id=n, num_nodes=1 + n % 2, secrets={"A": "b"} if n else {})
        for n in range(3)
    }
    doomed: set[str] = set()
    for _ in range(30):
        order = orders[rng.choice(sorted(orders))]
        match rng.randrange(9):
            case 0 | 1 | 2:
                if order.token not in doomed:
                    attempt(lambda order=order: kube.cloud.launch(order))
            case 3 if rng.random() < 0.3:
                doomed.add(order.token)
                attempt(lambda order=order: end_listed(kube, {order.token}))
            case 4:
                setattr(troubles, rng.choice(("throttled", "cut", "fail")), rng.randrange(1, 4))
            case 5:
                troubles.crash = rng.randrange(8), rng.random() < 0.5
            case 6:
                world.set_pods("fixed", rng.choice((0, 1, 4)))
            case 7:
                take_one(kube, rng)
            case 8:
                kube.advance(rng.choice((1.0, 10.0, 100.0)))
                attempt(lambda: kube.cloud.instances("owner-1"))
        if troubles.is_down:
            kube.restart()
        names = world.pod_names()
        assert len(names) == len(set(names))
    troubles.throttled = troubles.cut = troubles.fail = 0
    world.set_pods("fixed", 110)
    kube.advance(100.0)
    kube.restart()
    for token in orders.keys() - doomed:
        attempt(lambda token=token: kube.cloud.launch(orders[token]))
    end_listed(kube, doomed)
    kube.advance(100.0)
    alive = {token for token, one in kube.listed().items() if not one.state.is_gone}
    assert {name.partition("-n")[0] for name in world.running()} == alive
    assert not doomed & alive
    end_listed(kube, set(orders))
    kube.advance(100.0)
    assert kinds(kube) == {}


def end_listed(kube: Controller, tokens: set[str]) -> None:
    """As a controller does: of what the cluster lists, whatever is not wanted."""
    for token, one in kube.listed().items():
        if token in tokens and not one.state.is_gone:
            kube.insist(lambda one=one: kube.cloud.terminate(one))


def attempt(act: Callable[[], object]) -> None:
    with suppress(TransientError, CapacityError):  # reported, and tried again by a later step
        act()


def take_one(kube: Controller, rng: random.Random) -> None:
    names = kube.world.running()
    if names:
        name = rng.choice(names)
        rng.choice((kube.world.lose, kube.world.evict))(name)
