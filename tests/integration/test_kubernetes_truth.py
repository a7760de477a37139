"""What is true of a Pod: nodes that fall silent, sidecars, queues, registries, and the clocks of three machines. Time is virtual.

Lists are taken when a test looks, so that each look shows what is so at that second."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from policies.model import FailureKind
from provisioners.kubernetes.api import KubeApi
from provisioners.kubernetes.quantities import unix_s
from provisioners.kubernetes.settings import Cluster
from provisioners.port.base import Instance, InstanceState
from provisioners.port.errors import CapacityError, TransientError
from tests.clouds.kubernetes import kube_sidecars
from tests.clouds.kubernetes.kube_controller import OWNER, PRICES, Controller, controller, order_of
from tests.clouds.kubernetes.kube_sidecars import CASES
from tests.clouds.kubernetes.kube_store import Json
from tests.clouds.kubernetes.kube_world import NAMESPACE

S = InstanceState


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Controller]:
    """Containers are processes."""
    with controller(tmp_path) as made:
        yield made


@pytest.fixture
def paper() -> Iterator[Controller]:
    """Every Pod runs as soon as it is placed."""
    with controller() as made:
        yield made


def look(kube: Controller, name: str = "chat-1") -> Instance:
    """Return the instance by lists of nodes and Pods that are taken now."""
    region = kube.cloud._regions["prod"]
    region.take_nodes(region.api.list_nodes().items)
    return next(one for one in kube.cloud.instances(OWNER) if one.token == name)


def after(kube: Controller, holds: Callable[[Instance], bool], most_s: int = 400) -> int:
    """Return after how many seconds that holds of the instance; one look a second."""
    for passed_s in range(most_s):
        if holds(look(kube)):
            return passed_s
        kube.advance(1.0)
    raise AssertionError(look(kube))


def reaches(kube: Controller, state: InstanceState, name: str = "chat-1") -> bool:
    return passes(kube, lambda: look(kube, name).state is state)


def passes(kube: Controller, holds: Callable[[], bool]) -> bool:
    """Containers are processes: what they do takes time of this machine."""
    deadline = monotonic() + 60.0
    while monotonic() < deadline:
        if holds():
            return True
        kube.advance(0.1)
        sleep(0.02)
    return False


def left(kube: Controller) -> list[str]:
    return [
        one["metadata"]["name"] for kind in ("pods", "secrets") for one in kube.world.store.list(kind, None)
    ]


# --- nodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_disruptions", [True, False], ids=["since 1.26", "before"])
def test_a_silent_node_gives_its_notice_at_once_and_its_pods_are_removed_by_force(
    paper: Controller, has_disruptions: bool
) -> None:
    paper.world.has_disruptions = has_disruptions
    launched = paper.cloud.launch(order_of(secrets={"A": "b"}))
    paper.world.nodes.silence("fixed")
    noticed_s = after(paper, lambda one: one.preempt_at is not None)
    assert noticed_s == paper.world.nodes.monitor_grace_s + 6  # a successor starts now, within 50 s
    warned = look(paper)
    assert (warned.state, warned.preempt_at) == (S.RUNNING, paper.clock[0] + 24)
    assert after(paper, lambda one: one.state is S.BROKEN) == 24
    assert "its node fixed has stopped responding" in look(paper).message
    assert look(paper).endpoint is None
    paper.advance(3600.0)
    assert left(paper) == ["chat-1", "chat-1-env"]  # Terminating for as long as the Node object exists
    paper.cloud.terminate(launched)
    paper.advance(1.0)
    assert left(paper) == []
    assert look(paper).state is S.TERMINATED


def test_a_node_that_is_back_in_time_has_no_notice_any_more(paper: Controller) -> None:
    paper.cloud.launch(order_of())
    paper.world.nodes.silence("fixed")
    after(paper, lambda one: one.preempt_at is not None)
    paper.advance(20.0)
    paper.world.nodes.revive("fixed")
    paper.advance(1.0)
    assert look(paper).preempt_at is None
    paper.advance(600.0)
    assert look(paper).state is S.RUNNING


def test_a_node_that_is_not_ready_for_a_moment_gives_no_notice(paper: Controller) -> None:
    paper.cloud.launch(order_of())
    look(paper)
    paper.world.nodes.report("fixed", "False", "KubeletNotReady")
    for _ in range(9):
        assert look(paper).preempt_at is None
        paper.advance(1.0)
    paper.world.nodes.report("fixed", "True", "KubeletReady")
    paper.advance(600.0)
    assert (look(paper).state, look(paper).preempt_at) == (S.RUNNING, None)
    paper.world.nodes.report("fixed", "False", "KubeletNotReady")
    assert after(paper, lambda one: one.preempt_at is not None) == 10


def test_what_is_terminated_while_its_node_falls_silent_is_removed_in_the_end(paper: Controller) -> None:
    """The controller terminates what it still sees and does not own every few seconds."""
    launched = paper.cloud.launch(order_of(secrets={"A": "b"}))
    paper.world.nodes.silence("fixed")
    after(paper, lambda one: one.preempt_at is not None)
    for passed_s in range(6, 60, 10):
        look(paper)
        paper.cloud.terminate(launched)
        assert look(paper).state.is_gone == (passed_s >= 30)
        paper.advance(10.0)
    assert left(paper) == []


def test_a_cluster_that_hears_none_of_its_nodes_costs_no_replica_and_down_still_ends(
    paper: Controller,
) -> None:
    launched = paper.cloud.launch(order_of())
    for name in ("fixed", "spot", "fixed-gpu", "spot-gpu"):
        paper.world.nodes.silence(name)
    for _ in range(60):
        paper.advance(10.0)
        assert (look(paper).state, look(paper).preempt_at) == (S.RUNNING, None)
    for _ in range(5):
        look(paper)
        paper.cloud.terminate(launched)
        paper.advance(10.0)
    assert left(paper) == []


def test_a_pod_of_a_node_that_responds_is_never_removed_by_force(paper: Controller) -> None:
    launched = paper.cloud.launch(order_of())
    forced: list[Any] = []
    delete = paper.world.delete

    def spied(resource: str, namespace: str, name: str, options: Json) -> Json:
        forced.append(options.get("gracePeriodSeconds"))
        return delete(resource, namespace, name, options)

    paper.world.delete = spied  # type: ignore[method-assign]
    for _ in range(12):
        look(paper)
        paper.cloud.terminate(launched)
        paper.clock[0] += 10.0  # and its kubelet does not come to it
    assert set(forced) == {None}


def test_a_node_object_that_is_deleted_gives_a_notice_before_the_cluster_removes_its_pods(
    paper: Controller,
) -> None:
    paper.cloud.launch(order_of())
    look(paper)
    paper.world.nodes.remove("fixed")
    look(paper)
    assert after(paper, lambda one: one.preempt_at is not None) == 10
    assert after(paper, lambda one: one.state is S.BROKEN) == 20
    assert after(paper, lambda one: one.state.is_gone) <= 30


def test_gpus_of_a_silent_node_are_not_offered(paper: Controller) -> None:
    region = paper.cloud._regions["prod"]
    before = {shape.node_type for shape in region.shapes()}
    assert "g6.8xlarge" in before
    for name in ("fixed-gpu", "spot-gpu"):
        paper.world.nodes.silence(name)
    paper.advance(40.0)
    assert "g6.8xlarge" not in {shape.node_type for shape in region.shapes()}


def test_a_zone_whose_nodes_are_silent_is_refused_at_once(paper: Controller) -> None:
    """Offers are minutes old, and the scheduler would be waited for."""
    for name in ("fixed", "fixed-gpu"):
        paper.world.nodes.silence(name)
    paper.advance(40.0)
    began = paper.clock[0]
    with pytest.raises(CapacityError, match="no node that is ready"):
        paper.cloud.launch(order_of())
    assert paper.clock[0] == began
    assert paper.world.pod_names() == []
    paper.world.nodes.revive("fixed")
    region = paper.cloud._regions["prod"]
    region.take_nodes(region.api.list_nodes().items)
    assert paper.cloud.launch(order_of()).state is S.RUNNING


# --- sidecars, queues, registries, events -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "native", [pytest.param(False, id="injected", marks=pytest.mark.long), pytest.param(True, id="native")]
)
def test_the_end_of_our_container_is_seen_beside_a_sidecar(
    kube: Controller, native: bool, tmp_path: Path
) -> None:
    kube.world.admit = partial(kube_sidecars.inject, folder=tmp_path, native=native)  # type: ignore[method-assign]

    def has_ended(token: str) -> bool:
        return kube_sidecars.ended(kube.world.store.get("pods", NAMESPACE, token))

    def done(holds: Callable[[], bool]) -> None:
        assert passes(kube, holds)

    for case in CASES:
        kube.cloud.launch(order_of(case.token, **case.changes(tmp_path)))
    kube_sidecars.play(
        CASES,
        tmp_path,
        partial(look, kube),
        lambda token, state: done(lambda: look(kube, token).state is state),
        has_ended,
        done,
    )
    for case in CASES:
        kube.cloud.terminate(look(kube, case.token))
        assert reaches(kube, S.TERMINATED, case.token)


@pytest.mark.parametrize("native", [False, True], ids=["injected", "native"])
def test_a_setup_that_fails_is_seen_beside_a_sidecar(kube: Controller, native: bool, tmp_path: Path) -> None:
    kube.world.admit = partial(kube_sidecars.inject, folder=tmp_path, native=native)  # type: ignore[method-assign]
    kube.cloud.launch(order_of(setup="exit 3"))
    assert reaches(kube, S.SETUP_FAILED)
    assert look(kube).message.startswith("setup failed: it exited with code 3")


def test_a_pod_that_a_queue_holds_back_says_so_and_starts_when_it_is_admitted(paper: Controller) -> None:
    def admit(pod: Json) -> None:
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
        pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team-a"

    paper.world.admit = admit
    began = paper.clock[0]
    launched = paper.cloud.launch(order_of())
    assert paper.clock[0] == began  # the launch does not wait for the scheduler
    assert (launched.state, "the queue team-a" in launched.message) == (S.PENDING, True)
    paper.advance(3600.0)
    assert look(paper).state is S.PENDING
    paper.world.open_gates("chat-1")
    assert look(paper).state is S.RUNNING


def test_a_registry_that_limits_the_rate_is_waited_for(kube: Controller) -> None:
    assert kube.world.kubelet is not None
    registries = kube.world.kubelet.busy_registries
    registries["python:3.12-slim"] = "429 Too Many Requests - toomanyrequests: pull rate limit"
    kube.cloud.launch(order_of())
    kube.advance(1.0)
    assert "toomanyrequests" in look(kube).message
    kube.advance(1800.0)
    assert look(kube).state is S.SETUP
    registries.clear()
    assert reaches(kube, S.RUNNING)


def test_a_node_that_cannot_make_a_sandbox_says_so_and_is_given_up(kube: Controller) -> None:
    assert kube.world.kubelet is not None
    kube.world.kubelet.without_network.add("fixed")
    kube.cloud.launch(order_of())
    events = kube.cloud._regions["prod"].events
    for _ in range(29):
        kube.advance(1.0)
        look(kube)
        events.visit()
    assert "list events" not in kube.world.counts
    kube.advance(2.0)
    events.visit()
    assert look(kube).message.startswith("FailedCreatePodSandBox: Failed to create pod sandbox")
    for _ in range(18):
        kube.advance(10.0)
        look(kube)
        events.visit()
    found = look(kube)
    assert (found.state, found.refusal.kind if found.refusal else None) == (S.BROKEN, FailureKind.CAPACITY)
    assert kube.world.counts["list events"] <= 5  # one a minute


def test_without_the_right_to_events_nothing_else_changes(
    kube: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    assert kube.world.kubelet is not None
    kube.world.kubelet.without_network.add("fixed")
    kube.world.troubles.denied = {("list", "events")}
    kube.cloud.launch(order_of())
    for _ in range(30):
        kube.advance(10.0)
        look(kube)
        kube.cloud._regions["prod"].events.visit()
    assert (look(kube).state, look(kube).message) == (S.SETUP, "")
    assert caplog.text.count('cannot list resource "events"') == 1


def own_events(paper: Controller) -> list[tuple[str, str]]:
    """Return reason and sentence of the events of ours, after a visit."""
    look(paper)
    paper.cloud._regions["prod"].own_events.visit(OWNER)
    found = paper.world.store.list("events", NAMESPACE)
    return [(one["reason"], one["message"]) for one in found if one["source"]["component"] == "skyserve"]


def test_what_becomes_of_a_pod_is_an_event_of_it_once(paper: Controller) -> None:
    launched = paper.cloud.launch(order_of())
    assert own_events(paper) == []
    paper.world.taint("fixed", "ToBeDeletedByClusterAutoscaler")
    notice = ("PreemptionNotice", "it will be gone in 30 s: no new requests are sent to it")
    assert own_events(paper) == [notice]
    paper.advance(10.0)
    paper.restart()
    assert own_events(paper) == [notice]  # another process finds it there
    paper.cloud.terminate(launched)
    assert own_events(paper) == [notice, ("Terminated", f"by skyserve, after: {notice[1]}")]
    assert own_events(paper) == own_events(paper)
    (event, _) = paper.world.store.list("events", NAMESPACE)
    assert event["involvedObject"]["uid"] == launched.id


def test_without_the_right_to_write_events_they_are_tried_every_ten_minutes(paper: Controller) -> None:
    paper.world.troubles.denied = {("create", "events")}
    launched = paper.cloud.launch(order_of())
    paper.world.taint("fixed", "ToBeDeletedByClusterAutoscaler")
    for _ in range(65):
        assert own_events(paper) == []
        paper.advance(10.0)
    assert paper.world.counts["create events"] == 2
    paper.world.troubles.denied = set()
    paper.cloud.terminate(launched)
    assert own_events(paper) == []


# --- the API ----------------------------------------------------------------------------------------------------


def test_a_change_of_another_object_of_that_name_is_none(paper: Controller) -> None:
    paper.cloud.launch(order_of())
    api = KubeApi("prod", None, lambda: paper._client(None, None))
    body = {"metadata": {"uid": "another", "annotations": {"a": "b"}}}
    assert api.patch("pod", "chat-1", body) is None
    assert api.delete("pod", "chat-1", "another") is None
    assert paper.world.pod_names() == ["chat-1"]


def test_a_pod_is_changed_once_more_before_it_is_gone(kube: Controller) -> None:
    """A watch sees its grace period become 0, which is no new deletion."""
    launched = kube.cloud.launch(order_of())
    assert reaches(kube, S.RUNNING)
    kube.cloud.terminate(launched)
    assert reaches(kube, S.TERMINATED)
    changes = [one for one in kube.world.store.changes if one.resource == "pods"]
    graces = [one.item["metadata"].get("deletionGracePeriodSeconds") for one in changes]
    assert [one.kind for one in changes[-2:]] == ["MODIFIED", "DELETED"]
    assert graces[-2:] == [0, 0]
    assert 30 in graces


def test_a_connection_that_ends_in_its_handshake_is_a_server_that_does_not_respond(
    paper: Controller,
) -> None:
    client = paper._client(None, None)[0]

    def request(*_given: Any, **_more: Any) -> Any:
        raise ApiException(status=0, reason="SSLError\n[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred")

    client.rest_client.request = request
    api = KubeApi("prod", None, lambda: (client, NAMESPACE))
    with pytest.raises(TransientError, match=r"the cluster prod does not respond: SSLError \[SSL: UNEXP"):
        api.list("pod")
    with pytest.raises(TransientError, match="does not respond"):
        next(api.watch_pods("1"))


# --- clocks -----------------------------------------------------------------------------------------------------


def life_of(paper: Controller) -> list[Any]:
    """Return what a controller decides, second by second, in a cluster where everything happens that has a deadline."""
    decided: list[Any] = []

    def note(name: str = "chat-1") -> None:
        one = look(paper, name)
        left_s = None if one.preempt_at is None else one.preempt_at - paper.clock[0] - paper.skew_s
        decided.append((name, one.state, one.message, one.refusal, left_s))

    paper.cloud.launch(order_of("chat-1"))
    paper.world.evict("chat-1")
    for _ in range(4):
        note()
        paper.advance(10.0)
    paper.cloud.launch(order_of("chat-2"))
    paper.world.taint("fixed", "ToBeDeletedByClusterAutoscaler")
    for _ in range(2):
        note("chat-2")
        paper.advance(5.0)
    paper.world.set_pods("fixed", 1)
    paper.world.set_pods("fixed-gpu", 0)
    began = paper.clock[0]
    with pytest.raises(CapacityError):
        paper.cloud.launch(order_of("chat-3"))
    decided.append(paper.clock[0] - began)
    paper.world.nodes.silence("fixed")
    for _ in range(10):
        note("chat-2")
        paper.advance(10.0)
    return decided


SKEWS = [
    each for each in itertools.product((0.0, 60.0, -60.0), repeat=3) if 0.0 in each or len(set(each)) == 1
]


def test_clocks_that_differ_by_a_minute_change_no_decision() -> None:
    lives = []
    for api_s, node_s, own_s in ((0.0, 0.0, 0.0), *SKEWS):
        with controller(strict=False, cluster=Cluster("prod", prices=PRICES)) as paper:
            paper.world.store.skews |= {"api": api_s, "node": node_s, "control": -node_s}
            paper.skew_s = own_s
            paper.restart()
            lives.append(life_of(paper))
    states = {(token, state) for token, state, *_ in (one for one in lives[0] if isinstance(one, tuple))}
    assert states >= {
        ("chat-1", S.RUNNING),
        ("chat-1", S.PREEMPTED),
        ("chat-2", S.RUNNING),
        ("chat-2", S.BROKEN),
    }
    for life in lives[1:]:
        assert life == lives[0]


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
def test_the_lease_of_pods_has_the_time_of_the_api_server(ahead_s: float) -> None:
    cluster = Cluster("prod", prices=PRICES, reaper_account="skyserve-reaper", dead_man_s=3600)
    with controller(cluster=cluster) as paper:
        paper.skew_s, paper.world.store.skews["api"] = ahead_s, 120.0
        paper.cloud.listing(OWNER)
        renewed = paper.world.store.get("leases", "ml", "skyserve-owner-1")["spec"]["renewTime"]
        assert unix_s(renewed) == pytest.approx(paper.clock[0] + 120.0, abs=2.0)
