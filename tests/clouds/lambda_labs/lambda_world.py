"""Lambda's Cloud API over real HTTP on loopback, as strict as its description: every body that is sent and every response is read
by the models that the `lambda-ai-cloud-api-client` package generated from Lambda's OpenAPI document, and calls are counted against
the published limits. Time is given."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from typing import Any

from lambda_ai_cloud_api_client.models.add_ssh_key_request import AddSSHKeyRequest
from lambda_ai_cloud_api_client.models.firewall_ruleset import FirewallRuleset
from lambda_ai_cloud_api_client.models.firewall_ruleset_create_request import FirewallRulesetCreateRequest
from lambda_ai_cloud_api_client.models.firewall_ruleset_patch_request import FirewallRulesetPatchRequest
from lambda_ai_cloud_api_client.models.instance import Instance
from lambda_ai_cloud_api_client.models.instance_launch_request import InstanceLaunchRequest
from lambda_ai_cloud_api_client.models.instance_terminate_request import InstanceTerminateRequest
from lambda_ai_cloud_api_client.models.public_region_code import PublicRegionCode
from lambda_ai_cloud_api_client.models.ssh_key import SSHKey

KEY = "secret_test_0123456789abcdef"
BOOT_S, LEAVE_S, LISTED_S = 60.0, 20.0, 60.0
LAUNCH_EVERY_S, BURST, PER_S = 10.0, 10.0, 1.0

_TYPES = {
    "gpu_1x_a10": ("A10 (24 GB PCIe)", 1, 75),
    "gpu_1x_h100_sxm5": ("H100 (80 GB SXM5)", 1, 329),
    "gpu_2x_h100_sxm5": ("H100 (80 GB SXM5)", 2, 638),
}
_LAUNCH = "instance-operations/launch"


class ApiError(Exception):
    def __init__(self, status: int, code: str, message: str = "no") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message


@dataclass
class LambdaWorld:
    """`room` by region and type; a cut launch is done, and its response lost; `refusal` is of every launch."""

    time: float = 1_800_000_000.0
    key: str = KEY
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)  # when an instance came into its state
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    rulesets: dict[str, dict[str, Any]] = field(default_factory=dict)
    open_globally: bool = False
    room: dict[tuple[str, str], int] = field(default_factory=dict)
    quota: int = 1000
    cut: bool = False
    refusal: ApiError | None = None
    throttled: int = 0
    calls: list[tuple[str, str]] = field(default_factory=list)
    launched_at: float = float("-inf")
    tokens: float = BURST
    told_at: float = 0.0
    lock: threading.RLock = field(default_factory=threading.RLock)

    # --- what happens

    def living(self) -> list[dict[str, Any]]:
        return [one for one in self.instances.values() if one["status"] in ("booting", "active", "unhealthy")]

    def set_state(self, instance: str, status: str) -> None:
        self.instances[instance]["status"] = status
        self.since[instance] = self.time

    def pass_states(self) -> None:
        for key, one in list(self.instances.items()):
            age_s = self.time - self.since[key]
            if one["status"] == "booting" and age_s >= BOOT_S:
                self.set_state(key, "active")
                one["ip"] = f"203.0.113.{int(key, 16) % 250 + 1}"
            elif one["status"] == "terminating" and age_s >= LEAVE_S:
                self.set_state(key, "terminated")
            elif one["status"] in ("terminated", "preempted") and age_s >= LISTED_S:
                del self.instances[key]

    # --- the API

    def respond(self, method: str, path: str, key: str, body: Any) -> Any:
        if key != f"Bearer {self.key}":
            raise ApiError(401, "global/invalid-api-key")
        self._count(path)
        self.pass_states()
        match method, path.removeprefix("/api/v1/").split("/"):
            case "GET", ["instances"]:
                return [self._shown(one) for one in self.instances.values()]
            case "GET", ["instance-types"]:
                return {name: self._offered(name) for name in _TYPES}
            case "POST", ["instance-operations", "launch"]:
                return self._launch(body)
            case "POST", ["instance-operations", "terminate"]:
                return self._terminate(body)
            case "GET", ["ssh-keys"]:
                return [SSHKey.from_dict(one).to_dict() for one in self.keys.values()]
            case "POST", ["ssh-keys"]:
                return self._add_key(body)
            case "DELETE", ["ssh-keys", one] if one in self.keys:
                del self.keys[one]
                return {}
            case "GET", ["firewall-rulesets", "global"]:
                rule = {
                    "protocol": "tcp",
                    "port_range": [22, 22],
                    "source_network": "0.0.0.0/0",
                    "description": "",
                }
                return {"id": "global", "name": "Global Firewall Rules", "rules": [rule] * self.open_globally}
            case "GET", ["firewall-rulesets"]:
                return [self._ruleset(one) for one in self.rulesets.values()]
            case "POST", ["firewall-rulesets"]:
                return self._add_ruleset(body)
            case "PATCH", ["firewall-rulesets", one] if one in self.rulesets:
                FirewallRulesetPatchRequest.from_dict(body)
                self._check_rules(body["rules"])
                self.rulesets[one]["rules"] = body["rules"]
                return self._ruleset(self.rulesets[one])
            case "DELETE", ["firewall-rulesets", one] if one in self.rulesets:
                if self._users_of(one):
                    raise ApiError(409, "firewall-rulesets/firewall-ruleset-in-use")
                del self.rulesets[one]
                return {}
            case _, ["firewall-rulesets", _]:
                raise ApiError(404, "firewall-rulesets/firewall-ruleset-not-found")
        raise ApiError(404, "global/object-does-not-exist")

    def _count(self, path: str) -> None:
        self.tokens = min(BURST, self.tokens + (self.time - self.told_at) * PER_S) - 1.0
        self.told_at = self.time
        if self.tokens < 0:
            raise ApiError(429, "global/rate-limited")
        if path.endswith(_LAUNCH):
            early = self.time - self.launched_at < LAUNCH_EVERY_S
            self.launched_at = self.time
            if early or self.throttled > 0:
                self.throttled -= 1
                raise ApiError(429, "global/rate-limited")

    def _launch(self, body: Any) -> Any:
        wanted = InstanceLaunchRequest.from_dict(body)
        if wanted.additional_properties or len(wanted.ssh_key_names) != 1 or len(body["name"]) > 64:
            raise ApiError(400, "global/invalid-parameters")
        if len(body.get("user_data", "")) > 1 << 20 or body["instance_type_name"] not in _TYPES:
            raise ApiError(400, "global/invalid-parameters")
        if body["ssh_key_names"][0] not in {one["name"] for one in self.keys.values()}:
            raise ApiError(404, "global/object-does-not-exist", "ssh key")
        for each in body["firewall_rulesets"]:
            if self.rulesets.get(each["id"], {}).get("region") != body["region_name"]:
                raise ApiError(404, "global/object-does-not-exist", "firewall ruleset")
        if self.refusal is not None:
            raise self.refusal
        place = body["region_name"], body["instance_type_name"]
        taken = [one for one in self.living() if (one["region"], one["instance_type"]) == place]
        if len(self.living()) >= self.quota:
            raise ApiError(400, "global/quota-exceeded")
        if len(taken) >= self.room.get(place, 1000):
            raise ApiError(400, f"{_LAUNCH}/insufficient-capacity")
        number = f"{len(self.since) + 1:032x}"
        self.instances[number] = {
            **{
                "id": number,
                "status": "booting",
                "name": body["name"],
                "region": place[0],
                "instance_type": place[1],
            },
            **{"ssh_key_names": body["ssh_key_names"], "user_data": body.get("user_data", "")},
            "rulesets": [each["id"] for each in body["firewall_rulesets"]],
        }
        self.since[number] = self.time
        return {"instance_ids": [number]}

    def _terminate(self, body: Any) -> Any:
        for each in InstanceTerminateRequest.from_dict(body).instance_ids:
            if each not in self.instances or self.instances[each]["status"] in ("terminated", "preempted"):
                raise ApiError(404, "global/object-does-not-exist")
            if self.instances[each]["status"] != "terminating":
                self.set_state(each, "terminating")
        return {"terminated_instances": []}

    def _add_key(self, body: Any) -> Any:
        AddSSHKeyRequest.from_dict(body)
        if body["name"] in {one["name"] for one in self.keys.values()}:
            raise ApiError(400, "global/duplicate")
        number = f"key{len(self.keys)}"
        self.keys[number] = {"id": number, "name": body["name"], "public_key": body["public_key"]}
        return self.keys[number]

    def _add_ruleset(self, body: Any) -> Any:
        FirewallRulesetCreateRequest.from_dict(body)
        self._check_rules(body["rules"])
        if (body["name"], body["region"]) in {(one["name"], one["region"]) for one in self.rulesets.values()}:
            raise ApiError(409, "global/duplicate")
        number = f"rules{len(self.rulesets)}"
        created = datetime.fromtimestamp(self.time, UTC).isoformat()
        self.rulesets[number] = {"id": number, **body, "created": created}
        return self._ruleset(self.rulesets[number])

    def _check_rules(self, rules: Any) -> None:
        for rule in rules:
            low, high = rule["port_range"]
            if not 0 < low <= high < 65536 or ip_network(rule["source_network"]).version != 4:
                raise ApiError(400, "global/invalid-parameters")

    # --- how it is shown

    def _users_of(self, ruleset: str) -> list[str]:
        return [one["id"] for one in self.living() if ruleset in one["rulesets"]]

    def _ruleset(self, one: dict[str, Any]) -> Any:
        shown = {**one, "region": _region(one["region"]), "instance_ids": self._users_of(one["id"])}
        return FirewallRuleset.from_dict(shown).to_dict()

    def _shown(self, one: dict[str, Any]) -> Any:
        can = {"available": True}
        shown = {
            **{key: one[key] for key in ("id", "status", "name", "ssh_key_names")},
            **({"ip": one["ip"], "private_ip": "10.19.0.1"} if "ip" in one else {}),
            "file_system_names": [],
            "region": _region(one["region"]),
            "instance_type": self._offered(one["instance_type"])["instance_type"],
            "actions": dict.fromkeys(("migrate", "rebuild", "restart", "cold_reboot", "terminate"), can),
        }
        return Instance.from_dict(shown).to_dict()

    def _offered(self, name: str) -> dict[str, Any]:
        gpu, count, cents = _TYPES[name]
        specs = {"vcpus": 26 * count, "memory_gib": 200 * count, "storage_gib": 2816, "gpus": count}
        kind = {"name": name, "description": name, "gpu_description": gpu, "price_cents_per_hour": cents}
        regions = [code.value for code in PublicRegionCode if self.room.get((code.value, name), 1) > 0]
        return {
            "instance_type": {**kind, "specs": specs},
            "regions_with_capacity_available": list(map(_region, regions)),
        }


def _region(name: str) -> dict[str, str]:
    return {"name": name, "description": name}


@contextmanager
def serving(world: LambdaWorld) -> Iterator[str]:
    """The URL of the API."""

    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            with world.lock:
                world.calls.append((self.command, self.path))
                try:
                    status, shown = 200, {"data": world.respond(self.command, self.path, self._key(), body)}
                except ApiError as error:
                    status, shown = error.status, {"error": {"code": error.code, "message": error.message}}
                lost = world.cut and self.path.endswith(_LAUNCH)
            if lost:
                self.close_connection = True
                return
            text = json.dumps(shown).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_DELETE = _respond

        def _key(self) -> str:
            return self.headers.get("Authorization") or ""

        def log_message(self, *_: Any) -> None:
            """Tests need no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/api/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
