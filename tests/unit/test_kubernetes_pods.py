"""What an order becomes, and what the cluster's refusals mean: all of it pure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.model import CapacityType, FailureKind, Offer, Scope, Zone
from provisioners.kubernetes import placement, translate
from provisioners.kubernetes.errors import error_of
from provisioners.kubernetes.files import MOST, packed
from provisioners.kubernetes.logs import PodLogs
from provisioners.kubernetes.quantities import amount, unix_s
from provisioners.kubernetes.settings import Cluster
from provisioners.port.base import LaunchOrder
from provisioners.port.errors import InvalidRequestError, QuotaError, TransientError
from tests.clouds.kubernetes.kube_schemas import check

NOW = 1_800_000_000.0
CREATED = "2027-01-15T08:00:00Z"  # NOW
ZONE = Zone("kubernetes", "prod", "zone-a")
CLUSTER = Cluster("prod")
L4 = Offer(ZONE, "4cpu-16gb", "L4", 2.0, CapacityType.SPOT, 0.4)
ORDER = LaunchOrder("chat-1", "me", "chat", 1, 1, L4, setup="pip install x", run="serve $HOME $(date) $$")


# --- orders ---------------------------------------------------------------------------------------------------


def test_an_order_becomes_objects_that_kubernetes_knows(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("print()")
    order = replace(
        ORDER,
        workdir=str(tmp_path),
        num_nodes=2,
        env={"SKYPILOT_DOCKER_USERNAME": "me", "SKYPILOT_DOCKER_SERVER": "r.example.com"},
        secrets={"SKYPILOT_DOCKER_PASSWORD": "s3cret"},
        image="docker:team/engine:1",
        labels={"team": "search", "note": "not a label: it has spaces"},
        file_mounts={"/data/x.py": str(tmp_path / "main.py"), "weights": "s3://bucket/weights"},
    )
    files = packed(order)
    cluster = replace(CLUSTER, service_account="engines", priority_class="high", runtime_class="nvidia")
    made = translate.pod_of(order, 0, cluster, "ml", [("nvidia.com/gpu.product", "NVIDIA-L4")], files)
    stored = {**made, "metadata": {**made["metadata"], "uid": "u1"}}
    objects = [made, *translate.secrets_of(order, stored, files), *translate.services_of(order, stored)]
    for one in objects:
        check(one)
    assert [one["kind"] for one in objects] == [
        "Pod",
        "Secret",
        "Secret",
        "Secret",
        "Secret",
        "Service",
        "Service",
    ]
    assert "s3cret" not in json.dumps(made)
    assert made["spec"]["containers"][0]["image"] == "r.example.com/team/engine:1"
    assert made["metadata"]["labels"]["team"] == "search"
    assert made["metadata"]["annotations"]["note"].startswith("not a label")
    assert made == translate.pod_of(order, 0, cluster, "ml", [("nvidia.com/gpu.product", "NVIDIA-L4")], files)


def test_gpus_are_requested_by_the_name_of_their_resource_and_nodes_by_what_they_say() -> None:
    made = translate.pod_of(ORDER, 0, CLUSTER, "ml", [("nvidia.com/gpu.product", "NVIDIA-L4")])
    (main,) = made["spec"]["containers"]
    assert main["resources"] == {
        "requests": {"cpu": "4", "memory": "16G", "nvidia.com/gpu": "2"},
        "limits": {"nvidia.com/gpu": "2"},
    }
    terms = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    expressions = [one["matchExpressions"] for one in terms["nodeSelectorTerms"]]
    assert all(
        each[0] == {"key": placement.ZONE_LABEL, "operator": "In", "values": ["zone-a"]}
        for each in expressions
    )
    assert all(each[-1]["values"] == ["NVIDIA-L4"] for each in expressions)
    assert [each[1]["key"] for each in expressions] == [key for key, _ in placement.SPOT_LABELS]
    keys = [one["key"] for one in made["spec"]["tolerations"]]
    assert "nvidia.com/gpu" in keys
    assert "cloud.google.com/gke-spot" in keys


def test_the_kubelet_expands_nothing_of_the_users_scripts() -> None:
    made = translate.pod_of(ORDER, 0, CLUSTER, "ml")
    (main,) = made["spec"]["containers"]
    run = next(one["value"] for one in main["env"] if one["name"] == "SKYSERVE_RUN")
    assert run == "serve $$HOME $$(date) $$$$"


def test_files_that_do_not_fit_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with (tmp_path / "weights").open("wb") as file:
        import random

        file.write(random.Random(1).randbytes(MOST + 1024))
    with pytest.raises(InvalidRequestError, match=r"8 MiB when packed.*\.skyignore.*bucket"):
        packed(replace(ORDER, workdir=str(tmp_path)))


def test_a_variable_that_is_none_is_an_invalid_order() -> None:
    with pytest.raises(InvalidRequestError, match="A-B"):
        translate.check_order(replace(ORDER, env={"A-B": "1"}), ["prod"])


# --- refusals -------------------------------------------------------------------------------------------------


def status(code: int, reason: str, message: str) -> str:
    return json.dumps({"kind": "Status", "code": code, "reason": reason, "message": message})


@pytest.mark.parametrize(
    ("code", "reason", "message", "kind", "scope"),
    [
        (
            403,
            "Forbidden",
            'pods "x" is forbidden: exceeded quota: q, requested: pods=1',
            FailureKind.QUOTA,
            Scope.REGION,
        ),
        (
            403,
            "Forbidden",
            'pods is forbidden: User "u" cannot create resource "pods"',
            FailureKind.AUTH,
            Scope.REGION,
        ),
        (
            403,
            "Forbidden",
            'pods "x" is forbidden: maximum cpu usage per Container is 2',
            FailureKind.REFUSED,
            Scope.TYPE,
        ),
        (
            403,
            "Forbidden",
            'pods "x" is forbidden: violates PodSecurity "restricted"',
            FailureKind.REFUSED,
            Scope.REGION,
        ),
        (
            403,
            "Forbidden",
            "unable to create new content in namespace x because it is being terminated",
            FailureKind.TRANSIENT,
            None,
        ),
        (401, "Unauthorized", "Unauthorized", FailureKind.AUTH, Scope.REGION),
        (404, "NotFound", 'namespaces "x" not found', FailureKind.REFUSED, Scope.REGION),
        (409, "Conflict", "Operation cannot be fulfilled", FailureKind.TRANSIENT, None),
        (422, "Invalid", 'Pod "x" is invalid', FailureKind.REFUSED, None),
        (400, "BadRequest", 'admission webhook "w" denied the request', FailureKind.REFUSED, Scope.REGION),
        (429, "TooManyRequests", "slow down", FailureKind.TRANSIENT, None),
        (503, "ServiceUnavailable", "apiserver is shutting down", FailureKind.TRANSIENT, None),
        (599, "", "", FailureKind.TRANSIENT, None),
        (418, "", "", FailureKind.REFUSED, None),
    ],
)
def test_what_a_refusal_means(
    code: int, reason: str, message: str, kind: FailureKind, scope: Scope | None
) -> None:
    found = error_of(code, status(code, reason, message), ZONE)
    assert (found.kind, found.scope, found.zone) == (kind, scope, ZONE)
    assert found.message.startswith(message)


def test_the_server_says_when_to_come_again() -> None:
    found = error_of(429, "busy", None, "7")
    assert isinstance(found, TransientError)
    assert found.retry_after_s == 7.0
    assert found.message == "busy"


def test_a_quota_is_named() -> None:
    found = error_of(403, status(403, "Forbidden", "exceeded quota: team-quota, requested: pods=1"))
    assert isinstance(found, QuotaError)
    assert "team-quota" in found.message


# --- amounts and logs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", 0.5),
        ("2", 2),
        ("16Gi", 16 * 1024**3),
        ("1e3", 1000),
        ("7910m", 7.91),
        (None, 0),
        ("x", 0),
        (3, 3),
    ],
)
def test_amounts(text: Any, number: float) -> None:
    assert amount(text) == pytest.approx(number)


def test_instants() -> None:
    assert unix_s(CREATED) == NOW
    assert unix_s("2027-01-15T08:00:00.123456789Z") == pytest.approx(NOW + 0.123456, abs=1e-5)
    assert unix_s(None) is None
    assert unix_s("yesterday") is None


def test_lines_of_a_log_come_once_though_they_are_fetched_again() -> None:
    clock = [NOW]
    logs = PodLogs(lambda: clock[0])
    lines = [
        f"2027-01-15T08:00:0{second}.{part}Z line {second}.{part}\n" for second in range(3) for part in (1, 5)
    ]
    asked: list[int | None] = []

    def fetch(seconds: int | None, _most: int) -> bytes:
        asked.append(seconds)
        return "".join(lines[: len(asked) * 3]).encode()

    assert logs.read("u", fetch, 0, 1000) == b"line 0.1\nline 0.5\nline 1.1\n"
    clock[0] = NOW + 10.0
    assert logs.read("u", fetch, 27, 1000) == b"line 1.5\nline 2.1\nline 2.5\n"
    assert logs.window("u", fetch) == (0, 54)
    assert asked == [None, 69]  # nine seconds, and a minute for clocks that differ
    assert logs.times("u", fetch, 0.0, 0, 10).splitlines()[0] == b"1800000000.1 0"
