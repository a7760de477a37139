"""What `serve controller deploy kubernetes/…` applies: the chart's own objects. And what it says while Pods come up."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from scripts import manifests
from skyserve_cli.config import Config
from skyserve_cli.deployment.cluster import certificate, new_keys
from skyserve_cli.deployment.cluster_objects import (
    ClusterValues,
    kind_of,
    objects,
    rights,
)
from skyserve_cli.deployment.cluster_pods import is_rolled_out, obstacle, progress
from tests.clouds.kubernetes.kube_schemas import check

Json = dict[str, Any]
NOTE = "checksum/config"
PLAIN = ClusterValues("models", "r.example.com/skyserve:2", {"clouds": {"kubernetes": {}}})


def named(found: list[Json]) -> dict[tuple[str, str], Json]:
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def comparable(found: list[Json]) -> dict[tuple[str, str], Json]:
    """Return the objects with the configuration as values: its text and its digest are written by different programs."""
    for one in found:
        if one["kind"] == "ConfigMap":
            one["data"]["config.yaml"] = yaml.safe_load(one["data"]["config.yaml"])
        if one["kind"] == "Deployment":
            assert one["spec"]["template"]["metadata"]["annotations"].pop(NOTE)
    return named(found)


def test_the_packaged_manifests_are_the_rendered_chart() -> None:
    pytest.importorskip("helm_python", reason="helm-python-sdk, which is Helm, is not installed")
    there = {path.name: path.read_text() for path in manifests.PACKAGED.iterdir()}
    assert there == manifests.packaged(), "run `python -m scripts.manifests`"
    assert sum(map(len, there.values())) < 30_000  # they are in the wheel


@pytest.mark.parametrize(
    ("values", "of_chart"),
    [
        pytest.param(PLAIN, {"controllers": 1}, id="one controller"),
        pytest.param(
            PLAIN._replace(storage_class="fast"),
            {"controllers": 1, "volume": {"storageClassName": "fast"}},
            id="a storage class",
        ),
        pytest.param(
            PLAIN._replace(database_secret="pg"),
            {"controllers": 2, "secrets": {"database": "pg"}},
            id="two controllers",
        ),
        pytest.param(
            PLAIN._replace(config={"controller": {"tick_seconds": 2}, "clouds": {"aws": {}}}),
            {"controllers": 1, "config": {"controller": {"tick_seconds": 2}, "clouds": {"aws": {}}}},
            id="a configuration",
        ),
    ],
)
def test_the_objects_are_those_of_the_chart_with_the_same_values(
    values: ClusterValues, of_chart: Json
) -> None:
    pytest.importorskip("helm_python", reason="helm-python-sdk, which is Helm, is not installed")
    image = {"image": {"repository": "r.example.com/skyserve", "tag": "2"}}
    texts = manifests.rendered({**of_chart, **image}, values.namespace).values()
    rendered = [one for text in texts for one in yaml.safe_load_all(text) if one]
    if "config" not in of_chart:
        assert PLAIN.config == {"clouds": {"kubernetes": {}}}  # the chart's own default
    else:  # values of Helm are merged, and these are not
        for one in rendered:
            if one["kind"] == "ConfigMap":
                config = yaml.safe_load(one["data"]["config.yaml"])
                del config["clouds"]["kubernetes"]
                one["data"]["config.yaml"] = yaml.safe_dump(config)
    assert comparable(objects(values)) == comparable(rendered)


@pytest.mark.parametrize("database", ["", "pg"])
def test_every_object_passes_its_schema_and_is_in_its_namespace(database: str) -> None:
    found = objects(PLAIN._replace(database_secret=database))
    for one in found:
        check(one)
        if one["kind"].startswith("ClusterRole"):
            assert one["metadata"]["name"] == "models-skyserve-nodes"
        else:
            assert one["metadata"]["namespace"] == "models"
        assert {subject["namespace"] for subject in one.get("subjects") or ()} <= {"models"}
    assert found[-1]["kind"] == "Deployment"  # what it needs is there before
    config = yaml.safe_load(named(found)["ConfigMap", "skyserve-config"]["data"]["config.yaml"])
    assert Config.model_validate(config).enabled == ("kubernetes",)
    assert kind_of({"kind": "PersistentVolumeClaim"}) == "persistent_volume_claim"


def test_another_configuration_is_another_template_and_the_same_is_the_same() -> None:
    def note(config: Json) -> str:
        template = objects(PLAIN._replace(config=config))[-1]["spec"]["template"]
        return str(template["metadata"]["annotations"][NOTE])

    assert note({"clouds": {"aws": {}}}) == note({"clouds": {"aws": {}}}) != note({"clouds": {"gcp": {}}})


def test_the_configuration_that_is_there_is_kept_as_it_is() -> None:
    config = {"clouds": {"aws": {}}, "controller": {"tick_seconds": 2}}
    text = named(objects(PLAIN._replace(config=config)))["ConfigMap", "skyserve-config"]["data"][
        "config.yaml"
    ]
    again = named(objects(PLAIN._replace(config=yaml.safe_load(text))))
    assert again["ConfigMap", "skyserve-config"]["data"]["config.yaml"] == text


def test_without_a_cluster_role_no_right_outside_the_namespace_is_needed() -> None:
    narrow = [str(one) for one in rights(objects(PLAIN._replace(has_cluster_role=False)))]
    assert not any("cluster" in one for one in narrow)
    assert {
        "create pods/exec",
        "get secrets",
        "patch deployments.apps",
        "create networkpolicies.networking.k8s.io",
    } <= {*narrow}
    assert "patch clusterroles.rbac.authorization.k8s.io" in [str(one) for one in rights(objects(PLAIN))]


def test_keys_are_drawn_and_the_certificate_names_the_service() -> None:
    first, second = new_keys(), new_keys()
    assert all(first[name] != second[name] for name in first)
    made = certificate("models", 1_800_000_000.0)
    read = x509.load_pem_x509_certificate(made["tls.crt"])
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "skyserve-api.models.svc" in names.get_values_for_type(x509.DNSName)
    assert isinstance(read.public_key(), ec.EllipticCurvePublicKey)
    assert b"PRIVATE KEY" in made["tls.key"]


# --- Pods -----------------------------------------------------------------------------------------------------


def deployment(**status: int) -> Json:
    template = {"metadata": {"annotations": {NOTE: "new"}}, "spec": {"containers": [{"image": "i:2"}]}}
    return {
        "metadata": {"generation": 2},
        "spec": {"replicas": 1, "template": template},
        "status": {"observedGeneration": 2, **status},
    }


def pod(
    state: Json, *, restarts: int = 0, image: str = "i:2", note: str = "new", ready: bool = False
) -> Json:
    container = {"name": "controller", "state": state, "restartCount": restarts, "ready": ready}
    return {
        "metadata": {"name": "p", "annotations": {NOTE: note}},
        "spec": {"containers": [{"image": image}]},
        "status": {"containerStatuses": [container]},
    }


@pytest.mark.parametrize(
    ("status", "is_over"),
    [
        pytest.param({"replicas": 1, "updatedReplicas": 1, "availableReplicas": 1}, True, id="all are new"),
        pytest.param({"replicas": 2, "updatedReplicas": 1, "availableReplicas": 1}, False, id="an old one"),
        pytest.param({"replicas": 1, "updatedReplicas": 1}, False, id="not ready"),
        pytest.param(
            {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1},
            False,
            id="of the Deployment before",
        ),
    ],
)
def test_a_roll_out_is_over_when_all_pods_are_new_and_ready(status: dict[str, int], is_over: bool) -> None:
    assert is_rolled_out(deployment(**status)) is is_over


PULLS = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
RUNS = {"running": {}}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        pytest.param(pod(PULLS), "ImagePullBackOff: no such image", id="an image that is not there"),
        pytest.param(pod(PULLS, image="i:1"), None, id="of the image before"),
        pytest.param(pod(PULLS, note="old"), None, id="of the configuration before"),
        pytest.param(pod({"waiting": {"reason": "ContainerCreating"}}), None, id="on its way"),
        pytest.param(pod({"waiting": {"reason": "CrashLoopBackOff"}}), "exits again", id="crashes"),
        pytest.param(pod(RUNS, restarts=3), "exits again", id="restarted often"),
        pytest.param(pod(RUNS, restarts=9, ready=True), None, id="restarted often, and ready"),
    ],
)
def test_what_does_not_start_without_help_is_named(found: Json, reason: str | None) -> None:
    stuck = obstacle(deployment(), [found])
    assert (stuck is None) if reason is None else (stuck is not None and reason in stuck[1])


def test_progress_names_what_pods_wait_for() -> None:
    unscheduled = pod(RUNS)
    unscheduled["status"] = {
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]
    }
    assert progress(deployment(), [unscheduled]) == (
        "0 of 1 controllers are ready (Pod p: 0/3 nodes are available)"
    )
