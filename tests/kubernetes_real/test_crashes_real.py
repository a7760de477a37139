"""A controller that dies before or after any call to a real API server; one that remembers nothing goes on.

One Pod per node of an order with all that belongs to it, nothing made twice, and nothing left. SKYSERVE_SCHEDULES is how many random
schedules there are; from 200 on a controller dies at each of its calls in turn, else at every third.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest
import urllib3

from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.port.base import Instance, InstanceState, LaunchOrder
from provisioners.port.errors import ProvisionError
from tests.clouds.kubernetes.kube_controller import OWNER
from tests.clouds.schedules import CALL_STEP, by_decades
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.spaces import RealWorld, Space, insist
from tests.kubernetes_real.wire import Wire

S = InstanceState
BEFORE_OR_AFTER = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
_NUMBERS = itertools.count(1)


class Births:
    """What Pods were made in a namespace: uids by name."""

    def __init__(self, space: Space) -> None:
        self.uids: dict[str, set[str]] = {}
        self._space = space
        self._version = space.api.call("GET", f"api/v1/namespaces/{space.name}/pods")["metadata"][
            "resourceVersion"
        ]
        self._over = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def of(self, token: str) -> dict[str, int]:
        return {
            name: len(uids)
            for name, uids in list(self.uids.items())
            if name == token or name.startswith(f"{token}-n")
        }

    def _follow(self) -> None:
        with suppress(OSError, ValueError, urllib3.exceptions.HTTPError):
            while not self._over.is_set():  # the server ends each watch after some minutes
                for event in self._space.api.watch("pods", self._version):
                    meta = event["object"]["metadata"]
                    self._version = meta["resourceVersion"]
                    if event["type"] == "ADDED" and meta["namespace"] == self._space.name:
                        self.uids.setdefault(meta["name"], set()).add(meta["uid"])
                    if self._over.is_set():
                        return


@pytest.fixture(scope="module")
def place(world: RealWorld) -> Iterator[Space]:
    with world.space("crash", nodes=2) as made:
        yield made


@pytest.fixture(scope="module")
def births(place: Space) -> Iterator[Births]:
    made = Births(place)
    yield made
    made.close()


def token_of(what: str) -> str:
    return f"{what}-{next(_NUMBERS)}"


def crash(wire: Wire, call: int, after: bool, act: Callable[[], object]) -> bool:
    """Do it with a controller that dies at that call. Return whether it came to that."""
    wire.crash = call, after
    try:
        act()
    except ProvisionError:
        assert wire.is_down  # there is no other reason
    return wire.is_down


def expected(order: LaunchOrder) -> dict[str, int]:
    found = {"pods": order.num_nodes, "secrets": 1 if order.secrets else 0}
    found["services"] = 0 if order.num_nodes == 1 else 2
    return {kind: count for kind, count in found.items() if count}


def launch_twice(place: Space, births: Births, order: LaunchOrder, call: int, after: bool) -> bool:
    """A launch that dies, the same order again by another controller, and the end."""
    wire = Wire()
    first = place.controller(wire)
    died = crash(wire, call, after, lambda: first.launch(order))
    first.close()
    second = place.controller()
    launched = insist(lambda: second.launch(order))
    assert place.ours() == expected(order)
    assert find(second, order).id == launched.id
    assert find(second, order).state in (S.PENDING, S.SETUP, S.RUNNING)
    until(lambda: len(births.of(order.token)) == order.num_nodes, lambda: births.of(order.token))
    end(place, second, order)
    assert set(births.of(order.token).values()) == {1}, births.of(order.token)
    return died


def end_twice(place: Space, order: LaunchOrder, call: int, after: bool) -> bool:
    """A launch, a termination that dies, and another controller that terminates what is listed."""
    wire = Wire()
    first = place.controller(wire)
    launched = insist(lambda: first.launch(order))
    died = crash(wire, call, after, lambda: first.terminate(launched))
    first.close()
    end(place, place.controller(), order)
    return died


def find(cloud: KubernetesProvisioner, order: LaunchOrder) -> Instance:
    (found,) = [one for one in insist(lambda: cloud.instances(OWNER)) if one.token == order.token]
    return found


def end(place: Space, cloud: KubernetesProvisioner, order: LaunchOrder) -> None:
    for one in insist(lambda: cloud.instances(OWNER)):
        if one.token == order.token and not one.state.is_gone:
            insist(partial(cloud.terminate, one))
    place.await_nothing()
    place.stop_controllers()


def gang(place: Space, what: str, **changes: object) -> LaunchOrder:
    more = {"num_nodes": 2, "secrets": {"TOKEN": "s3cret"}} | changes
    order = place.order(place.controller(), token_of(what), **more)
    place.stop_controllers()
    return order


@BEFORE_OR_AFTER
@pytest.mark.timeout(900)
def test_a_controller_that_dies_while_it_launches(place: Space, births: Births, after: bool) -> None:
    call, died, runs = 0, True, 0
    while died:
        died = launch_twice(place, births, gang(place, "launch"), call, after)
        call, runs = call + CALL_STEP, runs + 1
    print(f"{runs} launches; the last one did not come to call {call - CALL_STEP}")
    assert (
        call > 6
    )  # nodes, two Pods, two Services, a Secret, the mark that they are complete, a look at each Pod


@BEFORE_OR_AFTER
@pytest.mark.timeout(900)
def test_a_controller_that_dies_while_it_terminates(place: Space, after: bool) -> None:
    call, died = 0, True
    while died:
        died = end_twice(place, gang(place, "end"), call, after)
        call += 1
    print(f"{call} terminations; the last one did not come to call {call - 1}")
    assert call > 4  # a mark and a deletion for each Pod


@by_decades
@pytest.mark.timeout(900)
def test_whenever_it_dies_nothing_is_made_twice_and_nothing_left(
    place: Space, births: Births, seeds: range
) -> None:
    died = 0
    for seed in seeds:
        rng = random.Random(seed)
        nodes, secrets = rng.choice((1, 2, 2, 3)), rng.choice(({}, {"TOKEN": "s3cret"}))
        call, after = rng.randrange(10), rng.random() < 0.5
        order = gang(place, f"seed-{seed}", num_nodes=nodes, secrets=secrets)
        if rng.random() < 0.6:
            died += launch_twice(place, births, order, call, after)
        else:
            died += end_twice(place, order, call % (2 * nodes + 1), after)
    print(f"{died} of {len(seeds)} controllers died at their call")
    assert died > 0
