"""A thousand Pods on a real API server, and a node that is silent for ten minutes. Both take long: figures are printed."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from time import monotonic, process_time, sleep

import pytest

from provisioners.port.base import InstanceState
from tests.clouds.kubernetes.kube_controller import OWNER
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.hollow import Node
from tests.kubernetes_real.spaces import Space, insist, listed
from tests.kubernetes_real.test_stories_nodes import Pair, is_lost

S = InstanceState
VARIABLE = "SKYSERVE_LONGEST"
pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"a quarter of an hour: set {VARIABLE}=1"),
]
PODS = 1000
IDLE_S = 20.0
SILENT_S = 600.0
AT_ONCE = 32


def timed(what: str, act: Callable[[], object]) -> None:
    began = monotonic()
    act()
    print(f"{PODS} Pods {what}: {monotonic() - began:.1f} s")


def test_a_thousand_pods(space: Space) -> None:
    """Their containers are not processes: the hollow kubelet says that they run."""
    space.add_nodes(
        *(Node(f"{space.name}-big-{at}", f"{space.name}-a", cpus=128, pods=110) for at in range(8))
    )
    kubelet = space.hollow.kubelet
    kubelet.on_paper.add(space.name)
    cloud = space.controller()
    first = space.order(cloud)
    orders = [replace(first, token=f"many-{number}", replica_id=number) for number in range(PODS)]
    cloud.listing(OWNER)

    def launch() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda order: insist(partial(cloud.launch, order)), orders))

    def all_run() -> bool:
        found = listed(cloud)
        return len(found) == PODS and {one.state for one in found.values()} == {S.RUNNING}

    def terminate() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda one: insist(partial(cloud.terminate, one)), listed(cloud).values()))

    timed("are launched", launch)
    timed("run", partial(until, all_run, "not all run", 300.0))
    timed("are listed", lambda: cloud.instances(OWNER))
    before = process_time()
    sleep(IDLE_S)
    print(f"watching for {IDLE_S:.0f} s, with the hollow kubelet: {process_time() - before:.2f} s of CPU")
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    timed("are terminated", terminate)
    timed("are gone", partial(space.await_nothing, 300.0))


def test_a_node_that_is_silent_for_ten_minutes(space: Space) -> None:
    """The other replica runs on, nothing of the lost one is left, and the node that is back takes Pods again."""
    pair = Pair(space)
    node = space.node_of("chat-1")
    space.hollow.silence(node)
    began = monotonic()
    until(lambda: pair.of("chat-1").preempt_at is not None, "no notice", 90.0)
    successor = pair.launch()
    until(lambda: is_lost(pair, "chat-1"), "it is not lost", 90.0)
    insist(lambda: pair.cloud.terminate(pair.of("chat-1")))
    until(lambda: pair.pods() == {"chat-2", successor}, "its Pod is left")
    print(f"replaced and removed after {monotonic() - began:.1f} s")
    before = {token: one.id for token, one in listed(pair.cloud).items() if not one.state.is_gone}
    while monotonic() - began < SILENT_S:
        states = {one.state for one in listed(pair.cloud).values() if not one.state.is_gone}
        assert states == {S.RUNNING}
        assert pair.pods() == {"chat-2", successor}
        sleep(5.0)
    assert {token: one.id for token, one in listed(pair.cloud).items() if not one.state.is_gone} == before
    space.hollow.revive(node)
    back = pair.launch(on=node)
    assert pair.pods() == {"chat-2", successor, back}
    pair.finish()
