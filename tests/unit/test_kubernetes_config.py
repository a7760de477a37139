"""`clouds.kubernetes` of config.yaml, and where `infra` leads."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from provisioners.kubernetes.settings import NodePool, NodePrice
from skyserve_cli.config_kubernetes import KubernetesConfig
from skyserve_cli.spec.infra import InfraPlace, InvalidInfra, parse_infra


def config(**section: Any) -> KubernetesConfig:
    return KubernetesConfig.model_validate(section)


def test_without_settings_it_is_the_current_context() -> None:
    (found,) = config().clusters()
    assert (found.region, found.context, found.namespace) == ("default", None, None)


def test_a_context_has_a_region_for_each_namespace() -> None:
    section = config(contexts={"prod": {"context": "gke_p_r_c", "namespaces": ["ml", "batch"]}, "lab": {}})
    found = [(one.region, one.context, one.namespace, one.is_first) for one in section.clusters()]
    assert found == [
        ("prod", "gke_p_r_c", "ml", True),
        ("prod:batch", "gke_p_r_c", "batch", False),
        ("lab", "lab", None, True),
    ]


def test_pools_and_prices() -> None:
    pool = {"zone": "z", "accelerators": {"L4": 2}, "cpus": 7, "memory_gb": 26, "spot": True}
    (found,) = config(contexts={"p": {"pools": [pool], "prices": {"L4": {"usd_hour": 0.7}}}}).clusters()
    assert found.pools == (NodePool("z", "L4", 2, 7.0, 26.0, spot=True),)
    assert found.prices == {"L4": NodePrice(0.7, None)}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"contexts": {"a/b": {}}}, "choose one without / and :"),
        ({"contexts": {"a": {"namespaces": ["Not_a_name"]}}}, "no name of a namespace"),
        ({"contexts": {"a": {"tolerations": [{"keyy": "x"}]}}}, "did you mean key?"),
        ({"contexts": {"a": {"pools": [{"zone": "z", "accelerators": {"L4": 0}}]}}}, "whole accelerators"),
        ({"contexts": {"a": {"namespace": "x"}}}, "namespace"),
    ],
)
def test_what_is_wrong_with_a_section(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KubernetesConfig.model_validate(section)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("kubernetes", InfraPlace("kubernetes")),
        ("k8s", InfraPlace("kubernetes")),
        ("kubernetes/prod", InfraPlace("kubernetes", "prod")),
        ("kubernetes/prod/ml", InfraPlace("kubernetes", "prod:ml")),
        ("Kubernetes/prod/ml/us-east-1a", InfraPlace("kubernetes", "prod:ml", "us-east-1a")),
        ("kubernetes/prod/*/us-east-1a", InfraPlace("kubernetes", "prod", "us-east-1a")),
        ("kubernetes/*", InfraPlace("kubernetes")),
    ],
)
def test_where_infra_leads(text: str, place: InfraPlace) -> None:
    assert parse_infra(text, "resources.infra") == place


@pytest.mark.parametrize("text", ["kubernetes//ml", "kubernetes/a/b/c/d", "kubernetes/*/ml"])
def test_what_is_no_place_in_a_cluster(text: str) -> None:
    assert isinstance(parse_infra(text, "resources.infra"), InvalidInfra)
