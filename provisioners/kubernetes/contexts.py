"""The contexts of a kubeconfig, by name."""

from __future__ import annotations

from typing import NamedTuple

from kubernetes import config as kube_config

from provisioners.kubernetes.errors import CLOUD
from provisioners.port.errors import AuthError


class KubeContexts(NamedTuple):
    """`namespaces` has the namespace of each context ("": it names none), `current` is the one in use."""

    current: str
    namespaces: dict[str, str]


def contexts_of(kubeconfig: str | None) -> KubeContexts:
    """Raise AuthError if there is no kubeconfig that can be read."""
    try:
        found, active = kube_config.list_kube_config_contexts(config_file=kubeconfig)
    except kube_config.ConfigException as error:
        raise AuthError(f"the kubeconfig cannot be used: {error}", cloud=CLOUD) from error
    named = {str(one["name"]): str(one["context"].get("namespace") or "") for one in found}
    return KubeContexts(str(active["name"]), named)
