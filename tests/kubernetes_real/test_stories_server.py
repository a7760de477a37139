"""What happens to a real API server while two replicas run: it stops, hangs, forgets, and refuses calls for their number."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import sleep

import pytest

from provisioners.kubernetes.api import ExpiredError, KubeApi, client_of
from provisioners.port.base import InstanceState
from provisioners.port.errors import AuthError, TransientError
from tests.clouds.kubernetes.kube_controller import OWNER
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.rights import ACCOUNT
from tests.kubernetes_real.spaces import Space, await_state, insist, listed
from tests.kubernetes_real.test_stories_nodes import Pair
from tests.kubernetes_real.wire import Wire

S = InstanceState
pytestmark = pytest.mark.timeout(420)
AWAY_S = 15.0
LEVEL = "skyserve-test"


def is_silent(pair: Pair) -> bool:
    try:
        return bool(pair.cloud.listing(OWNER).silent)
    except (AuthError, TransientError):
        return True  # none of the regions responds, or the server does not know its roles yet: it refuses everybody in its first moments


def test_a_server_that_stops_and_starts_costs_no_replica(space: Space) -> None:
    pair, plane = Pair(space), space.world.plane
    before = {token: one.id for token, one in listed(pair.cloud).items()}
    plane.server.stop()
    try:
        silent_s = until(lambda: is_silent(pair), "a server that is away is not reported")
        sleep(AWAY_S)
        assert {one.state for one in listed(pair.cloud).values()} == {S.RUNNING}
    finally:
        ready_s = plane.start_server()
    back_s = until(lambda: not is_silent(pair), "it is not followed again")
    print(
        f"silent after {silent_s:.1f} s; the server was ready after {ready_s:.1f} s, followed {back_s:.1f} s later"
    )
    assert {token: one.id for token, one in listed(pair.cloud).items()} == before
    assert {one.state for one in listed(pair.cloud).values()} == {S.RUNNING}
    space.evict("chat-1")
    await_state(pair.cloud, "chat-1", S.PREEMPTED)
    pair.replace("chat-1", "chat-2")
    pair.finish()


def test_a_server_that_hangs_costs_no_replica(space: Space) -> None:
    pair, plane = Pair(space), space.world.plane
    plane.server.hold()
    try:
        sleep(AWAY_S)
        assert {one.state for one in listed(pair.cloud).values()} == {S.RUNNING}
        assert {one.state for one in pair.cloud.listing(OWNER).instances} == {S.RUNNING}
    finally:
        plane.server.go_on()
    space.evict("chat-2")
    await_state(pair.cloud, "chat-2", S.PREEMPTED)
    pair.replace("chat-2", "chat-1")
    pair.finish()


def test_a_server_that_is_two_seconds_slow_costs_no_replica(space: Space) -> None:
    pair = Pair(space)
    space.relay.slow_s = 2.0
    space.evict("chat-1")
    await_state(pair.cloud, "chat-1", S.PREEMPTED)
    pair.replace("chat-1", "chat-2")
    assert not is_silent(pair)
    pair.finish()


def test_what_a_server_has_forgotten_is_listed_again(space: Space) -> None:
    """The controller is cut off while etcd is compacted and a Pod goes; the version that it knows has expired (410)."""
    pair, plane = Pair(space), space.world.plane
    api = KubeApi(space.name, None, lambda: client_of(space.name, str(space.kubeconfig)))
    version = api.list("pod").version
    space.relay.cut()
    until(lambda: is_silent(pair), "a server that is away is not reported")
    gone = {"gracePeriodSeconds": 0}
    space.api.delete("pods", space.name, "chat-1", gone)
    plane.compact()
    plane.server.stop()
    plane.start_server()
    space.relay.restore()
    with pytest.raises(ExpiredError):
        list(api.watch_pods(version))
    await_state(pair.cloud, "chat-1", S.PREEMPTED)
    until(lambda: not is_silent(pair), "it is not followed again")
    pair.replace("chat-1", "chat-2")
    pair.finish()


def test_priority_and_fairness(space: Space) -> None:
    """A server that refuses calls for their number (429): all is launched in the end, and once."""
    make_level(space)
    try:
        wire = Wire()
        cloud = space.controller(wire)
        orders = [space.order(cloud, f"chat-{number}", replica_id=number) for number in range(12)]
        with ThreadPoolExecutor(len(orders)) as pool:
            list(pool.map(lambda order: insist(lambda: cloud.launch(order)), orders))
        refused = wire.statuses().count(429)
        print(f"429: {refused} of {len(wire.calls)} calls")
        if refused == 0:
            pytest.skip("the server was too fast to refuse anything")
        cloud.listing(OWNER)
        for order in orders:
            await_state(cloud, order.token, S.RUNNING)
        assert space.ours() == {"pods": len(orders)}
        for one in insist(lambda: cloud.instances(OWNER)):
            insist(partial(cloud.terminate, one))
        space.await_nothing()
    finally:
        drop_level(space)


def make_level(space: Space) -> None:
    """One call at a time for our account, and none that waits."""
    group, limit = group_of(space)
    level = {"type": "Limited", "limited": {limit: 1, "limitResponse": {"type": "Reject"}}}
    rule = {
        "subjects": [
            {"kind": "ServiceAccount", "serviceAccount": {"name": ACCOUNT, "namespace": space.name}}
        ],
        "resourceRules": [
            {
                "verbs": ["*"],
                "apiGroups": ["*"],
                "resources": ["*"],
                "namespaces": ["*"],
                "clusterScope": True,
            }
        ],
    }
    schema = {"priorityLevelConfiguration": {"name": LEVEL}, "matchingPrecedence": 2, "rules": [rule]}
    for kind, spec in (("PriorityLevelConfiguration", level), ("FlowSchema", schema)):
        body = {"apiVersion": group, "kind": kind, "metadata": {"name": LEVEL}, "spec": spec}
        space.api.call("POST", f"apis/{group}/{kind.lower()}s", body)
    schemas = f"apis/{group}/flowschemas/{LEVEL}"

    def is_whole() -> bool:
        found = space.api.call("GET", schemas).get("status", {}).get("conditions") or []
        return any(one["type"] == "Dangling" and one["status"] == "False" for one in found)

    until(is_whole, "the flow schema is not in force")


def drop_level(space: Space) -> None:
    group, _ = group_of(space)
    for kind in ("flowschemas", "prioritylevelconfigurations"):
        space.api.call("DELETE", f"apis/{group}/{kind}/{LEVEL}")


def group_of(space: Space) -> tuple[str, str]:
    """Return the newest version of the API that the server has, and what it calls the limit."""
    name = "flowcontrol.apiserver.k8s.io"
    version = space.api.call("GET", f"apis/{name}")["preferredVersion"]["version"]
    is_old = version in ("v1alpha1", "v1beta1", "v1beta2")
    return f"{name}/{version}", "assuredConcurrencyShares" if is_old else "nominalConcurrencyShares"
