"""`cache` on a real API server: what a Pod has written is there for its successor, in a folder of the node and in a claim."""

from __future__ import annotations

import pytest

from provisioners.kubernetes.cloud import KubernetesProvisioner
from provisioners.port.base import Cache, InstanceState
from tests.clouds.kubernetes.kube_controller import OWNER
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.rights import apply, documents
from tests.kubernetes_real.spaces import Space, await_state, insist, listed

S = InstanceState
pytestmark = pytest.mark.timeout(300)
RUN = 'echo "found: $(cat "$HF_HOME/ids" 2>/dev/null)"; echo of-$SKYSERVE_REPLICA_ID >>"$HF_HOME/ids"; echo wrote; exec sleep 1000'


def make_claim(space: Space, mode: str) -> None:
    """A claim and the volume that is bound to it."""
    spec = {"accessModes": [mode], "storageClassName": ""}
    claim = {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": {"name": "weights"}}
    wanted = {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": f"{space.name}-weights"}
    made = space.api.create("persistentvolumeclaims", space.name, {**claim, "spec": spec | wanted})
    volume = {
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": "/srv/weights"},
        "claimRef": {"namespace": space.name, "name": "weights", "uid": made["metadata"]["uid"]},
    }
    meta = {"name": wanted["volumeName"]}
    body = {"kind": "PersistentVolume", "apiVersion": "v1", "metadata": meta, "spec": spec | volume}
    space.api.create("persistentvolumes", "", body)
    until(
        lambda: space.api.get("persistentvolumeclaims", space.name, "weights")["status"]["phase"] == "Bound",
        "the claim is not bound",
    )


def run_one(space: Space, cloud: KubernetesProvisioner, number: int, cache: Cache) -> str:
    """Return what a replica has printed until it had written; it is terminated then."""
    token = f"chat-{number}"
    order = space.order(cloud, token, replica_id=number, run=RUN, cache=cache)
    insist(lambda: cloud.launch(order))
    cloud.listing(OWNER)
    await_state(cloud, token, S.RUNNING)

    def log() -> str:
        return cloud.read_log(listed(cloud)[token], 0, 10_000).decode()

    until(lambda: "wrote" in log(), lambda: f"it has printed {log()!r}")
    printed = log()
    insist(lambda: cloud.terminate(listed(cloud)[token]))
    space.await_nothing()
    return printed


@pytest.mark.parametrize("claim", [None, "weights"], ids=["node", "pvc"])
def test_a_successor_finds_what_the_first_one_wrote(space: Space, claim: str | None) -> None:
    """The scheduler puts a successor on the node of the first one, though all three are empty."""
    if claim is not None:
        make_claim(space, "ReadWriteMany")
    cloud = space.controller()
    cache = Cache(f"{OWNER}/-/chat", ("HF_HOME",), claim)
    space.cordon(*space.nodes[:2])
    assert "is empty\nfound: \n" in run_one(space, cloud, 1, cache)
    space.cordon(*space.nodes[:2], on=False)
    second = run_one(space, cloud, 2, cache)
    assert "of earlier replicas\nfound: of-1\n" in second
    other = Cache(f"{OWNER}/-/other", ("HF_HOME",), claim)
    assert "is empty\nfound: \n" in run_one(space, cloud, 3, other)


def test_a_claim_of_one_node_is_named_before_a_launch(space: Space) -> None:
    make_claim(space, "ReadWriteOnce")
    for body in documents(space.name):  # the right that the printed Role lacks
        if body["kind"] == "Role":
            rule = {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get"]}
            apply(space.api, space.name, {**body, "rules": [*body["rules"], rule]})
    cloud = space.controller()
    order = space.order(cloud, cache=Cache(f"{OWNER}/-/chat", ("HF_HOME",), "weights"))
    refused = [str(why) for _, why in cloud.rehearse(order) if why is not None]
    assert len(refused) == 1
    assert "weights is ReadWriteOnce, so the next replica waits for it on any other node" in refused[0]
    space.await_nothing()
