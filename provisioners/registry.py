"""Names of clouds and what stands for them. A cloud's module, and with it its SDK, is imported on first use."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from provisioners.port.base import Provisioner

PROVISIONERS: Mapping[str, str] = MappingProxyType(
    {
        "local": "provisioners.local.cloud:LocalProvisioner",
        "aws": "provisioners.aws.cloud:AwsProvisioner",
        "gcp": "provisioners.gcp.cloud:GcpProvisioner",
        "azure": "provisioners.azure.cloud:AzureProvisioner",
        "kubernetes": "provisioners.kubernetes.cloud:KubernetesProvisioner",
        "ssh": "provisioners.ssh.cloud:SshProvisioner",
    }
)


_OURS = frozenset({"policies", "provisioners"})


class UnknownCloudError(LookupError):
    """Nothing of that name is registered; the message lists the others."""


class MissingSdkError(ImportError):
    """The cloud's SDK, one of our extras, is not installed; the message explains how."""


def provisioner_class(name: str, known: Mapping[str, str] = PROVISIONERS) -> type[Provisioner]:
    """Return the class behind a cloud's name. What its constructor takes is the cloud's own business.

    Raises UnknownCloudError, and MissingSdkError where the cloud's SDK is not installed.
    """
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownCloudError(f"there is no cloud {name!r} (known: {', '.join(sorted(known))}){hint}")
    module, _, attribute = known[name].partition(":")
    try:
        found: type[Provisioner] = getattr(import_module(module), attribute)
    except ImportError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise  # a defect of ours, which no installation fixes
        if isinstance(error, ModuleNotFoundError):
            what = f"is not installed: run pip install -e '.[{name}]' in the checkout of skyserve"
        else:
            what = f"is too old, or too new: run pip install --upgrade -e '.[{name}]' in the checkout of skyserve"
        raise MissingSdkError(f"the SDK of {name} {what} ({error})", name=error.name) from error
    return found
