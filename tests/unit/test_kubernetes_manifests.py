"""The permissions that the product prints, and what it makes in a cluster for its leases: no more rights than the code uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from provisioners import permissions
from provisioners.kubernetes import api
from provisioners.kubernetes.check import needed
from provisioners.kubernetes.dead_man import job_of, lease_of
from provisioners.kubernetes.settings import Cluster
from tests.clouds.kubernetes.kube_schemas import check

_KINDS = {"pod": "pods", "secret": "secrets", "service": "services", "deployment": "deployments"}


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(permissions.text_of("kubernetes"), id="role"),
        pytest.param(permissions.text_of("kubernetes-reaper"), id="reaper"),
    ],
)
def test_every_object_passes_the_schema_of_its_kind(text: str) -> None:
    found = documents(text)
    assert found
    for one in found:
        check(one)


def test_the_lease_and_the_cron_job_are_objects_that_kubernetes_knows() -> None:
    cluster = Cluster("prod", reaper_account="skyserve-reaper")
    check(lease_of("me", 3600, 1_800_000_000.5))
    check(job_of("me", "ml", cluster))


def test_the_role_allows_what_the_code_calls_and_no_more() -> None:
    """The calls are those of the client in `api`, by the kinds that are used with them."""
    source = "\n".join(
        path.read_text() for path in Path(api.__file__).parent.glob("*.py") if path.name != "dead_man.py"
    )
    used = {("watch", resource, "") for resource in ("nodes", "pods", "deployments")}
    used |= {("list", "nodes", ""), ("list", "events", ""), ("create", "events", ""), ("get", "pods", "log")}
    for call, verb in (
        ("create", "create"),
        ("find", "get"),
        ("patch", "patch"),
        ("delete", "delete"),
        ("replace", "update"),
        ("list", "list"),
    ):
        for kind in re.findall(rf'api\.{call}\(\s*"(pod|secret|service|deployment)"', source):
            used.add((verb, _KINDS[kind], ""))
    for verb in ("create", "get"):  # whose kind is a variable in `machines` and `agents`
        used |= {(verb, "secrets", ""), (verb, "services", "")}
    used.add(("create", "poddisruptionbudgets", ""))
    allowed = {(one["verb"], one["resource"], one.get("subresource", "")) for one, _ in needed()}
    assert allowed == used
