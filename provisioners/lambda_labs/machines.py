"""Lambda: machines are instances, found again by their names (`provisioners.name_tags`).

Lambda has no idempotency tokens, and two instances may have one name. So a launch looks for the name first, and after one whose
response was lost no other is sent for the same name until the first would be listed (`_SETTLED_S`). If there are two anyway (a
controller that died in between), the one with the smaller id is the machine, and the other is a orphan.

A terminated instance is not listed for long; what was seen here is remembered for an hour (`provisioners.machine_memory`). What runs at first
boot is user data, as on other clouds. Firewall rulesets have a name that says for whom they are:

    skyserve.OWNER.SERVICE.p8443.q443      replicas' ports, and ports that are open to any address
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, ClassVar

from policies.model import Zone
from provisioners.lambda_labs.api import GONE, LAUNCH, LambdaApi
from provisioners.lambda_labs.prices import NAME
from provisioners.machine_memory import MachineMemory
from provisioners.name_tags import name_of, parse
from provisioners.port.errors import InvalidRequestError, ProvisionError, TransientError
from provisioners.port.firewall import FirewallAccess, openings
from provisioners.port.regions import ClosedRegions
from provisioners.port.vm import Finding, Level, Machine, MachineOrder, MachineState, OrphanedResource, Silent

_SETTLED_S = 60.0
_RULESET = re.compile(
    r"skyserve\.(?P<owner>[^.]+)\.(?P<service>[^.]*)\.p(?P<ports>[0-9_]*)\.q(?P<public>[0-9_]*)"
)
_STATES = {
    "booting": MachineState.PENDING,
    "active": MachineState.RUNNING,
    "unhealthy": MachineState.RUNNING,  # what runs on it is judged by its probes
    "terminating": MachineState.STOPPING,
    "terminated": MachineState.TERMINATED,
    "preempted": MachineState.PREEMPTED,
}


class LambdaMachines:
    """`Machines` of one account, in these regions."""

    name: ClassVar[str] = NAME

    def __init__(self, api: LambdaApi, regions: frozenset[str], *, now: Callable[[], float]) -> None:
        self._api = api
        self._regions = regions
        self._now = now
        self._memory = MachineMemory()
        self._access: dict[str, FirewallAccess] = {}
        self._sent: dict[str, float] = {}  # launches without a response: name, and when
        self._launching = threading.Lock()
        self.closed = ClosedRegions(now)

    # --- machines

    def create(self, order: MachineOrder) -> Machine:
        region = order.zone.region
        if region not in self._regions or order.zone.name != region:
            raise InvalidRequestError(f"lambda has no zone {order.zone}", cloud=NAME, zone=order.zone)
        try:
            name = name_of(order)
        except ValueError as error:
            raise InvalidRequestError(f"lambda: {error}", cloud=NAME, zone=order.zone) from error
        with self._launching:
            known = next((one for one in self.machines(order.owner) if one.token == order.token), None)
            if known is not None:
                return known
            waited_s = self._now() - self._sent.get(name, float("-inf"))
            if waited_s < _SETTLED_S:
                message = (
                    "lambda: the launch was sent, and no response came: waiting to see whether it was done"
                )
                raise TransientError(
                    message, cloud=NAME, zone=order.zone, retry_after_s=_SETTLED_S - waited_s
                )
            machine = self._launch(order, name)
            self._memory.note(machine)
            return machine

    def _launch(self, order: MachineOrder, name: str) -> Machine:
        body: dict[str, Any] = {
            "region_name": order.zone.region,
            "instance_type_name": order.instance_type,
            "ssh_key_names": [self._key(order)],
            "name": name,
            "user_data": order.user_data,
            "firewall_rulesets": [{"id": self._ruleset(order)}],
        }
        if order.image is not None:
            body["image"] = {
                "id" if re.fullmatch(r"[0-9a-f-]{32,36}", order.image) else "family": order.image
            }
        try:
            (made,) = self._api.call("POST", LAUNCH, body, zone=order.zone)["instance_ids"]
        except TransientError as error:
            if error.code == "" or error.code.startswith("5"):
                self._sent[name] = self._now()  # it may have been done
            raise
        return order.machine(
            str(made), MachineState.PENDING, launched_at=self._now(), instance_type=order.instance_type
        )

    def machines(self, owner: str, silent: Silent | None = None) -> Sequence[Machine]:
        now = self._now()
        listed = {one.id: one for one in self._listed(owner)}
        for machine in listed.values():
            if machine.state.is_gone:
                self._memory.mark_gone(machine, now)
            else:
                self._memory.note(machine)
        for machine in self._memory.alive(owner).values():
            age_s = now - (machine.launched_at or float("-inf"))
            if machine.id not in listed and age_s >= _SETTLED_S:
                asked = self._memory.is_termination_ours(machine)
                message = "" if asked else "lambda does not list it any more"
                self._memory.mark_gone(replace(machine, state=MachineState.TERMINATED, message=message), now)
        found = {one.token: one for one in self._memory.ended(owner, now).values()}
        for machine in sorted(self._memory.alive(owner).values(), key=lambda one: one.id, reverse=True):
            found[machine.token] = listed.get(machine.id, machine)
        return list(found.values())

    def _listed(self, owner: str) -> Iterator[Machine]:
        for each in self._api.get("/instances"):
            named = parse(each.get("name") or "", owner)
            if named is None:
                continue
            region = each["region"]["name"]
            yield Machine(
                id=each["id"],
                token=named.token,
                owner=owner,
                service=named.service,
                replica_id=named.replica_id,
                rank=named.rank,
                num_nodes=named.num_nodes,
                zone=Zone(NAME, region, region),
                capacity_type=named.capacity_type,
                state=_STATES.get(each["status"], MachineState.PENDING),
                address=each.get("ip"),
                private_address=each.get("private_ip"),
                instance_type=each["instance_type"]["name"],
            )

    def destroy(self, machine: Machine) -> None:
        if machine.state.is_gone:
            return
        self._memory.record_termination(machine.zone, machine.id)
        self._terminate(machine.id)

    def _terminate(self, machine_id: str) -> None:
        try:
            self._api.call("POST", "/instance-operations/terminate", {"instance_ids": [machine_id]})
        except ProvisionError as error:
            if error.code != GONE:
                raise

    def spot_prices(
        self, regions: Sequence[str], instance_types: Collection[str] = (), silent: Silent | None = None
    ) -> Mapping[tuple[str, str], float]:
        return {}  # it has no spot market

    # --- leftovers and shared resources

    def orphans(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        """Return the second instance of a name."""
        by_token: dict[str, list[Machine]] = {}
        for machine in self._listed(owner):
            if not machine.state.is_gone and machine.state is not MachineState.STOPPING:
                by_token.setdefault(machine.token, []).append(machine)
        return [
            OrphanedResource("second instance", one.id, one.zone.region, token=one.token)
            for same in by_token.values()
            for one in sorted(same, key=lambda one: one.id)[1:]
        ]

    def remove(self, orphan: OrphanedResource) -> None:
        self._terminate(orphan.id)

    def shared(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        keys = [each for each in self._api.get("/ssh-keys") if _is_key_of(owner, each["name"])]
        return [
            *(
                OrphanedResource("firewall ruleset", each["id"], each["region"]["name"])
                for each, _ in self._rulesets(owner)
            ),
            *(OrphanedResource("ssh key", each["id"], "") for each in keys),
        ]

    def delete_shared(self, owner: str) -> Sequence[str]:
        problems = []
        for one in self.shared(owner):
            path = "/ssh-keys" if one.kind == "ssh key" else "/firewall-rulesets"
            try:
                self._api.call("DELETE", f"{path}/{one.id}")
            except ProvisionError as error:
                if error.code not in (GONE, "firewall-rulesets/firewall-ruleset-not-found"):
                    problems.append(f"{one.kind} {one.id}: {error.message}")
        return problems

    def _key(self, order: MachineOrder) -> str:
        name = f"{_key_name(order.owner)}.{sha256(order.public_key.encode()).hexdigest()[:12]}"
        if all(each["name"] != name for each in self._api.get("/ssh-keys")):
            try:
                self._api.call(
                    "POST", "/ssh-keys", {"name": name, "public_key": order.public_key}, zone=order.zone
                )
            except ProvisionError as error:
                if error.code != "global/duplicate":
                    raise
        return name

    # --- the firewall

    def admit(self, owner: str, access: FirewallAccess) -> None:
        self._access[owner] = access
        failed: ProvisionError | None = None
        for each, (service, ports, public) in self._rulesets(owner):
            rules = _rules(access, service, ports, public)
            if _rule_keys(rules) != _rule_keys(each["rules"]):
                try:
                    self._api.call("PATCH", f"/firewall-rulesets/{each['id']}", {"rules": rules})
                except ProvisionError as error:
                    failed = error
        if failed is not None:
            raise failed

    def _ruleset(self, order: MachineOrder) -> str:
        """Of the order's region, made as needed. With the lock held: two of one name would be two walls to keep."""
        kind = order.service, tuple(sorted(order.ports)), tuple(sorted(order.public_ports))
        for each, known in self._rulesets(order.owner):
            if known == kind and each["region"]["name"] == order.zone.region:
                return str(each["id"])
        access = self._access.get(order.owner, FirewallAccess()).with_sources(order.sources)
        body = {
            "name": f"skyserve.{order.owner}.{order.service}.p{_joined(kind[1])}.q{_joined(kind[2])}",
            "region": order.zone.region,
            "rules": _rules(access, *kind),
        }
        return str(self._api.call("POST", "/firewall-rulesets", body, zone=order.zone)["id"])

    def _rulesets(
        self, owner: str
    ) -> Iterator[tuple[dict[str, Any], tuple[str, tuple[int, ...], tuple[int, ...]]]]:
        """Yield the owner's, each with service, ports and public ports."""
        for each in self._api.get("/firewall-rulesets"):
            found = _RULESET.fullmatch(each["name"])
            if found is not None and found["owner"] == owner:
                yield each, (found["service"], _split(found["ports"]), _split(found["public"]))

    # --- serve check

    def check(self) -> Sequence[Finding]:
        try:
            types = self._api.get("/instance-types")
            account_wide = self._api.get("/firewall-rulesets/global")["rules"]
        except ProvisionError as error:
            return [Finding("API key", Level.MISSING, error.message)]
        findings = [Finding("API key")]
        rooms = sorted(name for name, one in types.items() if one["regions_with_capacity_available"])
        if not rooms:
            findings.append(Finding("room", Level.NOTE, "no instance type has room in any region now"))
        if any(one["source_network"] == "0.0.0.0/0" and one["protocol"] != "icmp" for one in account_wide):
            message = "the account's global firewall ruleset lets any address in on some ports: narrow it in Lambda's console"
            findings.append(Finding("firewall", Level.NOTE, message))
        return findings


def _key_name(owner: str) -> str:
    return f"skyserve-{owner}"


def _is_key_of(owner: str, name: str) -> bool:
    """Version 0.2 and earlier had one key for all services."""
    return name == _key_name(owner) or name.startswith(f"{_key_name(owner)}.")


def _joined(ports: Collection[int]) -> str:
    return "_".join(map(str, ports))


def _split(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split("_") if each)


def _rules(
    access: FirewallAccess, service: str, ports: Collection[int], public: Collection[int]
) -> list[dict[str, Any]]:
    return [
        {"protocol": "tcp", "port_range": [port, port], "source_network": source, "description": "skyserve"}
        for port, source in sorted(openings(access, service, ports, public))
    ]


def _rule_keys(rules: Sequence[Mapping[str, Any]]) -> set[tuple[int, int, str]]:
    return {(*one["port_range"], one["source_network"]) for one in rules if one.get("port_range") is not None}
