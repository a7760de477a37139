"""Load balancer agents as Deployments by the unmodified client: launched once, rolled out by readiness, gone with all that is theirs."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from policies.model import CapacityType, Offer, Role
from provisioners.kubernetes.agent_objects import ADMIN_PORT, RELEASE_NOTE, service_name
from provisioners.kubernetes.settings import Cluster
from provisioners.port.agents import AgentRelease, AgentSource
from provisioners.port.base import Candidate, Instance, InstanceState, LaunchOrder, Requirements
from provisioners.port.errors import RefusedError, TransientError
from tests.clouds.kubernetes.kube_controller import OWNER, PRICES, ZONE, Controller, controller, order_of
from tests.clouds.kubernetes.kube_deployments import is_ready
from tests.clouds.kubernetes.kube_store import Json, Refused
from tests.clouds.kubernetes.kube_world import NAMESPACE
from tests.clouds.kubernetes.kubelet import set_condition

S = InstanceState
CLUSTER = Cluster("prod", prices=PRICES, agent_image="agent:1")
OFFER = Offer(ZONE, "1cpu-1gb", None, 0.0, CapacityType.ON_DEMAND, 0.1)
FIRST = AgentRelease("one", ("--service", "chat", "--port", "8000"), (8000,))
SECOND = AgentRelease("two", ("--tls-certfile", "tls-cert.pem"), (8000,), {"tls-cert.pem": b"PEM"})


@pytest.fixture
def kube() -> Iterator[Controller]:
    with controller(cluster=CLUSTER) as made:
        yield made


def agent_order(name: str = "lb-1", **changes: object) -> LaunchOrder:
    plain = order_of(
        name, role=Role.LOAD_BALANCER, offer=OFFER, secrets={"SKYSERVE_LB_TOKEN": "s3cret"}, run="ignored"
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def objects(kube: Controller) -> dict[str, int]:
    store = kube.world.store
    kinds = ("deployments", "services", "secrets", "poddisruptionbudgets", "pods")
    return {kind: len(store.list(kind, NAMESPACE)) for kind in kinds}


def pods(kube: Controller) -> list[Json]:
    return kube.world.store.list("pods", NAMESPACE)


def make_ready(kube: Controller, pod: Json, *, on: bool = True) -> None:
    found = kube.world.store.get("pods", NAMESPACE, pod["metadata"]["name"])
    set_condition(found, "Ready", on, kube.clock[0])
    kube.world.store.update("pods", found)


def of_release(kube: Controller, name: str) -> list[Json]:
    return [one for one in pods(kube) if one["metadata"]["annotations"].get(RELEASE_NOTE) == name]


def see(kube: Controller) -> None:
    """What the watch of Pods would bring."""
    kube.advance(1.0)
    kube.cloud._regions["prod"].agent_cache.replace_pods(pods(kube))


def launched(kube: Controller, release: AgentRelease = FIRST) -> Instance:
    """An agent with its first Pod, which is ready."""
    instance = kube.cloud.launch(agent_order())
    kube.cloud.run_agent(instance, release)
    see(kube)
    (pod,) = pods(kube)
    make_ready(kube, pod)
    see(kube)
    return instance


def test_it_is_launched_once_and_has_the_address_of_its_service(kube: Controller) -> None:
    assert isinstance(kube.cloud, AgentSource)
    order = agent_order()
    first = kube.cloud.launch(order)
    assert (first.state, first.endpoint) == (S.RUNNING, "http://10.0.0.10:8000")
    assert kube.cloud.launch(order) == first
    kube.restart()
    assert kube.cloud.launch(order) == first
    assert kube.listed() == {"lb-1": first}
    assert objects(kube) == {
        "deployments": 1,
        "services": 1,
        "secrets": 1,
        "poddisruptionbudgets": 1,
        "pods": 0,
    }
    secret = kube.world.store.get("secrets", NAMESPACE, "lb-1-admin")
    assert base64.b64decode(secret["data"]["admin-token"]) == b"s3cret"
    assert "s3cret" not in str(kube.world.store.list("deployments", NAMESPACE))


@pytest.mark.parametrize("after", [False, True])
def test_a_controller_that_dies_anywhere_in_a_launch_leaves_what_the_next_one_completes(after: bool) -> None:
    for number in range(6):
        with controller(cluster=CLUSTER) as kube:
            kube.world.troubles.crash = (number, after)
            with suppress(TransientError):
                kube.cloud.launch(agent_order())
            kube.restart()
            found = kube.listed().get("lb-1")
            assert found is None or found.state in (S.UNSUPERVISED, S.RUNNING)
            made = kube.insist(lambda kube=kube: kube.cloud.launch(agent_order()))
            assert (made.state, objects(kube)["services"], objects(kube)["deployments"]) == (S.RUNNING, 1, 1)


def test_a_release_gives_it_one_pod_and_the_same_release_changes_nothing(kube: Controller) -> None:
    instance = launched(kube)
    (pod,) = pods(kube)
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert container["command"][:7] == ["python", "-m", "lb", "--service", "chat", "--port", "8000"]
    assert "s3cret" not in str(pod)
    assert container["readinessProbe"]["httpGet"] == {"path": "/-/ready?table=1", "port": ADMIN_PORT}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    before = dict(kube.world.counts)
    (process,) = kube.cloud.run_agent(instance, FIRST)
    assert (process.release, process.admin, process.is_leaving) == (
        "one",
        f"http://10.0.0.1:{ADMIN_PORT}",
        False,
    )
    assert kube.world.counts == before


def test_a_new_release_takes_over_when_it_is_ready_and_not_before(kube: Controller) -> None:
    instance = launched(kube)
    kube.cloud.run_agent(instance, SECOND)
    see(kube)
    assert [one.release for one in kube.cloud.run_agent(instance, SECOND)] == ["one", "two"]
    for _ in range(5):
        see(kube)
        assert [is_ready(one) for one in of_release(kube, "one")] == [True]
    (new,) = of_release(kube, "two")
    assert new["spec"]["containers"][0]["command"][3:5] == [
        "--tls-certfile",
        "/run/skyserve/files/tls-cert.pem",
    ]
    make_ready(kube, new)
    see(kube)
    assert [one["metadata"].get("deletionTimestamp") is not None for one in of_release(kube, "one")] == [True]
    processes = kube.cloud.run_agent(instance, SECOND)
    assert [(one.release, one.is_leaving) for one in processes] == [("one", True), ("two", False)]
    kube.advance(200.0)
    see(kube)
    assert [one.release for one in kube.cloud.run_agent(instance, SECOND)] == ["two"]


def test_a_pod_on_a_cordoned_node_moves_although_the_budget_lets_none_be_evicted(kube: Controller) -> None:
    kube.world.add_node("other", ZONE.name)
    instance = launched(kube)
    kube.cloud.listing(OWNER)
    (pod,) = pods(kube)
    with pytest.raises(Refused, match="disruption budget"):
        kube.world.evict(pod["metadata"]["name"])
    node = pod["spec"]["nodeName"]
    kube.world.cordon(node)
    kube.cloud._regions["prod"].take_nodes(kube.world.store.list("nodes", None))
    for _ in range(3):
        kube.cloud.run_agent(instance, FIRST)
        see(kube)
    (new,) = [one for one in pods(kube) if one["metadata"]["uid"] != pod["metadata"]["uid"]]
    assert new["spec"]["nodeName"] != node
    assert is_ready(kube.world.store.get("pods", NAMESPACE, pod["metadata"]["name"]))
    make_ready(kube, new)
    kube.advance(1.0)
    kube.advance(200.0)
    see(kube)
    kube.cloud.run_agent(instance, FIRST)
    see(kube)
    assert [one["metadata"]["uid"] for one in pods(kube)] == [new["metadata"]["uid"]]  # and it stays there


def test_terminated_it_leaves_nothing_and_is_not_launched_again(kube: Controller) -> None:
    instance = launched(kube, SECOND)
    kube.cloud.terminate(instance)
    kube.cloud.terminate(instance)
    assert kube.listed()["lb-1"].state is S.STOPPING
    assert kube.cloud.launch(agent_order()).state is S.STOPPING
    kube.advance(1.0)
    assert objects(kube)["pods"] == 1  # it drains
    kube.advance(200.0)
    kube.advance(1.0)
    assert set(objects(kube).values()) == {0}
    assert kube.listed()["lb-1"].state is S.TERMINATED
    assert kube.cloud.launch(agent_order()).state is S.TERMINATED
    assert set(objects(kube).values()) == {0}
    kube.cloud.terminate(instance)


def test_another_controller_terminates_it_by_its_id_before_its_watch_has_brought_it(kube: Controller) -> None:
    instance = launched(kube)
    kube.restart()
    kube.cloud.terminate(replace(instance, state=S.STOPPING, endpoint=None))
    for _ in range(3):
        kube.advance(200.0)
    assert set(objects(kube).values()) == {0}


def test_one_that_someone_else_deletes_is_preempted(kube: Controller) -> None:
    launched(kube)
    assert kube.listed()["lb-1"].state is S.RUNNING
    kube.world.delete("deployments", NAMESPACE, "lb-1", {})
    assert kube.listed()["lb-1"].state is S.PREEMPTED
    for _ in range(3):
        kube.advance(200.0)
    assert set(objects(kube).values()) == {0}


def test_agents_are_no_replicas_and_of_their_owner(kube: Controller) -> None:
    launched(kube)
    kube.cloud.launch(order_of("chat-1"))
    assert sorted(kube.listed()) == ["chat-1", "lb-1"]
    assert kube.insist(lambda: kube.cloud.instances("someone-else")) == []
    kube.cloud.terminate(kube.listed()["chat-1"])
    kube.advance(200.0)
    assert kube.listed()["lb-1"].state is S.RUNNING


def test_what_is_not_ours_is_left_alone(kube: Controller) -> None:
    kube.cloud.launch(agent_order(owner="someone-else"))
    kube.restart()
    with pytest.raises(RefusedError, match="not ours"):
        kube.cloud.launch(agent_order())


def test_a_first_pod_without_a_node_is_a_lack_of_room_and_a_later_one_is_waited_for(kube: Controller) -> None:
    for node in ("fixed", "fixed-gpu"):
        kube.world.cordon(node)
    instance = kube.cloud.launch(agent_order())
    kube.cloud.run_agent(instance, FIRST)
    see(kube)
    kube.advance(60.0)
    found = kube.listed()["lb-1"]
    assert (found.state, found.refusal is not None) == (S.BROKEN, True)
    kube.world.cordon("fixed", on=False)
    see(kube)
    (pod,) = pods(kube)
    make_ready(kube, pod)
    see(kube)
    assert kube.listed()["lb-1"].state is S.RUNNING
    kube.world.cordon("fixed")
    kube.world.lose(pod["metadata"]["name"])
    see(kube)
    kube.advance(60.0)
    assert kube.listed()["lb-1"].state is S.RUNNING
    (process,) = kube.cloud.run_agent(instance, FIRST)
    assert (process.admin, "nodes are available" in process.trouble) == (None, True)


def test_a_service_of_a_vendors_load_balancer_has_its_address_when_it_comes() -> None:
    cluster = replace(CLUSTER, service_type="LoadBalancer", service_annotations={"a/b": "c"})
    with controller(cluster=cluster) as kube:
        assert kube.cloud.launch(agent_order(port=80, has_peers=True)).state is S.SETUP
        name = service_name("lb-1")
        service = kube.world.store.get("services", NAMESPACE, name)
        assert service["metadata"]["annotations"] == {"a/b": "c"}
        ports = [(one["port"], one["targetPort"]) for one in service["spec"]["ports"]]
        assert ports == [(80, 8080), (523, 8523)]
        service["status"] = {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}]}}
        kube.world.store.update("services", service)
        found = kube.listed()["lb-1"]
        assert (found.state, found.endpoint) == (S.RUNNING, "http://192.0.2.7:80")


def test_without_an_image_there_are_no_agents() -> None:
    need = Requirements((Candidate("kubernetes", "prod"),), ordered=True, role=Role.LOAD_BALANCER)
    with controller() as kube:
        assert kube.cloud.offers(need) == []
        with pytest.raises(RefusedError, match=r"clouds\.kubernetes\.agent_image"):
            kube.cloud.launch(agent_order())
    with controller(cluster=CLUSTER) as kube:
        (offer,) = kube.cloud.offers(need)
        assert (offer.instance_type, offer.price_usd_hour) == ("1cpu-1gb", 0.1)


def test_on_a_silent_node_it_is_terminated_with_all_that_is_its(kube: Controller) -> None:
    agent = launched(kube)
    (pod,) = pods(kube)
    kube.world.nodes.silence(pod["spec"]["nodeName"])
    region = kube.cloud._regions["prod"]
    for _ in range(9):  # the controller terminates what it still sees every few seconds
        kube.advance(10.0)
        region.take_nodes(region.api.list_nodes().items)
        see(kube)
        if kube.clock[0] > 1_800_000_050.0:
            kube.cloud.terminate(agent)
    kube.advance(1.0)
    assert set(objects(kube).values()) == {0}
