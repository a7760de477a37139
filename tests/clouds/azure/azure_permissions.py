"""Which action a request to Azure Resource Manager needs, as "Azure permissions" (role-based access control) names them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

_VERBS = {"GET": "read", "HEAD": "read", "PUT": "write", "PATCH": "write", "DELETE": "delete"}
_SUBSCRIPTION = "Microsoft.Resources/subscriptions"

# A machine is created with its disk, card and address by one PUT, which needs the actions of all of them.
_WITH_A_MACHINE = (
    "Microsoft.Compute/disks/write",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Network/networkSecurityGroups/join/action",
    "Microsoft.Network/virtualNetworks/subnets/join/action",
)
_WITH_AN_ADDRESS = (
    "Microsoft.Network/publicIPAddresses/write",
    "Microsoft.Network/publicIPAddresses/join/action",
)


def needs_of(method: str, rest: str, has_address: bool, contained: Collection[str]) -> Iterator[str]:
    """The actions of a request. `rest`: its path below the subscription. `has_address`: whether a machine in its body
    gets a public address. `contained`: the types (provider/type) in the group that it deletes."""
    verb = _VERBS.get(method, "action")
    if rest == "":
        yield f"{_SUBSCRIPTION}/read"
    elif re.fullmatch(r"/resourcegroups(/[^/]+)?", rest, re.I):
        yield f"{_SUBSCRIPTION}/resourceGroups/{verb}"
        if method == "DELETE":
            yield from (f"{kind}/delete" for kind in contained)
    elif match := re.fullmatch(r"/providers/([^/]+)/register", rest, re.I):
        yield f"{match[1]}/register/action"
    elif re.fullmatch(r"/providers/[^/]+", rest, re.I):
        yield f"{_SUBSCRIPTION}/providers/read"
    elif match := re.fullmatch(r"/providers/([^/]+)/locations/[^/]+/(\w+)", rest, re.I):
        yield f"{match[1]}/locations/{match[2]}/{verb}"
    elif match := re.search(r"/providers/([^/]+/[^/]+)(/[^/]+)?$", rest, re.I):
        yield f"{match[1]}/{verb}"
        is_machine = match[1].lower() == "microsoft.compute/virtualmachines"
        if is_machine and method == "PUT":
            yield from _WITH_A_MACHINE
            if has_address:
                yield from _WITH_AN_ADDRESS
        if is_machine and method == "DELETE":  # what it takes with it
            yield from ("Microsoft.Compute/disks/delete", "Microsoft.Network/networkInterfaces/delete")
