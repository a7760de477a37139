"""Replicas as Pods by the unmodified client: what their containers do, what the watch brings, and what is said of failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from policies.model import CapacityType, FailureKind, Offer, Role
from provisioners.kubernetes.check import needed
from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.kubernetes.settings import Cluster
from provisioners.port.agents import AgentRelease
from provisioners.port.base import (
    Cache,
    Candidate,
    InstanceState,
    LogSource,
    Provisioner,
    RegionalSource,
    ReportSource,
    Requirements,
)
from provisioners.port.errors import AuthError, CapacityError, QuotaError, RefusedError, TransientError
from provisioners.port.vm import Checked, Level
from tests.clouds.kubernetes.kube_controller import OWNER, PRICES, ZONE, Controller, controller, order_of
from tests.clouds.kubernetes.kube_schemas import check
from tests.clouds.kubernetes.kube_store import POD_NET
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


def until(holds: Callable[[], bool], pass_time: Callable[[], object] = lambda: None) -> bool:
    deadline = monotonic() + 60.0
    while monotonic() < deadline:
        if holds():
            return True
        pass_time()
        sleep(0.01)
    return False


def reaches(kube: Controller, token: str, state: InstanceState) -> bool:
    return until(lambda: kube.listed()[token].state is state, lambda: kube.advance(1.0))


KEPT = """
echo "found: $(cat "$HF_HOME/weights" 2>/dev/null)"; echo of-$SKYSERVE_REPLICA_ID >"$HF_HOME/weights"; echo wrote; exec sleep 1000
"""


@pytest.mark.parametrize("claim", [None, "weights"])
def test_a_successor_on_the_node_finds_the_weights_and_another_service_does_not(
    kube: Controller, claim: str | None
) -> None:
    def start(name: str, replica_id: int, service: str = "chat") -> str:
        cache = Cache(f"{OWNER}/-/{service}", ("HF_HOME",), claim)
        kube.cloud.launch(order_of(name, run=KEPT, replica_id=replica_id, service=service, cache=cache))
        assert reaches(kube, name, S.RUNNING)
        log = ""

        def has_written() -> bool:
            nonlocal log
            log = kube.cloud.read_log(kube.listed()[name], 0, 10_000).decode()
            return "wrote" in log

        assert until(has_written, lambda: kube.advance(1.0))
        return log

    first = start("chat-1", 1)
    assert "hf_home is empty" in first
    assert "found: \n" in first
    kube.cloud.terminate(kube.listed()["chat-1"])
    assert until(lambda: not kube.world.pod_names(), lambda: kube.advance(1.0))
    second = start("chat-2", 2)
    assert "of earlier replicas" in second
    assert "found: of-1\n" in second
    assert "found: \n" in start("other-1", 3, "other")


def test_a_successor_prefers_the_node_that_its_predecessor_has_left(paper: Controller) -> None:
    def launch(number: int, **changes: object) -> str:
        cache = Cache(f"{OWNER}/-/chat", ("HF_HOME",))
        paper.cloud.launch(order_of(f"chat-{number}", replica_id=number, **{"cache": cache, **changes}))
        pod = paper.world.store.get("pods", NAMESPACE, f"chat-{number}")
        check(pod)
        return str(pod["spec"]["nodeName"])

    paper.world.add_node("later", ZONE.name)
    paper.world.cordon("fixed")
    assert launch(1) == "later"
    paper.world.cordon("fixed", on=False)
    assert launch(2) == "fixed", "the other one stays where it is"
    for number in (1, 2):
        paper.cloud.terminate(paper.listed()[f"chat-{number}"])
    assert until(lambda: not paper.world.pod_names(), lambda: paper.advance(1.0))
    assert launch(3, cache=None) == "fixed"
    assert launch(4) == "later", "which is the one that nobody uses"
    assert launch(5, service="other") == "fixed"


def test_it_is_everything_that_a_provisioner_can_be(paper: Controller) -> None:
    for interface in (Provisioner, RegionalSource, ReportSource, LogSource, Checked):
        if interface is not Provisioner:
            assert isinstance(paper.cloud, interface)


# --- containers -----------------------------------------------------------------------------------------------


def test_setup_and_run_have_their_files_variables_and_secrets(kube: Controller, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "hello.txt").write_text("from the work directory")
    (tmp_path / "one.txt").write_text("mounted")
    order = order_of(
        setup="echo setting up; cat hello.txt; echo; cat mounted/one.txt; echo",
        run='echo "$GREETING $SECRET $$-is-a-pid ${#SKYPILOT_NODE_IPS}" | sed "s/[0-9]*-is-a-pid/pid/"; exec sleep 1000',
        workdir=str(work),
        file_mounts={"mounted/one.txt": str(tmp_path / "one.txt")},
        env={"GREETING": "hello $(not a command)"},
        secrets={"SECRET": "s3cret"},
    )
    kube.cloud.launch(order)
    assert reaches(kube, order.token, S.RUNNING)
    instance = kube.listed()[order.token]
    assert until(lambda: b"s3cret" in kube.cloud.read_log(instance, 0, 10_000), lambda: kube.advance(1.0))
    assert kube.cloud.read_log(instance, 0, 10_000).decode().splitlines() == [
        "setting up",
        "from the work directory",
        "mounted",
        f"hello $(not a command) s3cret pid {len(POD_NET) + 4}",
    ]
    assert kube.cloud.read_log(instance, 8, 2) == b"up"
    first, end = kube.cloud.log_window(instance)
    assert (first, kube.cloud.read_log(instance, end, 100)) == (0, b"")
    assert kube.cloud.log_times(instance, 0.0, 0, 10).endswith(b"\n")
    kube.cloud.terminate(instance)
    assert reaches(kube, order.token, S.TERMINATED)
    assert kube.world.store.list("secrets", None) == []


@pytest.mark.parametrize(
    ("changes", "state", "message"),
    [
        ({"setup": "exit 3"}, S.SETUP_FAILED, "setup failed: it exited with code 3 (exit code 3)"),
        ({"run": "exit 4"}, S.RUN_EXITED, "run exited with code 4"),
        (
            {"run": "true"},
            S.RUN_EXITED,
            "run exited with code 0: it must run for as long as the replica is to serve",
        ),
        ({"image": "docker:no/such:1"}, S.SETUP_FAILED, "ImagePullBackOff: Back-off pulling image"),
    ],
    ids=["setup", "run", "run ends", "image"],
)
def test_why_it_ended(kube: Controller, changes: dict[str, str], state: InstanceState, message: str) -> None:
    kube.world.kubelet.bad_images.add("no/such:1")  # type: ignore[union-attr]
    order = order_of(**changes)
    kube.cloud.launch(order)
    assert reaches(kube, order.token, state)
    assert kube.listed()[order.token].message.startswith(message)
    kube.cloud.terminate(kube.listed()[order.token])
    assert reaches(kube, order.token, S.TERMINATED)


@pytest.mark.long
def test_the_nodes_of_a_replica_find_each_other_and_run_together(kube: Controller) -> None:
    report = 'echo "rank $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES: $(echo "$SKYPILOT_NODE_IPS" | wc -l) addresses"'
    order = order_of(
        setup=f"{report}; sleep $SKYPILOT_NODE_RANK", run="echo runs; exec sleep 1000", num_nodes=2
    )
    kube.cloud.launch(order)
    assert reaches(kube, order.token, S.RUNNING)
    instance = kube.listed()[order.token]
    for rank in (0, 1):
        text = f"rank {rank} of 2: 2 addresses\nruns\n".encode()
        assert until(
            lambda rank=rank, text=text: kube.cloud.read_log(instance, 0, 99, rank) == text,
            lambda: kube.advance(1.0),
        )
    assert kube.cloud.read_log(instance, 0, 99, 2) == b""


# --- the watch ------------------------------------------------------------------------------------------------


def test_the_tick_reads_what_one_watch_has_brought_and_calls_nothing(paper: Controller) -> None:
    order = order_of()
    paper.cloud.launch(order)
    assert [one.token for one in paper.cloud.listing(OWNER).instances] == [order.token]
    assert until(lambda: {"watch pods", "watch nodes"} <= paper.world.counts.keys())
    before = dict(paper.world.counts)
    for _ in range(50):
        paper.cloud.listing(OWNER)
        paper.cloud.reported(OWNER)
    assert paper.world.counts == before
    assert before["watch pods"] == before["list pods"] == 1


def test_a_watch_goes_on_where_it_was_and_lists_again_only_when_its_version_is_gone(
    paper: Controller,
) -> None:
    paper.cloud.launch(order_of("chat-1"))
    paper.cloud.listing(OWNER)
    paper.world.store.expire()  # bookmarks have moved it along, or it gets 410 and lists again
    paper.world.create(
        "pods", "ml", {**pod_like(paper, "chat-1"), "metadata": meta_like(paper, "chat-1", "chat-2")}
    )
    assert until(lambda: {one.token for one in paper.cloud.listing(OWNER).instances} == {"chat-1", "chat-2"})
    assert paper.world.counts["list pods"] <= 2


def pod_like(paper: Controller, name: str) -> dict[str, object]:
    found = paper.world.store.get("pods", "ml", name)
    spec = {key: value for key, value in found["spec"].items() if key != "nodeName"}
    return {"apiVersion": "v1", "kind": "Pod", "spec": spec}


def meta_like(paper: Controller, name: str, other: str) -> dict[str, object]:
    found = paper.world.store.get("pods", "ml", name)["metadata"]
    labels = {**found["labels"], "skyserve-token": other}
    return {"name": other, "labels": labels, "annotations": found["annotations"]}


def test_what_the_watch_missed_is_found_gone_by_the_next_list(paper: Controller) -> None:
    paper.cloud.launch(order_of())
    paper.cloud.listing(OWNER)
    paper.world.troubles.is_mute = True
    assert until(lambda: raises_transient(paper.cloud))
    paper.world.lose("chat-1")
    paper.world.store.expire()
    paper.world.troubles.is_mute = False
    assert until(lambda: not raises_transient(paper.cloud))
    assert paper.cloud.listing(OWNER).instances[0].state is S.PREEMPTED


def raises_transient(cloud: KubernetesProvisioner) -> bool:
    try:
        cloud.listing(OWNER)
    except TransientError:
        return True
    return False


@pytest.mark.parametrize("how", ["evicted", "deleted", "its node is tainted"])
def test_what_is_not_our_doing_is_a_notice_with_its_deadline(paper: Controller, how: str) -> None:
    paper.cloud.launch(order_of())
    paper.cloud.listing(OWNER)
    if how == "evicted":
        paper.world.evict("chat-1")
    elif how == "deleted":
        paper.world.delete("pods", "ml", "chat-1", {})
    else:
        paper.world.taint("fixed", "ToBeDeletedByClusterAutoscaler")
    assert until(lambda: paper.cloud.reported(OWNER)[0].preempt_at is not None)
    warned = paper.cloud.reported(OWNER)[0]
    assert (warned.state, warned.preempt_at) == (S.RUNNING, paper.clock[0] + 30)
    if how != "its node is tainted":
        paper.advance(31.0)
    else:
        paper.world.preempt_node("fixed")
    assert until(lambda: paper.cloud.reported(OWNER)[0].state is S.PREEMPTED)


def test_our_own_deletion_is_no_notice(paper: Controller) -> None:
    paper.cloud.terminate(paper.cloud.launch(order_of()))
    (seen,) = paper.cloud.listing(OWNER).instances
    assert (seen.state, seen.preempt_at) == (S.STOPPING, None)
    paper.advance(31.0)
    assert until(lambda: paper.cloud.listing(OWNER).instances[0].state is S.TERMINATED)


# --- room, quotas, permissions --------------------------------------------------------------------------------


def test_a_pod_that_an_autoscaler_may_find_a_node_for_is_pending_until_the_limit() -> None:
    with controller(pods=0, cluster=Cluster("prod", prices=PRICES, schedule_wait_s=600.0)) as kube:
        launched = kube.cloud.launch(order_of())
        assert launched.state is S.PENDING
        kube.advance(599.0)
        assert kube.listed()["chat-1"].state is S.PENDING
        kube.advance(1.0)
        broken = kube.listed()["chat-1"]
        assert (broken.state, broken.refusal.kind if broken.refusal else None) == (
            S.BROKEN,
            FailureKind.CAPACITY,
        )
        assert "nodes are available" in broken.message
        kube.cloud.terminate(broken)
        assert kube.world.pod_names() == []


def test_a_replica_of_several_nodes_is_refused_whole_if_one_finds_no_place_in_time() -> None:
    with controller(pods=1, cluster=Cluster("prod", prices=PRICES, schedule_wait_s=600.0)) as kube:
        kube.cloud.launch(order_of(num_nodes=2))
        assert kube.listed()["chat-1"].state is S.PENDING
        kube.advance(600.0)
        broken = kube.listed()["chat-1"]
        assert (broken.state, broken.refusal.kind if broken.refusal else None) == (
            S.BROKEN,
            FailureKind.CAPACITY,
        )
        assert broken.message.startswith("node 1: 0/4 nodes are available")
        kube.world.set_pods("fixed", 0)
        kube.cloud.terminate(broken)
        kube.advance(31.0)
        assert kube.world.pod_names() == []


def test_a_node_that_comes_in_time_takes_it() -> None:
    with controller(pods=0, cluster=Cluster("prod", prices=PRICES, schedule_wait_s=600.0)) as kube:
        kube.cloud.launch(order_of())
        kube.advance(300.0)
        kube.world.set_pods("fixed", 10)
        assert kube.listed()["chat-1"].state is S.RUNNING


def test_gpus_go_to_nodes_that_have_them(paper: Controller) -> None:
    (offer,) = paper.cloud.offers(
        Requirements((Candidate(accelerator="L4", accelerator_count=3, use_spot=True),))
    )
    assert (offer.capacity_type, offer.places, offer.price_usd_hour) == (
        CapacityType.SPOT,
        2,
        pytest.approx(0.6),
    )
    for number in (1, 2):
        paper.cloud.launch(order_of(f"chat-{number}", offer=offer))
    names = {one["spec"]["nodeName"] for one in paper.world.store.list("pods", None)}
    assert names == {"spot-gpu"}
    with pytest.raises(CapacityError, match=r"Insufficient nvidia\.com/gpu"):
        paper.cloud.launch(order_of("chat-3", offer=offer))
    assert sorted(paper.world.pod_names()) == ["chat-1", "chat-2"]


def test_each_missing_permission_is_named(paper: Controller) -> None:
    order = order_of(num_nodes=2, secrets={"A": "b"})
    for verb, resource in (
        ("create", "pods"),
        ("create", "secrets"),
        ("create", "services"),
        ("get", "pods"),
        ("patch", "pods"),
    ):
        paper.world.troubles.denied = {(verb, resource)}
        with pytest.raises((AuthError, TransientError), match=f'cannot {verb} resource "{resource}"'):
            paper.cloud.launch(order)
        paper.world.troubles.denied = set()
        for one in paper.listed().values():
            paper.cloud.terminate(one)
        paper.advance(60.0)
        paper.restart()


def test_a_check_asks_for_every_permission_and_names_the_one_that_is_missing(paper: Controller) -> None:
    assert {one.level for one in paper.cloud.check()} == {Level.FINE}
    for attributes, is_required in needed(has_agents=False):
        resource = attributes["resource"] + (
            f"/{attributes['subresource']}" if "subresource" in attributes else ""
        )
        if (attributes["verb"], resource) == ("list", "pods"):
            continue  # without it there is no credential to speak of
        paper.world.troubles.denied = {(attributes["verb"], resource)}
        found = [
            one for one in paper.cloud.check() if "permission" in one.what and one.level is not Level.FINE
        ]
        assert [one.what for one in found] == [f"prod: permission {attributes['verb']} {resource}"]
        assert found[0].level is (Level.MISSING if is_required else Level.NOTE)


def test_a_check_says_what_room_there_is_and_which_quota_is_used_up(paper: Controller) -> None:
    found = {one.what: one.message for one in paper.cloud.check()}
    assert found["prod: nodes"] == "2 without accelerators, 16 L4 (16 free)"
    paper.world.store.create(
        "resourcequotas",
        "ml",
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "team"},
            "status": {"hard": {"pods": "2"}, "used": {"pods": "2"}},
        },
    )
    found = {one.what: one.message for one in paper.cloud.check()}
    assert found["prod: quota team/pods"] == "2 of 2 are used: ask for a larger ResourceQuota"
    paper.world.nodes.report("spot-gpu", "False", "KubeletNotReady")
    found = {one.what: one.message for one in paper.cloud.check()}
    assert found["prod: nodes"] == "2 without accelerators, 8 L4 (8 free)"


def test_a_quota_a_name_that_is_taken_and_a_namespace_that_is_not_there(paper: Controller) -> None:
    paper.world.admission.quota = ("team", {"pods": 1})
    with pytest.raises(QuotaError, match="exceeded quota: team"):
        paper.cloud.launch(order_of(num_nodes=2))
    paper.advance(60.0)
    assert paper.world.pod_names() == []
    paper.world.admission.quota = None
    paper.restart()
    theirs = order_of("chat-9", owner="owner-2")
    paper.cloud.launch(theirs)
    with pytest.raises(RefusedError, match="not ours"):
        paper.cloud.launch(order_of("chat-9"))
    made = KubernetesProvisioner([Cluster("prod", namespace="nowhere")], client=paper._client)
    with pytest.raises(RefusedError, match='"nowhere" not found'):
        made.launch(order_of("chat-7"))


def test_without_the_right_to_list_nodes_there_are_the_pools_of_the_file(paper: Controller) -> None:
    paper.world.troubles.denied = {("list", "nodes"), ("watch", "nodes")}
    assert paper.cloud.offers(Requirements((Candidate(),))) == []
    found = {one.what: one.level for one in paper.cloud.check()}
    assert found["prod: nodes"] is Level.MISSING


def test_a_cluster_that_does_not_respond_offers_what_was_known_of_it(paper: Controller) -> None:
    known = paper.cloud.offers(Requirements((Candidate(),)))
    paper.world.troubles.is_mute = True
    paper.clock[0] += 3600.0
    assert paper.cloud.offers(Requirements((Candidate(),))) == known
    paper.restart()
    with pytest.raises(TransientError, match="the cluster prod does not respond"):
        paper.cloud.offers(Requirements((Candidate(),)))
    why = paper.cloud.explain_no_offer(Candidate())
    assert why is not None
    assert "does not respond" in why.message


def test_an_offer_can_be_launched_as_it_is(paper: Controller) -> None:
    found = paper.cloud.offers(
        Requirements((Candidate(), Candidate(use_spot=True), Candidate(accelerator="L4")))
    )
    assert {offer.zone for offer in found} == {ZONE}
    for number, offer in enumerate(found):
        assert isinstance(offer, Offer)
        assert paper.cloud.launch(order_of(f"chat-{number}", offer=offer)).state is S.RUNNING


# --- leases ---------------------------------------------------------------------------------------------------


def test_pods_that_no_controller_visits_are_deleted_with_all_that_is_theirs(tmp_path: Path) -> None:
    cluster = Cluster("prod", prices=PRICES, reaper_account="skyserve-reaper", dead_man_s=3600)
    with controller(cluster=cluster) as kube:
        kube.cloud.launch(order_of(secrets={"A": "b"}))
        kube.cloud.launch(order_of("chat-9", owner="owner-2"))
        kube.cloud.listing(OWNER)
        job = kube.world.store.get("cronjobs", "ml", "skyserve-owner-1")
        (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
        command = [part.replace("$$", "$") for part in container["command"]]
        (tmp_path / "token").write_text("x")
        assert "stands" in reap(command, kube, tmp_path)
        kube.clock[0] += 59.0
        kube.cloud.listing(OWNER)  # too early to renew it
        assert kube.world.counts["patch leases"] == 1
        kube.clock[0] += 2.0
        kube.cloud.listing(OWNER)
        assert kube.world.counts["patch leases"] == 2
        kube.world.store.patch(
            "leases", "ml", "skyserve-owner-1", {"spec": {"renewTime": "2020-01-01T00:00:00.000000Z"}}
        )
        assert "were deleted" in reap(command, kube, tmp_path)
        kube.advance(31.0)
        assert kube.world.pod_names() == ["chat-9"]
        assert [len(kube.world.store.list(kind, "ml")) for kind in ("secrets", "leases", "cronjobs")] == [
            0,
            0,
            0,
        ]
        assert "nothing is deleted" in reap(command, kube, tmp_path)


@pytest.mark.parametrize("may", [True, False])
def test_load_balancers_go_with_them_where_the_reapers_role_knows_any(tmp_path: Path, may: bool) -> None:
    cluster = Cluster("prod", reaper_account="skyserve-reaper", dead_man_s=3600, agent_image="agent:1")
    with controller(cluster=cluster) as kube:
        kube.cloud.launch(order_of())
        agent = kube.cloud.launch(order_of("lb-1", role=Role.LOAD_BALANCER, secrets={"TOKEN": "s"}))
        kube.cloud.run_agent(agent, AgentRelease("one", (), (8000,)))
        kube.cloud.listing(OWNER)
        kube.advance(1.0)
        assert len(kube.world.pod_names()) == 2
        (container,) = kube.world.store.get("cronjobs", "ml", "skyserve-owner-1")["spec"]["jobTemplate"][
            "spec"
        ]["template"]["spec"]["containers"]
        command = [part.replace("$$", "$") for part in container["command"]]
        (tmp_path / "token").write_text("x")
        over = {"spec": {"renewTime": "2020-01-01T00:00:00.000000Z"}}
        kube.world.store.patch("leases", "ml", "skyserve-owner-1", over)
        kube.world.troubles.denied = set() if may else {("deletecollection", "deployments")}
        assert "were deleted" in reap(command, kube, tmp_path)
        for _ in range(3):
            kube.advance(200.0)
        left = kube.world.store.list("deployments", "ml")
        assert (len(kube.world.pod_names()), len(left)) == ((0, 0) if may else (1, 1))


def reap(command: list[str], kube: Controller, account: Path) -> str:
    """Run the CronJob's command; the lease's time is in the future of this machine's clock."""
    env = {"SKYSERVE_API": kube.server.url, "SKYSERVE_ACCOUNT": str(account), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, *command[1:]], env=env, capture_output=True, text=True, check=True)
    return done.stdout
