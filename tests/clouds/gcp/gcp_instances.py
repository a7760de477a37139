"""The instances of the make-believe Google Cloud, their disks, and the operations by which all things come about."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tests.clouds.gcp.gcp_discovery import Call
from tests.clouds.gcp.gcp_ground import PROJECT, Ground
from tests.clouds.gcp.gcp_parts import (
    HOST,
    Clock,
    MachineFacts,
    Operation,
    Refusal,
    VirtualClock,
    kept,
    last,
    not_found,
    page_of,
    timestamp,
)
from tests.clouds.gcp.gcp_rules import check_instance

_KEY_S = 3600.0  # how long an idempotency key is remembered

_QUOTA_OF = {
    "nvidia-l4": "NVIDIA_L4_GPUS",
    "nvidia-tesla-t4": "NVIDIA_T4_GPUS",
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
}


@dataclass
class Instances(Ground):
    """Knobs and state; every knob may be turned at any time."""

    clock: Clock = field(default_factory=VirtualClock)
    operation_s: float = 2.0
    boot_s: float = 20.0
    preemption_s: float = 30.0
    hidden_s: float = 0.0  # a new instance cannot be seen at first, by no one
    list_lag_s: float = 0.0  # nor, a little longer, in aggregated lists
    page_size: int = 500
    # Machines by zone and whether they are spot; any number where nothing is said.
    room: dict[tuple[str, bool], int] = field(default_factory=dict)
    stock_out: tuple[str, str, int] = (
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "The zone '{zone}' does not have enough resources available to fulfill the request.",
        503,
    )
    # How the next insertions fail, once accepted: code, message, status.
    failing: list[tuple[str, str, int]] = field(default_factory=list)
    unreachable: set[str] = field(default_factory=set)
    # How insertions are refused, by region: status, reason, message.
    refusals: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    on_launch: Callable[[MachineFacts], None] | None = None
    on_gone: Callable[[str, str], None] | None = None
    allocate_ip: Callable[[int], str] = lambda number: f"10.128.{number // 250}.{number % 250 + 2}"
    instances: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    disks: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    addresses: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    keys: dict[tuple[str, str], tuple[float, Operation]] = field(default_factory=dict)
    launches: Counter[str] = field(default_factory=Counter)  # instances ever made, by name
    _next: int = 1
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _told: list[Callable[[], None]] = field(default_factory=list)  # hooks, called without the lock

    def make_disk(self, zone: str, name: str, labels: Mapping[str, str], users: list[str]) -> None:
        with self._lock:
            self.disks[zone, name] = self._resource("disk", f"zones/{zone}/disks/{name}", name) | {
                "zone": f"{HOST}/projects/{PROJECT}/zones/{zone}",
                "labels": dict(labels),
                "users": users,
                "status": "READY",
            }

    def make_address(self, region: str, name: str, labels: Mapping[str, str]) -> None:
        with self._lock:
            self.addresses[region, name] = self._resource(
                "address", f"regions/{region}/addresses/{name}", name
            ) | {
                "region": f"{HOST}/projects/{PROJECT}/regions/{region}",
                "labels": dict(labels),
                "status": "RESERVED",
            }

    # --- instances ------------------------------------------------------------------------------------------

    def _insert_instance(self, call: Call, headers: Mapping[str, str]) -> Any:
        zone, body = call.path["zone"], call.body
        key = ("insert", str(UUID(call.query["requestId"]))) if "requestId" in call.query else None
        known = self.keys.get(key) if key is not None else None
        if known is not None and known[0] > self.clock.now() - _KEY_S:
            return known[1].view
        check_instance(self, zone, body)
        refusal = self.refusals.get(zone.rpartition("-")[0])
        if refusal is not None:
            raise Refusal(*refusal)
        name = body["name"]
        if (zone, name) in self.instances:
            raise Refusal(409, "alreadyExists", f"The resource '{self._path(zone, name)}' already exists")
        is_spot = body["scheduling"].get("provisioningModel") == "SPOT"
        self._check_quotas(zone, body, is_spot)
        error = self.failing.pop(0) if self.failing else None
        room = self.room.get((zone, is_spot))
        if error is None and room is not None and self._count(zone, is_spot) >= room:
            code, message, status = self.stock_out
            error = code, message.format(zone=f"projects/{PROJECT}/zones/{zone}"), status
        self.instances[zone, name] = self._instance(zone, body)
        operation = self._operate(
            zone,
            "insert",
            f"instances/{name}",
            lambda: self._settled(zone, name),
            error=error,
            on_failed=lambda: self._undo(zone, name),
        )
        if key is not None:
            self.keys[key] = self.clock.now(), operation
        return operation.view

    def _check_quotas(self, zone: str, body: Mapping[str, Any], is_spot: bool) -> None:
        region = zone.rpartition("-")[0]
        for accelerator, count in self._accelerators(body):
            metric = ("PREEMPTIBLE_" if is_spot else "") + _QUOTA_OF[accelerator]
            limit = self.quotas.get((region, metric))
            if limit is not None and self._used(region, accelerator, is_spot) + count > limit:
                raise Refusal(
                    403,
                    "quotaExceeded",
                    f"Quota '{metric}' exceeded.  Limit: {limit:.1f} in region {region}.",
                )
            everywhere = self.quotas.get(("", "GPUS_ALL_REGIONS"))
            if everywhere is not None and self._used("", None, None) + count > everywhere:
                raise Refusal(
                    403,
                    "quotaExceeded",
                    f"Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: {everywhere:.1f} globally.",
                )

    def _accelerators(self, body: Mapping[str, Any]) -> list[tuple[str, int]]:
        guests = [
            (last(x["acceleratorType"]), int(x["acceleratorCount"]))
            for x in body.get("guestAccelerators", [])
        ]
        return [*guests, *self.machine_types[last(body["machineType"])].accelerators]

    def _used(self, region: str, accelerator: str | None, is_spot: bool | None) -> int:
        return sum(
            count
            for (zone, _), instance in self.instances.items()
            if zone.startswith(region) and is_spot in (None, _is_spot(instance))
            for kind, count in self._accelerators(instance)
            if accelerator in (None, kind)
        )

    def _count(self, zone: str, is_spot: bool) -> int:
        return sum(
            key[0] == zone and _is_spot(instance) is is_spot for key, instance in self.instances.items()
        )

    def _instance(self, zone: str, body: Mapping[str, Any]) -> dict[str, Any]:
        name, number = body["name"], self._next
        card = dict(body["networkInterfaces"][0]) | self.attachment(zone, body["networkInterfaces"][0])
        card |= {"networkIP": self.allocate_ip(number), "name": "nic0"}
        if card.get("accessConfigs"):
            card["accessConfigs"] = [
                dict(card["accessConfigs"][0]) | {"natIP": f"203.0.113.{number % 250 + 1}"}
            ]
        self.make_disk(
            zone, name, body["disks"][0]["initializeParams"].get("labels", {}), [self._path(zone, name)]
        )
        disk = {
            "boot": True,
            "autoDelete": body["disks"][0].get("autoDelete", False),
            "source": f"{HOST}/zones/{zone}/disks/{name}",
        }
        return {
            **body,
            **self._resource("instance", f"zones/{zone}/instances/{name}", name),
            "zone": f"{HOST}/projects/{PROJECT}/zones/{zone}",
            "status": "PROVISIONING",
            "networkInterfaces": [card],
            "disks": [disk],
        }

    def _settled(self, zone: str, name: str) -> None:
        instance = self.instances.get((zone, name))
        if instance is None:
            return
        if instance["status"] == "PROVISIONING":
            instance["status"] = "STAGING"
        self.launches[name] += 1
        metadata = {item["key"]: item["value"] for item in instance["metadata"]["items"]}
        facts = MachineFacts(
            name,
            zone,
            instance["networkInterfaces"][0]["networkIP"],
            metadata.get("startup-script", metadata.get("user-data", "")),
            metadata.get("ssh-keys", ""),
            instance["labels"],
            _is_spot(instance),
        )
        if (hook := self.on_launch) is not None:
            self._told.append(lambda: hook(facts))

    def _undo(self, zone: str, name: str) -> None:
        self.instances.pop((zone, name), None)
        self.disks.pop((zone, name), None)

    def _vanish(self, zone: str, name: str, why: str) -> None:
        instance = self.instances.pop((zone, name), None)
        if instance is None:
            return
        if instance["disks"][0]["autoDelete"]:
            self.disks.pop((zone, name), None)
        elif (zone, name) in self.disks:
            self.disks[zone, name]["users"] = []
        if (hook := self.on_gone) is not None:
            self._told.append(lambda: hook(name, why))

    def _get_instance(self, call: Call, headers: Mapping[str, str]) -> Any:
        return self._view(self._seen(call.path["zone"], call.path["instance"]))

    def _delete_instance(self, call: Call, headers: Mapping[str, str]) -> Any:
        zone, name = call.path["zone"], call.path["instance"]
        self._seen(zone, name)["status"] = "STOPPING"
        return self._operate(
            zone, "delete", f"instances/{name}", lambda: self._vanish(zone, name, "deleted")
        ).view

    def _list_instances(self, call: Call, headers: Mapping[str, str]) -> Any:
        old = self.clock.now() - self.hidden_s - self.list_lag_s
        seen = [
            (f"zones/{zone}", self._view(instance))
            for (zone, _), instance in self.instances.items()
            if instance["creationTimestamp"] <= timestamp(old)
        ]
        return self._aggregated("instance", "instances", seen, call)

    def _seen(self, zone: str, name: str) -> dict[str, Any]:
        instance = self.instances.get((zone, name))
        if instance is None or instance["creationTimestamp"] > timestamp(self.clock.now() - self.hidden_s):
            raise not_found(self._path(zone, name))
        return instance

    def _view(self, instance: dict[str, Any]) -> dict[str, Any]:
        booted = instance["creationTimestamp"] <= timestamp(self.clock.now() - self.boot_s)
        if instance["status"] == "STAGING" and booted:
            instance["status"] = "RUNNING"
        return instance

    # --- disks, addresses, operations -----------------------------------------------------------------------

    def _list_disks(self, call: Call, headers: Mapping[str, str]) -> Any:
        return self._aggregated(
            "disk", "disks", [(f"zones/{zone}", x) for (zone, _), x in self.disks.items()], call
        )

    def _delete_disk(self, call: Call, headers: Mapping[str, str]) -> Any:
        zone, name = call.path["zone"], call.path["disk"]
        if (zone, name) not in self.disks:
            raise not_found(f"projects/{PROJECT}/zones/{zone}/disks/{name}")
        if self.disks[zone, name]["users"]:
            raise Refusal(
                400, "resourceInUseByAnotherResource", f"The disk resource '{name}' is already being used"
            )
        return self._operate(zone, "delete", f"disks/{name}", lambda: self.disks.pop((zone, name), None)).view

    def _list_addresses(self, call: Call, headers: Mapping[str, str]) -> Any:
        listed = [(f"regions/{region}", address) for (region, _), address in self.addresses.items()]
        return self._aggregated("address", "addresses", listed, call)

    def _delete_address(self, call: Call, headers: Mapping[str, str]) -> Any:
        region, name = call.path["region"], call.path["address"]
        if self.addresses.pop((region, name), None) is None:
            raise not_found(f"projects/{PROJECT}/regions/{region}/addresses/{name}")
        return self._operate("", "delete", f"addresses/{name}", lambda: None).view

    def _list_operations(self, call: Call, headers: Mapping[str, str]) -> Any:
        own = [x.view for x in self.operations if last(x.view.get("zone", "")) == call.path["zone"]]
        items, more = page_of(kept(own, call.query.get("filter", "")), call.query, self.page_size)
        return {"kind": "compute#operationList", "id": "list", "items": list(items), **more}

    def _wait(self, call: Call, headers: Mapping[str, str]) -> Any:
        return self._operation(call).view

    def _operation(self, call: Call) -> Operation:
        for operation in self.operations:
            if operation.view["name"] == call.path["operation"]:
                return operation
        raise not_found(f"projects/{PROJECT}/operations/{call.path['operation']}")

    def _aggregated(self, kind: str, field_name: str, listed: list[tuple[str, Any]], call: Call) -> Any:
        """Grouped by scope; scopes without anything, and those that cannot be reached, say so."""
        matching = kept([item for _, item in listed], call.query.get("filter", ""))
        items, more = page_of(
            [(scope, item) for scope, item in listed if any(item is x for x in matching)],
            call.query,
            self.page_size,
        )
        nothing = {
            "code": "NO_RESULTS_ON_PAGE",
            "message": "There are no results for this scope on this page.",
        }
        scopes: dict[str, Any] = {f"zones/{zone}": {"warning": nothing} for zone in self.zones}
        for scope, item in items:
            if last(scope) not in self.unreachable:
                scopes.setdefault(scope, {}).pop("warning", None)
                scopes[scope].setdefault(field_name, []).append(item)
        for zone in self.unreachable:
            scopes[f"zones/{zone}"] = {
                "warning": {"code": "UNREACHABLE", "message": f"{zone} cannot be reached."}
            }
        unreachable = (
            {"unreachables": [f"zones/{zone}" for zone in sorted(self.unreachable)]}
            if self.unreachable
            else {}
        )
        return {"kind": f"compute#{kind}AggregatedList", "id": "list", "items": scopes, **more, **unreachable}

    def _operate(
        self,
        zone: str,
        kind: str,
        target: str,
        on_done: Callable[[], object],
        *,
        error: tuple[str, str, int] | None = None,
        on_failed: Callable[[], None] | None = None,
        takes_s: float | None = None,
        user: str = "somebody@example.com",
    ) -> Operation:
        """`zone` is empty for a global operation."""
        scope = f"zones/{zone}" if zone else "global"
        name = f"operation-{self._next}"
        view = self._resource("operation", f"{scope}/operations/{name}", name) | {
            "operationType": kind,
            "targetLink": f"{HOST}/projects/{PROJECT}/{scope}/{target}",
            "status": "RUNNING",
            "progress": 0,
            "insertTime": timestamp(self.clock.now()),
            "user": user,
        }
        if zone:
            view["zone"] = f"{HOST}/projects/{PROJECT}/zones/{zone}"
        done_at = self.clock.now() + (self.operation_s if takes_s is None else takes_s)
        operation = Operation(dict(view), done_at, error, lambda: (on_done(), None)[1], on_failed)
        self.operations.append(operation)
        return operation

    def _resource(self, kind: str, path: str, name: str) -> dict[str, Any]:
        self._next += 1
        return {
            "kind": f"compute#{kind}",
            "id": str(1_000_000 + self._next),
            "name": name,
            "creationTimestamp": timestamp(self.clock.now()),
            "selfLink": f"{HOST}/projects/{PROJECT}/{path}",
        }

    def _settle(self) -> None:
        """Finish the due operations, in order of time."""
        now = self.clock.now()
        for operation in sorted(self.operations, key=lambda operation: operation.done_at):
            if not operation.is_done and operation.done_at <= now:
                operation.finish(operation.done_at)

    def _tell(self) -> None:
        with self._lock:
            told, self._told = self._told, []
        for hook in told:
            hook()

    def _path(self, zone: str, name: str) -> str:
        return f"projects/{PROJECT}/zones/{zone}/instances/{name}"


def _is_spot(instance: Mapping[str, Any]) -> bool:
    return bool(instance["scheduling"].get("provisioningModel") == "SPOT")
