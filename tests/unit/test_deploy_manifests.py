"""The Helm chart and the plain manifests: the same objects, as Kubernetes knows them, with no more rights than the code uses."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate
from kubernetes_validate.utils import all_versions

from provisioners import permissions
from provisioners.kubernetes.agent_objects import ADMIN_PORT, ROLE, ROLE_LABEL
from provisioners.kubernetes.translate import MANAGED, MANAGER
from scripts import manifests
from scripts.manifests import CHART, VARIANTS, Variant
from skyserve_cli.config import Config
from skyserve_cli.controller.leader_label import CONTROLLERS, LABEL
from skyserve_cli.home import POD_NAME
from tests.clouds.kubernetes.kube_schemas import check

PLAIN = manifests.ROOT / "kubernetes"
CONTAINERFILE = (Path(__file__).parents[2] / "packaging" / "Containerfile").read_text()
#: The versions whose schemas `kubernetes-validate` has, the oldest first.
KUBERNETES = sorted(
    {version.rpartition(".")[0] for version in all_versions()}, key=lambda one: int(one.partition(".")[2])
)
CUSTOM = ("ServiceMonitor",)  # of operators, for which Kubernetes has no schema
Json = dict[str, Any]

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.folder)
controllers = pytest.mark.parametrize("folder", ["one-controller", "two-controllers"])


def documents(text: str) -> list[Json]:
    return [one for one in yaml.safe_load_all(text) if one]


def objects(folder: str) -> dict[tuple[str, str], Json]:
    """Return the objects of a folder of plain manifests by kind and name."""
    listed = yaml.safe_load((PLAIN / folder / "kustomization.yaml").read_text())["resources"]
    found = [one for name in listed for one in documents((PLAIN / folder / name).read_text())]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


def in_order(found: list[Json]) -> list[Json]:
    return sorted(found, key=lambda one: (one["kind"], one["metadata"]["name"]))


@variants
def test_the_plain_manifests_are_the_rendered_chart(variant: Variant) -> None:
    pytest.importorskip("helm_python", reason="helm-python-sdk, which is Helm, is not installed")
    there = {path.name: path.read_text() for path in (PLAIN / variant.folder).iterdir()}
    assert there == manifests.files_of(variant), "run `python -m scripts.manifests`"


@variants
def test_kustomize_reads_the_plain_manifests(variant: Variant) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed (Debian: kubernetes-client)")
    command = [kubectl, "kustomize", str(PLAIN / variant.folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert in_order(documents(built.stdout)) == in_order(list(objects(variant.folder).values()))


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk, which is Helm, is not installed")
    report = helm.lint(CHART, strict=True)
    assert (report["total_charts_linted"], report["errors"]) == (1, [])
    assert [one for one in report["messages"] if one["severity"] > 1] == []


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"controllers": 3, "image": {"repository": "r.example.com/s", "tag": "1"}}, id="image"),
        pytest.param({"controllers": 1, "serviceMonitor": {"enabled": True}}, id="one, monitored"),
        pytest.param({"service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}}}, id="load balancer"),
        pytest.param({"networkPolicy": {"enabled": False}}, id="no network policy"),
        pytest.param(
            {"controllers": 1, "secrets": {"backup": "skyserve-backup"}}, id="passphrase of backups"
        ),
        pytest.param(
            {"controllers": 1, "volume": {"size": "1Gi", "storageClassName": "fast"}}, id="storage class"
        ),
        pytest.param(
            {
                "image": {"pullSecrets": [{"name": "x"}]},
                "nodeSelector": {"a": "b"},
                "tolerations": [{"key": "x", "operator": "Exists"}],
                "config": {"controller": {"tick_seconds": 2}, "clouds": {"kubernetes": {}, "aws": {}}},
            },
            id="places and config",
        ),
    ],
)
def test_other_values_make_objects_that_kubernetes_knows(values: Json) -> None:
    pytest.importorskip("helm_python", reason="helm-python-sdk, which is Helm, is not installed")
    found = [one for text in manifests.rendered(values, "models").values() for one in documents(text)]
    for one in found:
        if one["kind"] not in CUSTOM:
            check(one)
        assert one["kind"].startswith("ClusterRole") or one["metadata"]["namespace"] == "models"
    (deployment,) = [one for one in found if one["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == values.get("controllers", 2)
    (config,) = [one for one in found if one["kind"] == "ConfigMap"]
    read = Config.model_validate(yaml.safe_load(config["data"]["config.yaml"]))
    assert read.controller.listen is not None  # which the user's part does not take away
    assert set(read.enabled) == set(values.get("config", {"clouds": {"kubernetes": {}}})["clouds"])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"controllers": 0}, "controllers"),
        ({"secret": {}}, "secret"),
        ({"endpoints": {"ports": [80]}}, "ports"),
        ({"service": {"type": "External"}}, "type"),
    ],
)
def test_wrong_values_are_named(values: Json, named: str) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk, which is Helm, is not installed")
    with pytest.raises(helm.HelmError, match=named):
        manifests.rendered(values)


@variants
def test_every_object_passes_the_schema_of_its_kind(variant: Variant) -> None:
    for (kind, _), one in objects(variant.folder).items():
        if kind not in CUSTOM:
            check(one)


@pytest.mark.long
@pytest.mark.parametrize("version", [KUBERNETES[0], KUBERNETES[-1]])
@controllers
def test_the_oldest_and_the_newest_kubernetes_know_them(folder: str, version: str) -> None:
    for one in objects(folder).values():
        validate(one, version, strict=True)


def test_the_chart_names_the_oldest_kubernetes_that_is_tested() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={KUBERNETES[0]}.0-0"


@controllers
def test_the_roles_are_those_that_the_product_prints(folder: str) -> None:
    printed = {
        (one["kind"], one["metadata"]["name"]): one for one in documents(permissions.text_of("kubernetes"))
    }
    found = objects(folder)
    account = found["ServiceAccount", "skyserve"]["metadata"]
    for kind, name in printed:
        own = (
            f"{account['namespace']}-{name}" if kind.startswith("Cluster") else name
        )  # they are in no namespace
        if "rules" in printed[kind, name]:
            assert found[kind, own]["rules"] == printed[kind, name]["rules"]
            continue
        assert found[kind, own]["roleRef"]["name"] == own
        (subject,) = found[kind, own]["subjects"]
        assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert sum("Role" in kind for kind, _ in found) == len(printed)
    assert (
        found["Deployment", "skyserve-controller"]["spec"]["template"]["spec"]["serviceAccountName"]
        == "skyserve"
    )


@controllers
def test_the_pod_is_locked_down_and_its_home_is_a_folder_of_its_own(folder: str) -> None:
    spec = objects(folder)["Deployment", "skyserve-controller"]["spec"]["template"]["spec"]
    user = re.search(r"--uid (\d+)", CONTAINERFILE)
    assert user is not None
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == int(user[1])
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in (*spec["initContainers"], *spec["containers"]):
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert one["resources"]["requests"]
    (main,) = spec["containers"]
    variables = {one["name"]: one for one in main["env"]}
    mounts = {one["name"]: one["mountPath"] for one in main["volumeMounts"]}
    # A volume belongs to root, and a home must belong to its user.
    assert Path(variables["SKYSERVE_HOME"]["value"]).parent == Path(mounts["home"])
    assert f"mkdir -p {variables['SKYSERVE_HOME']['value']}" in spec["initContainers"][0]["command"][-1]
    assert variables[POD_NAME]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert mounts["tmp"] == "/tmp"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert main[probe]["httpGet"] == {"path": "/livez", "port": "api", "scheme": "HTTPS"}


@controllers
def test_the_configuration_fits_the_services_and_the_ports(folder: str) -> None:
    found = objects(folder)
    config = Config.model_validate(
        yaml.safe_load(found["ConfigMap", "skyserve-config"]["data"]["config.yaml"])
    )
    pod = found["Deployment", "skyserve-controller"]["spec"]["template"]
    (main,) = pod["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in main["ports"]}
    listen = config.controller.listen
    assert listen is not None
    assert (listen.port, config.controller.metrics_port) == (ports["api"], ports["metrics"])
    assert config.controller.metrics_host == listen.host == config.load_balancer.host == "0.0.0.0"
    (tls,) = [one["mountPath"] for one in main["volumeMounts"] if one["name"] == "tls"]
    assert {listen.certfile, listen.keyfile} == {f"{tls}/tls.crt", f"{tls}/tls.key"}
    api, endpoints = found["Service", "skyserve-api"]["spec"], found["Service", "skyserve-endpoints"]["spec"]
    assert [one["targetPort"] for one in api["ports"]] == [ports["api"]]
    opened = {one["targetPort"] for one in endpoints["ports"]}
    assert opened <= set(range(config.load_balancer.first_port, config.load_balancer.last_port + 1))
    for selector in (api["selector"], endpoints["selector"]):
        assert selector == {**CONTROLLERS, LABEL: "true"}
    assert pod["metadata"]["labels"].items() >= CONTROLLERS.items()
    assert MANAGED not in pod["metadata"]["labels"]  # by which replicas are found


@controllers
def test_engines_are_reached_from_controllers_and_load_balancers_alone(folder: str) -> None:
    found = objects(folder)
    engines = found["NetworkPolicy", "skyserve-replicas"]["spec"]
    assert engines["podSelector"] == {
        "matchLabels": {MANAGED: MANAGER},
        "matchExpressions": [{"key": ROLE_LABEL, "operator": "DoesNotExist"}],
    }
    assert engines["policyTypes"] == ["Ingress"]
    (rule,) = engines["ingress"]
    assert [one["podSelector"]["matchLabels"] for one in rule["from"]] == [CONTROLLERS, {MANAGED: MANAGER}]
    balancers = found["NetworkPolicy", "skyserve-load-balancers"]["spec"]
    assert balancers["podSelector"]["matchLabels"] == {ROLE_LABEL: ROLE}
    for_all, for_controllers = balancers["ingress"]
    assert "from" not in for_all
    assert not any(one["port"] <= ADMIN_PORT <= one["endPort"] for one in for_all["ports"])
    assert for_controllers["ports"] == [{"protocol": "TCP", "port": ADMIN_PORT}]
    assert [one["podSelector"]["matchLabels"] for one in for_controllers["from"]] == [CONTROLLERS]
    own = found["NetworkPolicy", "skyserve-controller"]["spec"]
    assert own["podSelector"]["matchLabels"] == CONTROLLERS
    services = {name: one["spec"] for (kind, name), one in found.items() if kind == "Service"}
    used = {one["port"] for service in services.values() for one in service["ports"]}
    assert {one["port"] for one in own["ingress"][0]["ports"]} == used


def test_two_controllers_have_one_database_and_the_same_keys_and_one_has_a_volume() -> None:
    two, one = objects("two-controllers"), objects("one-controller")
    assert ("PersistentVolumeClaim", "skyserve-home") not in two
    assert ("PodDisruptionBudget", "skyserve-controller") not in one
    budget = two["PodDisruptionBudget", "skyserve-controller"]["spec"]
    deployment = two["Deployment", "skyserve-controller"]["spec"]
    assert budget["minAvailable"] < deployment["replicas"] == 2
    spec = deployment["template"]["spec"]
    (database,) = [each for each in spec["containers"][0]["env"] if each["name"] == "SKYSERVE_DB"]
    assert database["valueFrom"] == {"secretKeyRef": {"name": "skyserve-database", "key": "url"}}
    script = spec["initContainers"][0]["command"][-1]
    assert "sealing.key machines.key metrics.token" in script
    single = one["Deployment", "skyserve-controller"]["spec"]
    assert (single["replicas"], single["strategy"]) == (1, {"type": "Recreate"})
    assert not any(
        each["name"] == "SKYSERVE_DB" for each in single["template"]["spec"]["containers"][0]["env"]
    )
    assert {"name": "home", "persistentVolumeClaim": {"claimName": "skyserve-home"}} in single["template"][
        "spec"
    ]["volumes"]


def test_nothing_secret_is_in_the_manifests() -> None:
    for variant in VARIANTS:
        assert not any(kind == "Secret" for kind, _ in objects(variant.folder))


def test_prometheus_finds_every_controller() -> None:
    (monitor,) = objects("monitoring").values()
    service = objects("two-controllers")["Service", "skyserve-metrics"]
    assert service["metadata"]["labels"].items() >= monitor["spec"]["selector"]["matchLabels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {one["name"] for one in service["spec"]["ports"]}
    assert endpoint["authorization"]["credentials"] == {"name": "skyserve-keys", "key": "metrics.token"}
    assert LABEL not in service["spec"]["selector"]
