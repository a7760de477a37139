"""Meadow, a small cloud, as a plug-in: machines with names, and neither tags nor user data nor idempotency tokens."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from policies.model import CapacityType, Scope, Zone
from provisioners.name_tags import name_of, openings_of, parse
from provisioners.offers.catalog.model import Listing, Origin, Price, Quality, Shape
from provisioners.plugins import CloudPlugin, Setup
from provisioners.port.errors import (
    AuthError,
    CapacityError,
    InvalidRequestError,
    ProvisionError,
    QuotaError,
    RefusedError,
    TransientError,
)
from provisioners.port.firewall import ANYWHERE, SSH_PORT, FirewallAccess
from provisioners.port.regions import ClosedRegions
from provisioners.port.vm import Finding, Level, Machine, MachineOrder, MachineState, OrphanedResource, Silent
from skyserve_cli.config_clouds import RentedConfig

NAME = "meadow"
REGIONS = {"north": ("north-1", "north-2"), "south": ("south-1",)}
_STATES = {
    "booting": MachineState.PENDING,
    "up": MachineState.RUNNING,
    "deleted": MachineState.TERMINATED,
    "reclaimed": MachineState.PREEMPTED,
}


class MeadowConfig(RentedConfig):
    api_key_file: str = Field(description="a file with nothing but the key, readable by you alone")
    url: str = Field(default="https://api.meadow.example/v1", pattern=r"^https?://")


def listings() -> Iterable[Listing]:
    origin = Origin("https://meadow.example/prices", 1_760_000_000.0, Quality.EXACT)
    for name, count, usd_hour in (("sheep-1", 1.0, 0.60), ("sheep-2", 2.0, 1.15)):
        shape = Shape(NAME, name, "L4", count, 8.0 * count, 32.0 * count)
        for number, (region, zones) in enumerate(REGIONS.items()):
            on_demand = Price(round(usd_hour * (1 + 0.1 * number), 3), origin)
            yield Listing(
                shape, region, on_demand, dict.fromkeys(zones, Price(on_demand.usd_hour / 2, origin))
            )


class Meadow:
    """Names are unique among living machines, so a launch whose response was lost is found by its name.

    Deleted machines are listed for an hour.
    """

    name: ClassVar[str] = NAME

    def __init__(self, setup: Setup) -> None:
        self._url, self._key_file = setup.section.url, setup.section.api_key_file
        self.closed = ClosedRegions(setup.now)
        self._launching = threading.Lock()

    def create(self, order: MachineOrder) -> Machine:
        if order.zone.name not in REGIONS.get(order.zone.region, ()):
            raise InvalidRequestError(f"meadow has no zone {order.zone}", cloud=NAME, zone=order.zone)
        allowed = {
            **dict.fromkeys(order.ports, order.sources),
            **dict.fromkeys(order.public_ports, (ANYWHERE,)),
        }
        body = {
            "name": name_of(order),
            "type": order.instance_type,
            "zone": order.zone.name,
            "spot": order.capacity_type is CapacityType.SPOT,
            "ssh_key": order.public_key,
            "allow": {
                str(port): list(sources) for port, sources in {SSH_PORT: order.sources, **allowed}.items()
            },
        }
        with self._launching:
            made = self._named(body["name"])  # a dead one, too: the same order is the same machine
            if made is None:
                try:
                    made = self._call("POST", "/machines", body, order.zone)
                except TransientError as error:
                    if error.code != "name_taken":
                        raise
                    made = self._named(body["name"]) or {}
        machine = self._machine(made, order.owner)
        if machine is None:
            raise TransientError("meadow returned no machine", cloud=NAME, zone=order.zone)
        return machine

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        listed = self._call("GET", "/machines")["machines"]
        return [one for one in (self._machine(each, owner) for each in listed) if one is not None]

    def destroy(self, machine: Machine) -> None:
        self._call("DELETE", f"/machines/{machine.id}", gone_is_fine=True)

    def admit(self, owner: str, access: FirewallAccess) -> None:
        for each in self._call("GET", "/machines")["machines"]:
            named = parse(each["name"], owner)
            if named is None or _STATES[each["status"]].is_gone:
                continue
            ports = [int(port) for port in each["allow"] if int(port) != SSH_PORT]
            public = [port for port in ports if each["allow"][str(port)] == [ANYWHERE]]
            wanted: dict[str, list[str]] = {str(port): [] for port in (SSH_PORT, *ports)}
            for port, source in sorted(openings_of(access, named, set(ports) - set(public), public)):
                wanted[str(port)].append(source)
            if wanted != each["allow"]:
                self._call("PUT", f"/machines/{each['id']}/allow", wanted, gone_is_fine=True)

    def check(self) -> Sequence[Finding]:
        try:
            self._call("GET", "/machines")
        except ProvisionError as error:
            return [Finding("API key", Level.MISSING, error.message)]
        return [Finding("API key")]

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        return {}  # they are those of the price list

    def orphans(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return ()  # disks and addresses end with their machine

    def remove(self, orphan: OrphanedResource) -> None: ...

    def shared(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        return ()

    def delete_shared(self, owner: str) -> Sequence[str]:
        return ()

    def _named(self, name: str) -> dict[str, Any] | None:
        return next(
            (each for each in self._call("GET", "/machines")["machines"] if each["name"] == name), None
        )

    def _machine(self, each: Mapping[str, Any], owner: str) -> Machine | None:
        named = parse(each["name"], owner) if each else None
        if named is None:
            return None
        region = next(region for region, zones in REGIONS.items() if each["zone"] in zones)
        return Machine(
            each["id"], named.token, owner, named.service, named.replica_id, named.rank, named.num_nodes,
            Zone(NAME, region, each["zone"]), named.capacity_type, _STATES[each["status"]],
            address=each["ip"], private_address=each["ip"], launched_at=each["created_at"],
            instance_type=each["type"], message="reclaimed by meadow" * (each["status"] == "reclaimed"),
        )  # fmt: skip

    def _call(
        self, method: str, path: str, body: Any = None, zone: Zone | None = None, gone_is_fine: bool = False
    ) -> Any:
        key = Path(self._key_file).expanduser().read_text(encoding="utf-8").strip()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=20) as response:  # noqa: S310
                return json.loads(response.read(1 << 24) or b"null")
        except urllib.error.HTTPError as error:
            code = str(_error_of(error).get("code", error.code))
            if gone_is_fine and error.code == 404:
                return None
            raise _meaning(code, error.code, zone) from error
        except (OSError, ValueError) as error:
            raise TransientError(f"meadow did not respond: {error}", cloud=NAME, zone=zone) from error


def _error_of(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        return dict(json.loads(error.read(1 << 16))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _meaning(code: str, status: int, zone: Zone | None) -> ProvisionError:
    if status == 401:
        return AuthError(
            "meadow does not accept the API key: see clouds.meadow.api_key_file", cloud=NAME, code=code
        )
    if code == "no_room":
        return CapacityError("meadow has no room for it now", cloud=NAME, code=code, zone=zone)
    if code == "quota":
        return QuotaError(
            "meadow's quota MACHINES is used up", cloud=NAME, code=code, zone=zone, scope=Scope.CLOUD
        )
    if status >= 500 or status in (408, 409, 429):
        return TransientError(f"meadow cannot do it now ({code})", cloud=NAME, code=code, zone=zone)
    return RefusedError(f"meadow refuses it ({code})", cloud=NAME, code=code, zone=zone)


PLUGIN = CloudPlugin(name=NAME, machines=Meadow, listings=listings, section=MeadowConfig, first_user="root")
