"""`cache`: what a file may say, the folder that follows from it, and what a Pod, a host and a process make of it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from policies.model import CapacityType, Offer, Replica, ReplicaState, Zone
from provisioners.kubernetes import pod_rules, scripts, translate
from provisioners.kubernetes.machines import MOST, WarmNodes
from provisioners.kubernetes.settings import Cluster
from provisioners.port.base import Cache, LaunchOrder
from provisioners.remote.bootstrap_steps import ReplicaNode, cache_script, cached_setup, task_for
from provisioners.remote.host_agent.scripts import container_command, environment
from skyserve_cli.config_kubernetes import KubernetesConfig
from skyserve_cli.controller.clouds.node_caches import purged
from skyserve_cli.controller.reconcile.mappers import order_of
from skyserve_cli.spec import SpecError, sent_spec, spec_from_json, spec_to_json
from skyserve_cli.spec.load import Loaded, load_text
from skyserve_cli.spec.model import CacheSpec
from tests.clouds.kubernetes.kube_admission import violations
from tests.clouds.kubernetes.kube_schemas import check
from tests.unit.test_controller_view import a_row

Json = dict[str, Any]
IN_CLUSTER, OWN_HOST = Zone("kubernetes", "prod", "zone-a"), Zone("ssh", "rack", "h1")
NODE = Cache("me/-/chat", ("HF_HOME",))
CLAIM = Cache("me/ml/chat", ("HF_HOME", "VLLM_CACHE_ROOT"), "weights")


def load(text: str) -> Loaded:
    return load_text(f"name: chat\nservice: {{}}\nrun: x\n{text}", needs_values=False)


def order(zone: Zone = IN_CLUSTER, **changes: Any) -> LaunchOrder:
    offer = Offer(zone, "2cpu-4gb", None, 0.0, CapacityType.ON_DEMAND, 0.1)
    return replace(LaunchOrder("chat-1", "me", "chat", 1, 1, offer, None, "serve"), **changes)


def pod_of(cache: Cache | None, patch: Json | None = None, cluster: Cluster | None = None) -> Json:
    made = order(cache=cache, pod=None if patch is None else json.dumps(patch))
    pod = translate.pod_of(made, 0, cluster or Cluster("prod"), "ml")
    check(pod)
    return pod


# --- the file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cache"),
    [
        ("cache: node", CacheSpec()),
        ("cache: {kind: node, variables: OLLAMA_MODELS}", CacheSpec("node", ("OLLAMA_MODELS",))),
        (
            "cache: {kind: pvc, claim: weights, variables: [HF_HOME, VLLM_CACHE_ROOT]}",
            CacheSpec("pvc", ("HF_HOME", "VLLM_CACHE_ROOT"), "weights"),
        ),
        ("cache: node\nresources: {any_of: [{infra: aws}, {infra: kubernetes}]}", CacheSpec()),
        ("cache: {kind: node, variables: [LLAMA_CACHE]}\nenvs: {HF_HOME: /x}", CacheSpec("node", ("LLAMA_CACHE",))),
        ("", None),
    ],
)  # fmt: skip
def test_what_a_file_says_is_kept_and_is_what_the_controller_takes(
    text: str, cache: CacheSpec | None
) -> None:
    spec = load(text).spec
    assert spec.cache == cache
    assert sent_spec(spec_to_json(spec)) == spec_from_json(spec_to_json(spec)) == spec


WRONG = {
    "a kind that is none": ("cache: disk", "cache", "must be one of node, pvc"),
    "no kind": ("cache: {variables: [HF_HOME]}", "cache.kind", "is required here"),
    "a number": ("cache: 5", "cache", "must be a mapping"),
    "a path": ("cache: {kind: node, variables: [/etc]}", "cache.variables[0]", "and no path"),
    "a path upwards": ("cache: {kind: node, variables: [../x]}", "cache.variables[0]", "and no path"),
    "a name in small letters": ("cache: {kind: node, variables: hf_home}", "cache.variables", "capital letters"),
    "a long name": (f"cache: {{kind: node, variables: [{'A' * 64}]}}", "cache.variables[0]", "capital letters"),
    "the machine's": ("cache: {kind: node, variables: [HOME]}", "cache.variables[0]", "belongs to the machine"),
    "ours": ("cache: {kind: node, variables: [SKYSERVE_RUN]}", "cache.variables[0]", "or to us"),
    "none": ("cache: {kind: node, variables: []}", "cache.variables", "1 to 8 names"),
    "many": (f"cache: {{kind: node, variables: {list('ABCDEFGHI')}}}", "cache.variables", "1 to 8 names"),
    "one twice": ("cache: {kind: node, variables: [A, A]}", "cache.variables", "has a name twice"),
    "a claim of a node": ("cache: {kind: node, claim: x}", "cache.claim", "is for kind: pvc"),
    "no claim": ("cache: pvc", "cache.claim", "write cache: {kind: pvc, claim: NAME}"),
    "a claim that is a path": ("cache: {kind: pvc, claim: ../x}", "cache.claim", "name of a PersistentVolumeClaim"),
    "a variable of envs": ("cache: node\nenvs: {HF_HOME: /x}", "envs.HF_HOME", "cannot stand next to cache"),
    "a secret": ("cache: node\nsecrets: ['secrets:HF_HOME']", "secrets.HF_HOME", "cannot stand next to cache"),
    "rented machines": (
        "cache: node\nresources: {any_of: [{infra: aws}, {infra: gcp}]}",
        "cache.kind",
        "node keeps nothing on aws and gcp: a machine is deleted with its disk",
    ),
    "a claim on own hosts": (
        "cache: {kind: pvc, claim: x}\nresources: {infra: ssh}",
        "cache.kind",
        "a claim is of Kubernetes",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "path", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_by_its_path(text: str, path: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(text)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert sentence in str(problem)


def test_the_controller_refuses_what_a_file_may_not_say() -> None:
    sent = spec_to_json(load("cache: node").spec)
    for key, value, path in (
        ("variables", ["../x"], "cache.variables[0]"),
        ("kind", "disk", "cache.kind"),
        ("claim", "x", "cache.claim"),
    ):
        with pytest.raises(SpecError) as caught:
            sent_spec({**sent, "cache": {**sent["cache"], key: value}})
        assert caught.value.problems[0].path == path


@pytest.mark.parametrize(
    ("text", "enabled", "warning"),
    [
        ("resources: {infra: kubernetes}", (), ""),
        ("resources: {infra: local}", (), ""),
        ("", ("local", "ssh"), ""),
        ("", ("aws", "kubernetes"), "not acted on by aws: a rented machine is deleted with its disk"),
        ("resources: {infra: kubernetes}\nkubernetes: {pod: {spec: {securityContext: {runAsUser: 7}}}}", (), "root"),
    ],
)  # fmt: skip
def test_where_it_keeps_nothing_there_is_a_warning(text: str, enabled: tuple[str, ...], warning: str) -> None:
    found = load_text(f"name: chat\nservice: {{}}\nrun: x\ncache: node\n{text}", enabled=enabled).warnings
    assert [str(one) for one in found if warning and warning in str(one)] == [str(one) for one in found]
    assert bool(found) is bool(warning)


def test_another_cache_is_another_replica_and_none_is_as_before() -> None:
    none, node = load("").spec, load("cache: node").spec
    assert none.replica_hash() != node.replica_hash()
    assert none.replica_hash() == replace(node, cache=None).replica_hash()
    assert node.replica_hash() != replace(node, cache=CacheSpec("node", ("A",))).replica_hash()


# --- the folder -----------------------------------------------------------------------------------------------


def test_each_owner_team_and_service_has_a_folder() -> None:
    spec = load("cache: node").spec
    replica = Replica(7, 1, order().offer, ReplicaState.REQUESTED, 0.0, 0.0)

    def folder(owner: str, team: str, service: str, incarnation: str = "i1") -> str:
        found = order_of(owner, service, incarnation, replica, spec, {}, team).cache
        assert found is not None
        return found.folder

    places = [("a", "", "chat"), ("b", "", "chat"), ("a", "ml", "chat"), ("a", "", "ml")]
    assert len({folder(*one) for one in places}) == len(places)
    assert folder("a", "ml", "chat", "i1") == folder("a", "ml", "chat", "i2"), "its next life has it, too"
    assert order_of("a", "chat", "i", replica, load("").spec, {}).cache is None


@pytest.mark.parametrize(
    "folder", ["", "a/b", "/a/b/c", "a/../c", "a/b/..", "a/b/.x", "a/b/c/d", "a/b c/d", f"a/b/{'x' * 101}"]
)
def test_no_folder_leads_elsewhere(folder: str) -> None:
    with pytest.raises(ValueError, match="is no folder of a cache"):
        Cache(folder, ("HF_HOME",))


# --- Pods -----------------------------------------------------------------------------------------------------


def test_a_folder_of_the_node_is_mounted_and_named() -> None:
    pod = pod_of(NODE)
    main = pod["spec"]["containers"][0]
    path = "/var/lib/skyserve/cache/ml/me/-/chat"
    assert pod["spec"]["volumes"][-1] == {
        "name": "skyserve-cache",
        "hostPath": {"path": path, "type": "DirectoryOrCreate"},
    }
    assert main["volumeMounts"][-1] == {"name": "skyserve-cache", "mountPath": "/skyserve-cache"}
    env = {one["name"]: one.get("value") for one in main["env"]}
    assert (env["SKYSERVE_CACHE"], env["HF_HOME"]) == ("/skyserve-cache", "/skyserve-cache/hf_home")
    assert "skyserve-cache" not in json.dumps(pod_of(None))
    other = pod_of(NODE, cluster=Cluster("prod", cache_path="/mnt/disks/nvme"))
    assert other["spec"]["volumes"][-1]["hostPath"]["path"] == "/mnt/disks/nvme/ml/me/-/chat"


def test_a_claim_is_mounted_at_the_folder_of_the_service() -> None:
    pod = pod_of(CLAIM)
    main = pod["spec"]["containers"][0]
    assert pod["spec"]["volumes"][-1] == {
        "name": "skyserve-cache",
        "persistentVolumeClaim": {"claimName": "weights"},
    }
    assert main["volumeMounts"][-1]["subPath"] == "skyserve/me/ml/chat"
    env = {one["name"]: one.get("value") for one in main["env"]}
    assert env["VLLM_CACHE_ROOT"] == "/skyserve-cache/vllm_cache_root"


@pytest.mark.parametrize(
    ("cache", "patch", "level", "refused"),
    [
        (None, None, "baseline", []),
        (NODE, None, "baseline", ['hostPath volumes (volume "skyserve-cache")']),
        (CLAIM, None, "baseline", []),
        (CLAIM, {"spec": {"securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}}}, "restricted", []),
    ],
)  # fmt: skip
def test_what_pod_security_says_of_it(
    cache: Cache | None, patch: Json | None, level: str, refused: list[str]
) -> None:
    assert list(violations(pod_of(cache, patch)["spec"], level)) == refused


@pytest.mark.parametrize(
    ("patch", "holds"),
    [
        # A variable, a volume and a mount of the patch stand beside ours; its own HF_HOME wins, as with every variable.
        ({"volumes": [{"name": "cache", "emptyDir": {}}]}, ["work", "shm", "skyserve-cache", "cache"]),
        ({"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]}, ["work", "shm", "skyserve-cache"]),
        ({"securityContext": {"runAsUser": 1000}}, ["work", "shm", "skyserve-cache"]),
    ],
)
def test_patches_leave_the_cache_where_it_is(patch: Json, holds: list[str]) -> None:
    pod = pod_of(NODE, {"spec": patch})
    assert [one["name"] for one in pod["spec"]["volumes"]] == holds
    assert pod["spec"]["containers"][0]["volumeMounts"][-1]["name"] == "skyserve-cache"


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        ({"volumes": [{"name": "skyserve-cache", "hostPath": {"path": "/"}}]}, "skyserve-cache belongs to the product"),
        (
            {"containers": [{"name": "main", "volumeMounts": [{"name": "x", "mountPath": "/skyserve-cache/"}]}]},
            "/skyserve-cache/ belongs to the product",
        ),
    ],
)  # fmt: skip
def test_no_patch_puts_another_volume_in_its_place(patch: Json, problem: str) -> None:
    (found,) = pod_rules.problems({"spec": patch})
    assert problem in str(found)


@pytest.mark.parametrize("path", ["cache", "/cache", "/etc/x", "/usr/lib/x", "/a/../b", "/a//b", "/a/b/", "/proc/1", "/a/.b", "/lib64/x"])  # fmt: skip
def test_the_folder_of_nodes_is_none_of_the_systems(path: str) -> None:
    with pytest.raises(ValidationError, match="no folder for this"):
        KubernetesConfig.model_validate({"contexts": {"a": {"cache_path": path}}})
    made = KubernetesConfig.model_validate({"contexts": {"a": {"cache_path": "/mnt/disks/ssd0"}}})
    assert made.clusters()[0].cache_path == "/mnt/disks/ssd0"


# --- hosts ----------------------------------------------------------------------------------------------------


def test_a_host_of_the_users_own_has_the_folder_beside_its_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    node = ReplicaNode("chat-1", 0, ("10.0.0.1",), 8000, image="engine")
    task = task_for(order(OWN_HOST, cache=NODE, setup="echo set up"), node) | {"claim_path": "/none"}
    assert task["setup"] == cached_setup(order(cache=NODE, setup="echo set up"))
    assert task["setup"].endswith("exit 1\necho set up")
    env, given = environment(task)
    root = tmp_path / ".skyserve" / "cache" / "me" / "-" / "chat"
    assert (env["SKYSERVE_CACHE"], env["HF_HOME"]) == (str(root), str(root / "hf_home"))
    assert {"SKYSERVE_CACHE", "HF_HOME"} <= set(given)
    assert root.stat().st_mode & 0o077 == 0
    assert f"{root}:{root}" in container_command(tmp_path / "m", task, env)


@pytest.mark.parametrize(
    ("zone", "cache"),
    [(OWN_HOST, None), (OWN_HOST, CLAIM), (Zone("aws", "us-east-1", "us-east-1a"), NODE)],
)
def test_where_nothing_is_kept_nothing_is_set(zone: Zone, cache: Cache | None) -> None:
    task = task_for(order(zone, cache=cache), ReplicaNode("chat-1", 0, ("10.0.0.1",), 8000))
    assert (task["setup"], task["cache"]) == (None, {})
    old = {key: value for key, value in task.items() if key != "cache"}
    assert "SKYSERVE_CACHE" not in environment(old | {"claim_path": "/none"})[0], "of an earlier controller"


def sh(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", script], env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True, check=False
    )  # fmt: skip


def test_a_start_prints_whether_it_has_found_anything(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "with space" / "hf"), "B": str(tmp_path / "b")}
    script = cache_script(("HF_HOME", "B"))
    assert sh(script, **env).stdout == f"cache: {env['HF_HOME']} is empty\ncache: {env['B']} is empty\n"
    (Path(env["HF_HOME"]) / "weights").write_bytes(b"x" * 5000)
    first, second = sh(script, **env).stdout.splitlines()
    assert first.startswith(f"cache: {env['HF_HOME']} has ")
    assert first.endswith(" of earlier replicas")
    assert second.endswith("is empty")


def test_a_folder_that_cannot_be_written_fails_the_setup_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failed = sh(cache_script(("HF_HOME",)), HF_HOME=str(tmp_path / "file" / "hf"))
    assert failed.returncode == 1
    assert "cannot be written by the user" in failed.stdout
    whole = scripts.main({}, {}, {}, [], ("HF_HOME",))
    (tmp_path / "root" / "work").mkdir(parents=True)
    log = tmp_path / "log"
    env = {"SKYSERVE_ROOT": str(tmp_path / "root"), "SKYSERVE_TERMINATION_LOG": str(log)}
    assert sh(whole, HF_HOME=str(tmp_path / "file" / "hf"), SKYSERVE_RUN="true", **env).returncode == 1
    assert log.read_text().startswith(f"{scripts.SETUP_FAILED}: {scripts.NO_CACHE}")


# --- which nodes, and what is removed -------------------------------------------------------------------------


def on(node: str, service: str = "chat", **status: Any) -> Json:
    meta = {"labels": {"skyserve-owner": "me", "skyserve-service": service}}
    if status.pop("is_deleted", False):
        meta["deletionTimestamp"] = "2027-01-15T08:00:00Z"  # type: ignore[assignment]
    return {"metadata": meta, "spec": {"nodeName": node} if node else {}, "status": status}


@pytest.mark.parametrize(
    ("pods", "free"),
    [
        ([], ["a", "b"]),
        ([on("b")], ["a"]),
        ([on("b", is_deleted=True)], ["a", "b"]),
        ([on("b", phase="Failed")], ["a", "b"]),
        ([on("a"), on("b"), on("")], []),
        ([on("c", phase="Succeeded"), on("a")], ["b", "c"]),
    ],
)
def test_a_successor_prefers_nodes_on_which_no_replica_of_the_service_stays(
    pods: list[Json], free: list[str]
) -> None:
    nodes = WarmNodes()
    nodes.note([on("a"), on("b"), on("x", "other"), on("")])
    assert sorted(nodes.free("me", "chat", pods)) == free
    assert nodes.free("me", "new", []) == []


def test_the_last_nodes_are_remembered() -> None:
    nodes = WarmNodes()
    nodes.note([on(f"n{number}") for number in range(40)])
    assert nodes.free("me", "chat", []) == [f"n{number}" for number in range(40 - MOST, 40)]


class Hosts:
    """A cloud whose hosts keep folders, and what was removed of them."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    def remove_cache(self, cache: Cache) -> tuple[list[str], list[str]]:
        self.removed.append(cache.folder)
        return ["h1"], ["h2 does not respond"]


@pytest.mark.parametrize(
    ("cache", "changes", "is_removed"),
    [
        (CacheSpec(), {}, True),
        (CacheSpec(), {"purge": False}, False),
        (CacheSpec(), {"down": False}, False),
        (CacheSpec(), {"name": "other"}, False),
        (CacheSpec(), {"replicas": (Replica(1, 1, order(OWN_HOST).offer, ReplicaState.TERMINATING, 0, 0),)}, False),
        (CacheSpec("pvc", ("HF_HOME",), "weights"), {}, False),
        (None, {}, False),
    ],
)  # fmt: skip
def test_what_a_purge_removes(cache: CacheSpec | None, changes: Json, is_removed: bool) -> None:
    spec, hosts = load("resources: {infra: ssh}").spec, Hosts()
    row = replace(a_row(), name="chat", down=True, purge=True, team="ml", replicas=())
    clouds = SimpleNamespace(resolve=lambda need: need, get=lambda name: hosts)
    specs = SimpleNamespace(get=lambda name, version: replace(spec, cache=cache))
    found = purged(["chat"], [replace(row, **changes)], specs, "me", clouds)  # type: ignore[arg-type]
    assert hosts.removed == ["me/ml/chat"] * is_removed
    assert found.removed == ("the cache of chat on ssh: h1",) * is_removed
    assert found.problems == ("h2 does not respond",) * is_removed
