"""Bring services up, watch them and take them down from Python, as `serve` does from a shell.

    import skyserve

    client = skyserve.Client()
    service = client.up("service.yaml")          # starts a controller if none runs, and waits for the endpoint
    print(service.endpoint, service.usd_per_hour)
    for event in client.events(service.name):
        print(event.at, event.kind, event.message)
    client.down(service.name)

All calls block. Values are snapshots; `json` of a value has every field of the controller's API (docs/reference).
"""

from skyserve.client import Client, ServiceFailedError, WaitTimeoutError
from skyserve.values import Event, Launch, Plan, Replica, Service
from skyserve_cli.controller.api.client import ControllerDownError, RefusedError, UnreachableError
from skyserve_cli.spec import SpecError
from skyserve_cli.spec.load import Loaded as Spec

__all__ = [
    "Client",
    "ControllerDownError",
    "Event",
    "Launch",
    "Plan",
    "RefusedError",
    "Replica",
    "Service",
    "ServiceFailedError",
    "Spec",
    "SpecError",
    "UnreachableError",
    "WaitTimeoutError",
]
