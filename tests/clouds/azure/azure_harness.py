"""AzureMachines on the real SDK, talking to a world of ours; and a way to end it in the middle of anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from azure.core.credentials import AccessToken
from azure.core.pipeline.policies import SansIOHTTPPolicy

from policies.model import CapacityType, Zone
from provisioners.azure.machines import AzureMachines
from provisioners.azure.settings import AzureSettings
from provisioners.port.vm import MachineOrder
from tests.clouds.azure.azure_server import AzureServer

OWNER, SERVICE = "owner-1", "chat"
EASTUS_1 = Zone("azure", "eastus", "eastus-1")
T4 = "Standard_NC4as_T4_v3"


class Crash(BaseException):
    """The process ends here. No `except Exception` may get in its way."""


class Killer:
    """Ends the process at the n-th HTTP call (from 0), before it is sent or when its effect is there. None: never."""

    def __init__(self, at: int | None = None, is_after: bool = False) -> None:
        self.at, self.is_after, self.seen = at, is_after, -1

    def sending(self) -> None:
        self.seen += 1
        if self.seen == self.at and not self.is_after:
            raise Crash

    def responded(self) -> None:
        if self.seen == self.at and self.is_after:
            raise Crash


class PlainToken(SansIOHTTPPolicy[Any, Any]):
    """The token without TLS, which the SDK's own policy refuses."""

    def __init__(self, token: Callable[[], str], killer: Killer) -> None:
        self._token, self._killer = token, killer

    def on_request(self, request: Any) -> None:
        request.http_request.headers["Authorization"] = f"Bearer {self._token()}"
        self._killer.sending()

    def on_response(self, request: Any, response: Any) -> None:
        self._killer.responded()


class StaticCredential:
    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        return AccessToken("unused", 2_000_000_000)


def azure(
    server: AzureServer, killer: Killer | None = None, token: str | None = None, **settings: Any
) -> AzureMachines:
    """A fresh one, as after a restart."""
    world = server.world
    return AzureMachines(
        AzureSettings(
            world.subscription,
            arm_url=server.url,
            prices_url=f"{server.url}/api/retail/prices",
            **{"regions": ("eastus",), **settings},
        ),
        credential=StaticCredential(),
        authentication_policy=PlainToken(lambda: token or "good-token", killer or Killer()),
        now=world.clock.now,
        sleep=world.clock.sleep,
        rng=random.Random(7),
    )


def order(name: str = "chat-7", **changes: Any) -> MachineOrder:
    values: dict[str, Any] = {
        "token": name,
        "owner": OWNER,
        "service": SERVICE,
        "replica_id": 7,
        "rank": 0,
        "num_nodes": 1,
        "zone": EASTUS_1,
        "instance_type": T4,
        "capacity_type": CapacityType.SPOT,
        "public_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA skyserve",
        "user_data": "#!/bin/sh\necho ready\n",
        "accelerator": "T4",
        "accelerator_count": 1.0,
        "ports": (8080,),
        "sources": ("198.51.100.7/32",),
        "labels": {"team": "ml"},
    }
    return MachineOrder(**(values | changes))
