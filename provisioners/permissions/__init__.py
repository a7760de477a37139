"""The smallest set of permissions with which each cloud can be used, in the form in which the cloud takes it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

FILES: Mapping[str, str] = MappingProxyType(
    {
        "aws": "aws.json",
        "gcp": "gcp.yaml",
        "azure": "azure.json",
        "kubernetes": "kubernetes.yaml",
        "gcp-machine": "gcp-machine.yaml",
        "gcp-network": "gcp-network.yaml",
        "azure-machine": "azure-machine.json",
        "kubernetes-reaper": "kubernetes-reaper.yaml",
    }
)


def text_of(cloud: str) -> str:
    """Return the file of a cloud, by its name.

    CLOUD-machine is the identity by which a machine deletes itself, gcp-network the project whose networks are used. It is an IAM policy (aws), a custom role for `gcloud iam roles create` (gcp) or for
    `az role definition create` (azure), or roles for `kubectl apply` (kubernetes). KeyError for a cloud that has none.
    """
    return (files(__package__) / FILES[cloud]).read_text(encoding="utf-8")
