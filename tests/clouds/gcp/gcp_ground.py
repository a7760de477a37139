"""What instances of the make-believe Google Cloud stand on: regions, machine types, networks, permissions, prices."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any
from zlib import crc32

from tests.clouds.gcp.gcp_discovery import Call
from tests.clouds.gcp.gcp_parts import HOST, Operation, Refusal, last, not_found, page_of

PROJECT = "proj-1"
SHARED = "host-1"  # the project of a Shared VPC, of whose machines there are none


_GONE = "The referenced network resource cannot be found."


@dataclass(frozen=True, slots=True)
class MachineType:
    cpus: int
    memory_mb: int
    accelerators: tuple[tuple[str, int], ...] = ()


MACHINE_TYPES = {
    "e2-small": MachineType(2, 2048),
    "n1-standard-4": MachineType(4, 15360),
    "n1-standard-8": MachineType(8, 30720),
    "g2-standard-4": MachineType(4, 16384, (("nvidia-l4", 1),)),
    "g2-standard-8": MachineType(8, 32768, (("nvidia-l4", 1),)),
    "a2-highgpu-1g": MachineType(12, 87040, (("nvidia-tesla-a100", 1),)),
}

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c", "us-east1-b", "europe-west4-a")


@dataclass
class Ground(ABC):
    zones: tuple[str, ...] = ZONES
    machine_types: Mapping[str, MachineType] = field(default_factory=lambda: dict(MACHINE_TYPES))
    not_offered: set[tuple[str, str]] = field(default_factory=set)  # (zone, machine type)
    guests: dict[str, tuple[str, ...]] = field(
        default_factory=lambda: {"us-central1-a": ("nvidia-tesla-t4",)}
    )
    quotas: dict[tuple[str, str], float] = field(
        default_factory=dict
    )  # (region, metric); region "" is the project's
    denied: set[str] = field(default_factory=set)  # permissions that the caller lacks
    role: frozenset[str] | None = None  # the permissions that the caller has; None is all of them
    skus: list[Mapping[str, Any]] = field(default_factory=list)
    api_key: str = "key-1"

    host_role: frozenset[str] | None = None  # the same in the project of the Shared VPC
    subnet_role: frozenset[str] | None = None  # permissions on each subnetwork beside the roles
    requires_os_login: bool = False  # constraints of the organisation
    requires_shielded: bool = False
    required_labels: frozenset[str] = frozenset()

    networks: dict[str, dict[str, Any]] = field(default_factory=dict)
    firewalls: dict[str, dict[str, Any]] = field(default_factory=dict)
    ready_networks: set[str] = field(default_factory=set)
    host_networks: dict[str, dict[str, Any]] = field(default_factory=dict)
    host_firewalls: dict[str, dict[str, Any]] = field(default_factory=dict)
    subnetworks: dict[str, dict[str, Any]] = field(default_factory=dict)  # by path
    routers: dict[str, list[tuple[str, dict[str, Any]]]] = field(
        default_factory=dict
    )  # (scope, router) by project
    instances: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    page_size: int = 500

    @abstractmethod
    def _operate(self, zone: str, kind: str, target: str, on_done: Callable[[], object]) -> Operation: ...

    @abstractmethod
    def _resource(self, kind: str, path: str, name: str) -> dict[str, Any]: ...

    @abstractmethod
    def _aggregated(self, kind: str, field_name: str, listed: list[tuple[str, Any]], call: Call) -> Any: ...

    def types_in(self, zone: str) -> list[str]:
        return [name for name in self.machine_types if (zone, name) not in self.not_offered]

    def guests_in(self, zone: str) -> tuple[str, ...]:
        return self.guests.get(zone, ())

    def reach(self, name: str, port: int, source: str) -> bool:
        """Whether the firewall lets this source (an address) reach a port of that instance."""
        instance = next(x for (_, own), x in self.instances.items() if own == name)
        tags = instance.get("tags", {}).get("items", [])
        rules = [*self.firewalls.values(), *self.host_firewalls.values()]
        return any(
            rule["network"] == instance["networkInterfaces"][0]["network"]
            and any(
                ip_network(source).subnet_of(ip_network(block))  # type: ignore[arg-type]
                for block in rule.get("sourceRanges", [])
            )
            and set(rule["targetTags"]) & set(tags)
            and any(str(port) in entry.get("ports", []) for entry in rule["allowed"])
            for rule in rules
        )

    # --- networks -------------------------------------------------------------------------------------------

    def networks_of(self, project: str) -> dict[str, dict[str, Any]]:
        return self.host_networks if project == SHARED else self.networks

    def firewalls_of(self, project: str) -> dict[str, dict[str, Any]]:
        return self.host_firewalls if project == SHARED else self.firewalls

    def attachment(self, zone: str, card: Mapping[str, Any]) -> dict[str, str]:
        """The network and the subnetwork of a card, as a response names them."""
        region = zone.rpartition("-")[0]
        path = card.get("subnetwork", "")
        if path:
            found = self.subnetworks.get(path)
            if found is None:
                raise _wrong("resource.networkInterfaces[0].subnetwork", path, _GONE)
            if found["region"] != f"{HOST}/projects/{path.split('/')[1]}/regions/{region}":
                raise _wrong(
                    "resource.networkInterfaces[0].subnetwork", path, f"Subnetwork is not in {region}."
                )
            return {"network": found["network"], "subnetwork": found["selfLink"]}
        network = self.check_network(PROJECT, card.get("network", ""))
        if not network["autoCreateSubnetworks"]:
            raise _wrong(
                "resource.networkInterfaces[0]",
                "",
                "Network interface must specify a subnet if the network resource is in custom subnet mode.",
            )
        name = network["name"]
        return {
            "network": network["selfLink"],
            "subnetwork": f"{HOST}/projects/{PROJECT}/regions/{region}/subnetworks/{name}",
        }

    def check_network(self, project: str, path: str) -> dict[str, Any]:
        """The network that a request in a project names."""
        name = last(path)
        owner = path.split("/")[1] if path.startswith("projects/") else project
        networks = self.networks_of(owner)
        whole = f"projects/{owner}/global/networks/{name}"
        if path not in (whole, f"{HOST}/{whole}", f"global/networks/{name}") or name not in networks:
            raise Refusal(
                400,
                "invalid",
                f"Invalid value for field 'resource.network': '{whole}'. {_GONE}",
            )
        if name not in self.ready_networks:
            raise Refusal(
                400,
                "resourceNotReady",
                f"The resource '{whole}' is not ready",
            )
        return networks[name]

    def add_network(self, name: str, *, project: str = PROJECT, is_auto: bool = True) -> None:
        """One that is there from the start."""
        self.networks_of(project)[name] = self._resource("network", f"global/networks/{name}", name) | {
            "selfLink": f"{HOST}/projects/{project}/global/networks/{name}",
            "autoCreateSubnetworks": is_auto,
        }
        self.ready_networks.add(name)

    def add_subnetwork(self, region: str, name: str, network: str, *, project: str = PROJECT) -> str:
        """One of a network that is there; its path."""
        path = f"projects/{project}/regions/{region}/subnetworks/{name}"
        self.subnetworks[path] = self._resource("subnetwork", path, name) | {
            "selfLink": f"{HOST}/{path}",
            "region": f"{HOST}/projects/{project}/regions/{region}",
            "network": self.networks_of(project)[network]["selfLink"],
        }
        return path

    def add_nat(self, region: str, network: str, *, project: str = PROJECT) -> None:
        """Cloud NAT for a network in a region."""
        name = f"nat-{network}-{region}"
        router = self._resource("router", f"regions/{region}/routers/{name}", name) | {
            "network": self.networks_of(project)[network]["selfLink"],
            "nats": [{"name": "nat", "natIpAllocateOption": "AUTO_ONLY"}],
        }
        self.routers.setdefault(project, []).append((f"regions/{region}", router))

    def get_subnetwork(self, call: Call, headers: Mapping[str, str]) -> Any:
        path = "projects/{project}/regions/{region}/subnetworks/{subnetwork}".format(**call.path)
        if path not in self.subnetworks:
            raise not_found(path)
        return self.subnetworks[path]

    def test_subnetwork(self, call: Call, headers: Mapping[str, str]) -> Any:
        path = "projects/{project}/regions/{region}/subnetworks/{resource}".format(**call.path)
        if path not in self.subnetworks:
            raise not_found(path)
        wanted = call.body["permissions"]
        return {"permissions": [name for name in wanted if self.allows(name, call.path["project"])]}

    def list_routers(self, call: Call, headers: Mapping[str, str]) -> Any:
        return self._aggregated("router", "routers", self.routers.get(call.path["project"], []), call)

    def get_network(self, call: Call, headers: Mapping[str, str]) -> Any:
        return _held(self.networks_of(call.path["project"]), "networks", call, "network")

    def insert_network(self, call: Call, headers: Mapping[str, str]) -> Any:
        limit = self.quotas.get(("", "NETWORKS"))
        if limit is not None and len(self.networks) >= limit:
            raise Refusal(403, "quotaExceeded", f"Quota 'NETWORKS' exceeded.  Limit: {limit:.1f} globally.")
        name = _new(self.networks, "networks", call)
        self.networks[name] = self._resource("network", f"global/networks/{name}", name) | call.body
        return self._operate("", "insert", f"networks/{name}", lambda: self.ready_networks.add(name)).view

    def delete_network(self, call: Call, headers: Mapping[str, str]) -> Any:
        name = call.path["network"]
        _held(self.networks, "networks", call, "network")
        users = [x["name"] for x in self.firewalls.values() if last(x["network"]) == name]
        users += [
            x["name"] for x in self.instances.values() if last(x["networkInterfaces"][0]["network"]) == name
        ]
        if users:
            raise Refusal(
                400,
                "resourceInUseByAnotherResource",
                f"The network resource 'projects/{PROJECT}/global/networks/{name}' is already being used by '{users[0]}'",
            )
        self.ready_networks.discard(name)
        return self._operate("", "delete", f"networks/{name}", lambda: self.networks.pop(name, None)).view

    def get_firewall(self, call: Call, headers: Mapping[str, str]) -> Any:
        return _held(self.firewalls_of(call.path["project"]), "firewalls", call, "firewall")

    def list_firewalls(self, call: Call, headers: Mapping[str, str]) -> Any:
        rules = list(self.firewalls_of(call.path["project"]).values())
        items, more = page_of(rules, call.query, self.page_size)
        return {"kind": "compute#firewallList", "id": "list", "items": items, **more}

    def insert_firewall(self, call: Call, headers: Mapping[str, str]) -> Any:
        project = call.path["project"]
        firewalls = self.firewalls_of(project)
        name, body = _new(firewalls, "firewalls", call), call.body
        network = self.check_network(project, body.get("network", ""))
        if network["name"] not in self.networks_of(project):
            raise _wrong("resource.network", body["network"], "A rule belongs to the project of its network.")
        if not body.get("allowed"):
            raise Refusal(
                400, "invalid", "Invalid value for field 'resource': a rule must allow or deny something."
            )
        firewalls[name] = (
            self._resource("firewall", f"global/firewalls/{name}", name)
            | body
            | {"network": network["selfLink"]}
        )
        return self._operate("", "insert", f"firewalls/{name}", lambda: None).view

    def update_firewall(self, call: Call, headers: Mapping[str, str]) -> Any:
        """What the body does not name is gone."""
        name, project = call.path["firewall"], call.path["project"]
        held = _held(self.firewalls_of(project), "firewalls", call, "firewall")
        if not call.body.get("sourceRanges") and not call.body.get("sourceTags"):
            call.body["sourceRanges"] = ["0.0.0.0/0"]
        network = self.check_network(project, call.body["network"])
        self.firewalls_of(project)[name] = (
            {key: held[key] for key in ("kind", "id", "selfLink", "creationTimestamp") if key in held}
            | call.body
            | {"network": network["selfLink"]}
        )
        return self._operate("", "update", f"firewalls/{name}", lambda: None).view

    def delete_firewall(self, call: Call, headers: Mapping[str, str]) -> Any:
        name, firewalls = call.path["firewall"], self.firewalls_of(call.path["project"])
        _held(firewalls, "firewalls", call, "firewall")
        del firewalls[name]
        return self._operate("", "delete", f"firewalls/{name}", lambda: None).view

    # --- the project and its catalog ------------------------------------------------------------------------

    def get_project(self, call: Call, headers: Mapping[str, str]) -> Any:
        return {"kind": "compute#project", "id": "1", "name": PROJECT, "quotas": self._quotas_of("")}

    def test_permissions(self, call: Call, headers: Mapping[str, str]) -> Any:
        project = call.path["resource"]
        return {
            "permissions": [
                name for name in call.body["permissions"] if self.allows(name, project, on_subnetwork=False)
            ]
        }

    def allows(self, permission: str, project: str = PROJECT, *, on_subnetwork: bool = True) -> bool:
        """Permissions on a subnetwork count for its use, and not in a test of its project."""
        role = self.host_role if project == SHARED else self.role
        is_given = role is None or permission in role
        if on_subnetwork and permission.startswith("compute.subnetworks."):
            is_given = is_given or permission in (self.subnet_role or ())
        return permission not in self.denied and is_given

    def list_regions(self, call: Call, headers: Mapping[str, str]) -> Any:
        regions = sorted({zone.rpartition("-")[0] for zone in self.zones})
        items, more = page_of(
            [
                {"kind": "compute#region", "name": name, "status": "UP", "quotas": self._quotas_of(name)}
                for name in regions
            ],
            call.query,
            self.page_size,
        )
        return {"kind": "compute#regionList", "id": "list", "items": items, **more}

    def list_machine_types(self, call: Call, headers: Mapping[str, str]) -> Any:
        listed = [
            (
                f"zones/{zone}",
                {
                    "kind": "compute#machineType",
                    "name": name,
                    "guestCpus": self.machine_types[name].cpus,
                    "memoryMb": self.machine_types[name].memory_mb,
                    "zone": zone,
                    "accelerators": [
                        {"guestAcceleratorType": kind, "guestAcceleratorCount": count}
                        for kind, count in self.machine_types[name].accelerators
                    ],
                },
            )
            for zone in self.zones
            for name in self.types_in(zone)
        ]
        return self._aggregated("machineType", "machineTypes", listed, call)

    def list_accelerator_types(self, call: Call, headers: Mapping[str, str]) -> Any:
        listed = [
            (f"zones/{zone}", {"kind": "compute#acceleratorType", "name": name, "maximumCardsPerInstance": 4})
            for zone, names in self.guests.items()
            for name in names
        ]
        return self._aggregated("acceleratorType", "acceleratorTypes", listed, call)

    def list_skus(self, call: Call, headers: Mapping[str, str]) -> Any:
        if headers.get("X-Goog-Api-Key") != self.api_key or call.path["servicesId"] != "6F81-5844-456A":
            raise Refusal(403, "forbidden", "The request is missing a valid API key.")
        items, more = page_of(
            self.skus, {**call.query, "maxResults": call.query.get("pageSize", "5000")}, self.page_size
        )
        return {"skus": items, **more}

    def _quotas_of(self, region: str) -> list[dict[str, Any]]:
        return [
            {"metric": metric, "limit": limit, "usage": 0.0}
            for (where, metric), limit in self.quotas.items()
            if where == region
        ]


def sku(
    description: str, regions: list[str], price_usd: float, unit: str, usage: str = "Preemptible"
) -> Mapping[str, Any]:
    """One entry of the billing catalog, shaped as Google's are."""
    nanos = round(price_usd * 1e9)
    digits = f"{crc32(description.encode()):012X}"
    sku_id = "-".join(re.findall("....", digits))
    return {
        "name": f"services/6F81-5844-456A/skus/{sku_id}",
        "skuId": sku_id,
        "description": description,
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": "Compute",
            "resourceGroup": "GPU" if "GPU" in description else "CPU",
            "usageType": usage,
        },
        "serviceRegions": regions,
        "pricingInfo": [
            {
                "effectiveTime": "2026-11-01T00:00:00Z",
                "summary": "",
                "currencyConversionRate": 1,
                "pricingExpression": {
                    "usageUnit": unit,
                    "displayQuantity": 1,
                    "tieredRates": [
                        {
                            "startUsageAmount": 0,
                            "unitPrice": {
                                "currencyCode": "USD",
                                "units": str(nanos // 1_000_000_000),
                                "nanos": nanos % 1_000_000_000,
                            },
                        }
                    ],
                },
            }
        ],
        "serviceProviderName": "Google",
    }


def _held(resources: Mapping[str, dict[str, Any]], kind: str, call: Call, parameter: str) -> dict[str, Any]:
    name = call.path[parameter]
    if name not in resources:
        raise not_found(f"projects/{call.path['project']}/global/{kind}/{name}")
    return resources[name]


def _new(resources: Mapping[str, Any], kind: str, call: Call) -> str:
    name = str(call.body.get("name", ""))
    if name in resources:
        path = f"projects/{call.path['project']}/global/{kind}/{name}"
        raise Refusal(409, "alreadyExists", f"The resource '{path}' already exists")
    return name


def _wrong(name: str, value: str, message: str) -> Refusal:
    return Refusal(400, "invalid", f"Invalid value for field '{name}': '{value}'. {message}")
