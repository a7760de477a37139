"""`serve check`, `plan --ask` and `validate` before a namespace that admits no Pod as it is made by default."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.clouds.kubernetes.kube_admission import Admission
from tests.clouds.kubernetes.kube_places import living
from tests.clouds.kubernetes.kube_server import TOKEN
from tests.clouds.kubernetes.kube_world import NAMESPACE
from tests.e2e.conftest import Serve

FILE = """
name: chat
service: {replicas: 1}
resources: {infra: kubernetes}
secrets: {KEY: s3cret}
run: serve
"""
PATCH = "kubernetes: {pod: {spec: {securityContext: {runAsNonRoot: true, runAsUser: 1000}}}}\n"


def configure(serve: Serve, kubeconfig: Path, **section: object) -> None:
    serve.configure(clouds={"kubernetes": {"kubeconfig": str(kubeconfig), "contexts": {"test": section}}})


def test_a_namespace_that_enforces_restricted(serve: Serve, tmp_path: Path) -> None:
    plain, patched = tmp_path / "plain.yaml", tmp_path / "patched.yaml"
    plain.write_text(FILE)
    patched.write_text(FILE + PATCH)
    with living(tmp_path, token=TOKEN) as (world, kubeconfig):
        world.admission = Admission(security="restricted")
        configure(serve, kubeconfig)
        before = world.store.version
        checked = serve("check")
        assert checked.code == 1
        assert 'violates PodSecurity "restricted:latest"' in checked.out
        refused = serve("plan", str(plain), "--ask")
        assert (refused.code, "runAsNonRoot: true, runAsUser: 1000" in refused.out) == (1, True), refused.out
        assert "no cluster admits the Pods of this service" in refused.err
        found = serve.ok("plan", str(patched), "--ask", "-o", "json").json()["admission"]
        assert found == [{"place": "kubernetes/test", "admitted": True, "reasons": []}]
        configure(serve, kubeconfig, pod=yaml.safe_load(PATCH)["kubernetes"]["pod"])
        assert "admission of replicas  fine   accepted" in serve.ok("check").out.replace("│", " ")
        assert "kubernetes/test: admitted" in serve.ok("plan", str(plain), "--ask").out
        assert world.store.version == before


def test_a_namespace_that_refuses_folders_of_nodes(serve: Serve, tmp_path: Path) -> None:
    node, claim = tmp_path / "node.yaml", tmp_path / "claim.yaml"
    node.write_text(f"{FILE}cache: node\n")
    claim.write_text(f"{FILE}cache: {{kind: pvc, claim: weights}}\n")
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    with living(tmp_path, token=TOKEN) as (world, kubeconfig):
        world.admission = Admission(security="baseline")
        configure(serve, kubeconfig)
        refused = serve("plan", str(node), "--ask")
        assert refused.code == 1
        assert (
            'violates PodSecurity "baseline:latest": hostPath volumes (volume "skyserve-cache")'
            in refused.out
        )
        assert "write cache: {kind: pvc, claim: NAME} in the service file" in refused.out
        assert "there is no PersistentVolumeClaim weights" in serve("plan", str(claim), "--ask").out
        world.create(
            "persistentvolumeclaims", NAMESPACE, {**kind, "metadata": {"name": "weights"}, "spec": spec}
        )
        asked = serve.ok("plan", str(claim), "--ask").out
        assert "Cache: HF_HOME outlives replicas, in the claim weights.\n" in asked
        assert "kubernetes/test: admitted" in asked


@pytest.mark.parametrize(
    ("file", "section", "sentence"),
    [
        (
            "kubernetes: {pod: {spec: {hostname: x}}}\n",
            {},
            "kubernetes.pod.spec.hostname: it cannot be set: nodes of a replica find each other by it",
        ),
        (
            "",
            {"pod": {"spec": {"containers": [{"name": "main", "image": "x"}]}}},
            "clouds.kubernetes.contexts.test.pod: spec.containers[0].image: it cannot be set: set resources.image_id",
        ),
        (
            "",
            {"agent_pod": {"spec": {"volumess": []}}},
            "clouds.kubernetes.contexts.test.agent_pod: spec.volumess: a Pod has no such key; did you mean volumes?",
        ),
    ],
)
def test_a_patch_that_is_wrong_is_one_sentence_with_its_path(
    serve: Serve, tmp_path: Path, file: str, section: dict[str, object], sentence: str
) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(FILE + file)
    configure(serve, tmp_path / "none", **section)
    refused = serve("plan", str(path))
    assert refused.code == 2
    assert sentence in refused.err
