"""Names of clouds and what stands for them. A cloud's module, and with it its SDK, is imported on first use."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from provisioners.base import Provisioner

PROVISIONERS: Mapping[str, str] = MappingProxyType(
    {
        "local": "provisioners.local.cloud:LocalProvisioner",
        "aws": "provisioners.aws.cloud:AwsProvisioner",
        "ssh": "provisioners.ssh.cloud:SshProvisioner",
        "fake": "provisioners.fake:FakeProvisioner",
    }
)


class UnknownCloudError(LookupError):
    """Nothing of that name is registered; the message lists what is."""


def provisioner_class(name: str, known: Mapping[str, str] = PROVISIONERS) -> type[Provisioner]:
    """The class behind a cloud's name. What its constructor takes is the cloud's own business."""
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownCloudError(f"there is no cloud {name!r} (known: {', '.join(sorted(known))}){hint}")
    module, _, attribute = known[name].partition(":")
    found: type[Provisioner] = getattr(import_module(module), attribute)
    return found
