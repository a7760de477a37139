"""A controller of load balancer agents that dies before or after any call: one Deployment per order in the end, with all that belongs to
it and the newest release, and nothing of those that were terminated."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest

from provisioners.port.agents import AgentRelease
from provisioners.port.base import Instance, InstanceState
from provisioners.port.errors import ProvisionError, TransientError
from tests.clouds.kubernetes.kube_controller import Controller, controller
from tests.clouds.kubernetes.kube_deployments import is_ready
from tests.clouds.kubernetes.kube_store import Refused
from tests.clouds.schedules import by_decades
from tests.integration.test_kubernetes_agents import CLUSTER, FIRST, SECOND, agent_order, make_ready, pods

pytestmark = pytest.mark.long

KINDS = ("deployments", "services", "secrets", "poddisruptionbudgets", "pods")
RELEASES = (FIRST, SECOND, AgentRelease("three", ("--port", "8000"), (8000,)))
BEFORE_OR_AFTER = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])


def left(kube: Controller) -> dict[str, int]:
    found = {kind: len(kube.world.store.list(kind, "ml")) for kind in KINDS}
    return {kind: number for kind, number in found.items() if number}


def bring(kube: Controller) -> None:
    """Pods that have a node become ready, and the watch brings what there is."""
    kube.advance(1.0)
    for pod in pods(kube):
        if pod["spec"].get("nodeName") and not is_ready(pod) and not pod["metadata"].get("deletionTimestamp"):
            make_ready(kube, pod)
    region = kube.cloud._regions["prod"]
    region.take_nodes(kube.world.store.list("nodes", None))
    region.agent_cache.replace_pods(pods(kube))


def settle(kube: Controller) -> None:
    for _ in range(4):
        bring(kube)
        kube.advance(200.0)


@BEFORE_OR_AFTER
def test_a_controller_that_dies_while_it_terminates(after: bool) -> None:
    for call in count():
        with controller(cluster=CLUSTER) as kube:
            agent = kube.cloud.launch(agent_order())
            kube.cloud.run_agent(agent, SECOND)
            kube.world.troubles.crash = call, after
            with suppress(TransientError):
                kube.cloud.terminate(agent)
            died = kube.world.troubles.is_down
            kube.restart()
            for one in kube.listed().values():
                kube.insist(lambda kube=kube, one=one: kube.cloud.terminate(one))
            settle(kube)
            assert left(kube) == {}
        if not died:
            assert call >= 3  # a look, a note, a deletion
            return


@by_decades
def test_whatever_happens_there_is_one_deployment_per_order_and_nothing_is_left(seeds: range) -> None:
    for seed in seeds:
        with controller(strict=False, cluster=CLUSTER) as kube:
            kube.world.add_node("other", "zone-a")
            live_through(kube, random.Random(seed))


def live_through(kube: Controller, rng: random.Random) -> None:
    """Thirty steps of work and mishap; then everything works again, and all must come right."""
    orders = {f"lb-{n}": agent_order(f"lb-{n}", replica_id=n) for n in range(2)}
    doomed: set[str] = set()
    for _ in range(30):
        token = rng.choice(sorted(orders))
        step(kube, rng, token, orders, doomed)
        if kube.world.troubles.is_down:
            kube.restart()
    troubles = kube.world.troubles
    troubles.throttled = troubles.cut = troubles.fail = 0
    for node in ("fixed", "other"):
        kube.world.cordon(node, on=False)
    kube.restart()
    end(kube, doomed)
    settle(kube)
    for token in orders.keys() - doomed:
        agent = kube.insist(lambda token=token: kube.cloud.launch(orders[token]))
        if agent.state.is_gone:  # someone else has deleted it
            continue
        for _ in range(3):
            kube.insist(lambda agent=agent: kube.cloud.run_agent(agent, RELEASES[-1]))
            settle(kube)
        (process,) = kube.cloud.run_agent(agent, RELEASES[-1])
        assert process.release == RELEASES[-1].name
    alive = {token for token, one in kube.listed().items() if one.state is InstanceState.RUNNING}
    names = {one["metadata"]["name"] for one in kube.world.store.list("deployments", "ml")}
    assert names == alive
    assert not alive & doomed
    for kind in ("services", "poddisruptionbudgets", "pods"):
        assert len(kube.world.store.list(kind, "ml")) == len(alive)
    end(kube, set(orders))
    settle(kube)
    assert left(kube) == {}


def step(
    kube: Controller, rng: random.Random, token: str, orders: dict[str, object], doomed: set[str]
) -> None:
    world, troubles = kube.world, kube.world.troubles
    match rng.randrange(9):
        case 0 | 1 if token not in doomed:
            attempt(lambda: kube.cloud.launch(orders[token]))  # type: ignore[arg-type]
        case 2 | 3:
            attempt(lambda: run(kube, token, rng.choice(RELEASES)))
        case 4 if rng.random() < 0.3:
            doomed.add(token)
            attempt(lambda: end(kube, {token}))
        case 5:
            setattr(troubles, rng.choice(("throttled", "cut", "fail")), rng.randrange(1, 4))
        case 6:
            troubles.crash = rng.randrange(8), rng.random() < 0.5
        case 7:
            world.cordon(rng.choice(("fixed", "other")), on=rng.random() < 0.5)
            take_one(kube, rng)
        case 8:
            bring(kube)
            kube.advance(rng.choice((1.0, 10.0, 200.0)))


def run(kube: Controller, token: str, release: AgentRelease) -> None:
    for one in kube.cloud.instances("owner-1"):
        if one.token == token and is_there(one):
            kube.cloud.run_agent(one, release)


def end(kube: Controller, tokens: set[str]) -> None:
    for token, one in kube.listed().items():
        if token in tokens and not one.state.is_gone:
            kube.insist(lambda one=one: kube.cloud.terminate(one))


def is_there(instance: Instance) -> bool:
    return not instance.state.is_gone and instance.state is not InstanceState.STOPPING


def attempt(act: Callable[[], object]) -> None:
    with suppress(ProvisionError):  # reported, and tried again by a later step
        act()


def take_one(kube: Controller, rng: random.Random) -> None:
    """A Pod is lost, or evicted if its budget allows it; rarely someone deletes a whole agent."""
    names = kube.world.running()
    deployments = [one["metadata"]["name"] for one in kube.world.store.list("deployments", "ml")]
    if deployments and rng.random() < 0.1:
        kube.world.delete("deployments", "ml", rng.choice(deployments), {})
    elif names:
        with suppress(Refused):
            rng.choice((kube.world.lose, kube.world.evict))(rng.choice(names))
