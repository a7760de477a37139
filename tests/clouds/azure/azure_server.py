"""Azure Resource Manager over HTTP on loopback, for a `World`; and the list of retail prices.

It insists on what the real one insists on: a token, an api-version, known paths, known query parameters, bodies that fit
the API. Faults can be put in the way of calls, before they have an effect or after it.
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from provisioners.azure.check import missing_actions
from tests.clouds.api_limits import Limits
from tests.clouds.azure.azure_contract import TYPES, answer_problems
from tests.clouds.azure.azure_permissions import needs_of
from tests.clouds.azure.azure_world import GROUP, REGIONS, SIZES, VM, Body, Refusal, World

_QUERY = {"api-version", "$filter", "$expand", "$skiptoken", "statusOnly", "forceDeletion"}


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    status: int


@dataclass(slots=True)
class Fault:
    """For the next `times` calls that fit. Status 0 hangs up without a response."""

    method: str
    path: str  # a regular expression, searched
    status: int
    code: str = ""
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    is_after: bool = False  # the effect happens
    times: int = 1


class AzureServer:
    def __init__(self, world: World, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: the SDK as users have it sends no token without."""
        self.world = world
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.limits = Limits(world.clock.now)  # by "GET", "PUT" and "DELETE"
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"server_of": self}))
        self._http.daemon_threads = True
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._http.server_port}"

    @contextmanager
    def running(self) -> Iterator[AzureServer]:
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            thread.join()
            self._http.server_close()

    def fail(
        self, method: str, path: str, status: int, code: str = "", message: str = "", **more: Any
    ) -> None:
        with self._lock:
            self.faults.append(Fault(method, path, status, code, message, **more))

    def count(self, method: str, path: str) -> int:
        return sum(call.method == method and bool(re.search(path, call.path, re.I)) for call in self.calls)

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path, re.I):
                    fault.times -= 1
                    return fault
        return None

    # --- Routes -------------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: dict[str, str], body: Any, token: str) -> tuple[int, Any]:
        if path == "/api/retail/prices":
            return self._prices(query)
        actions = self.world.actions if token == f"Bearer {self.world.token}" else None
        if actions is None:
            actions = self.world.identities.get(token.removeprefix("Bearer "))
        if actions is None:
            raise Refusal(401, "InvalidAuthenticationToken", "The access token is invalid.")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d(-preview)?", query.get("api-version", "")):
            raise Refusal(400, "MissingApiVersionParameter", "The api-version query parameter is required.")
        if unknown := set(query) - _QUERY:
            raise Refusal(400, "InvalidQueryParameter", f"unknown: {sorted(unknown)}")
        match = re.fullmatch(r"/subscriptions/([^/]+)(/.*)?", path, re.I)
        if match is None or match[1] != self.world.subscription:
            raise Refusal(404, "SubscriptionNotFound", f"The subscription of '{path}' could not be found.")
        rest = (match[2] or "").rstrip("/")
        with self.world.at_work():
            self._authorize(method, path, rest, body, actions)
            return self._below(method, path, rest, query, body)

    def _authorize(self, method: str, path: str, rest: str, body: Any, actions: list[str]) -> None:
        world = self.world
        granted = [{"actions": actions, "notActions": world.not_actions}]
        contained = world.types_below(path) if method == "DELETE" else ()
        needs = needs_of(method, rest, "publicIPAddressConfiguration" in json.dumps(body), sorted(contained))
        for action in missing_actions(granted, tuple(needs)):
            raise Refusal(
                403,
                "AuthorizationFailed",
                "The client '11111111-2222-3333-4444-555555555555' with object id "
                "'11111111-2222-3333-4444-555555555555' does not have authorization to perform action "
                f"'{action}' over scope '{path}' or the scope is invalid.",
            )

    def _below(self, method: str, path: str, rest: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        world = self.world
        if rest == "":
            return 200, {
                "subscriptionId": world.subscription,
                "displayName": "Test",
                "state": world.subscription_state,
            }
        if re.fullmatch("/resourcegroups", rest, re.I):
            return self._page(
                path, query, [world.answer(each) for each in self._groups(query.get("$filter", ""))]
            )
        if re.fullmatch("/resourcegroups/[^/]+", rest, re.I):
            return self._one(method, path, GROUP, query, body)
        if re.fullmatch("/providers/Microsoft.Authorization/permissions", rest, re.I):
            return 200, {"value": [{"actions": world.actions, "notActions": world.not_actions}]}
        if match := re.fullmatch("/providers/(Microsoft.Compute|Microsoft.Network)(/register)?", rest, re.I):
            return self._provider(method, match[1], bool(match[2]))
        if match := re.fullmatch("/providers/Microsoft.Compute/locations/([^/]+)/usages", rest, re.I):
            return 200, {"value": self._usages(match[1])}
        if re.fullmatch("/providers/Microsoft.Compute/skus", rest, re.I):
            return self._page(path, query, self._skus(query.get("$filter", "")))
        match = re.fullmatch(r"(?:/resourcegroups/([^/]+))?/providers/([^/]+/[^/]+)(/[^/]+)?", rest, re.I)
        kind = "" if match is None else match[2].lower()
        if match is None or kind not in TYPES:
            raise Refusal(404, "InvalidResourceType", f"The resource type of '{path}' could not be found.")
        if match[3] is not None:
            return self._one(method, path, kind, query, body)
        if method != "GET":
            raise Refusal(405, "MethodNotAllowed", method)
        if match[1] is not None:
            world.get(path.split("/providers/")[0], GROUP, with_view=False)
        with_view = query.get("statusOnly") == "true"
        found = [world.answer(each, with_view) for each in world.seen_in_lists(kind, match[1])]
        if with_view:  # the run-time status, and little else
            found = [_status_only(each) for each in found]
        return self._page(path, query, found)

    def _one(self, method: str, path: str, kind: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        match method:
            case "GET":
                found = self.world.get(path, kind, query.get("$expand") == "instanceView")
            case "PUT":
                status, resource = self.world.put(path, kind, body)
                found = self.world.answer(resource)
                self._check(kind, found)
                return status, found
            case "PATCH":
                found = self.world.answer(self.world.patch_tags(path, kind, body))
            case "DELETE":
                return self.world.delete(path, kind), None
            case _:
                raise Refusal(405, "MethodNotAllowed", method)
        self._check(kind, found)
        return 200, found

    def _check(self, kind: str, body: Body) -> None:
        self.world.violations += [
            f"answer {body['id']}: {problem}" for problem in answer_problems(kind, body)
        ]

    def _groups(self, wanted: str) -> list[Any]:
        found = self.world.seen_in_lists(GROUP, None)
        if not wanted:
            return found
        if match := re.fullmatch(r"tagName eq '([^']+)'", wanted):
            return [each for each in found if match[1] in each.body.get("tags", {})]
        match = re.fullmatch(r"tagName eq '([^']+)' and tagValue eq '([^']+)'", wanted)
        if match is None:
            raise Refusal(400, "InvalidFilterInQueryString", wanted)
        return [each for each in found if each.body.get("tags", {}).get(match[1]) == match[2]]

    def _provider(self, method: str, namespace: str, is_register: bool) -> tuple[int, Any]:
        if method == "POST" and is_register:
            raise Refusal(
                403, "AuthorizationFailed", f"... to perform action '{namespace}/register/action' ..."
            )
        state = "Registered" if self.world.registered else "NotRegistered"
        return 200, {"namespace": namespace, "registrationState": state}

    def _usages(self, region: str) -> list[Body]:
        names = ["lowPriorityCores", *sorted({size.family for size in SIZES.values()})]
        return [
            {
                "unit": "Count",
                "currentValue": self.world.cores_used(region, name),
                "limit": self.world.quota.get((region, name), 350),
                "name": {"value": name, "localizedValue": name},
            }
            for name in names
        ]

    def _skus(self, wanted: str) -> list[Body]:
        if wanted and not re.fullmatch("location eq '[a-z0-9]+'", wanted):
            raise Refusal(400, "InvalidFilter", f"no such filter: {wanted}")
        regions = re.findall("'([^']+)'", wanted) or list(REGIONS)
        return [self._sku(name, region) for region in regions for name in SIZES]

    def _sku(self, name: str, region: str) -> Body:
        size, zones = SIZES[name], REGIONS[region]
        info = {"locations": [region]}
        restrictions = []
        if name in self.world.closed_sizes:
            restrictions.append({"type": "Location", "values": [region], "restrictionInfo": info})
        elif shut := self.world.closed_zones.get((region, name)):
            restrictions.append(
                {"type": "Zone", "values": [region], "restrictionInfo": {**info, "zones": list(shut)}}
            )
        facts = {
            "vCPUs": str(size.cores),
            "MemoryGB": str(size.memory_gb),
            "LowPriorityCapable": str(size.spot),
            **({"GPUs": str(size.gpus)} if size.gpus else {}),
        }
        return {
            "resourceType": "virtualMachines",
            "name": name,
            "family": size.family,
            "locations": [region],
            "locationInfo": [{"location": region, "zones": list(zones)}],
            "capabilities": [{"name": key, "value": value} for key, value in facts.items()],
            "restrictions": [{**one, "reasonCode": "NotAvailableForSubscription"} for one in restrictions],
        }

    def _prices(self, query: dict[str, str]) -> tuple[int, Any]:
        match = re.search(r"armRegionName eq '([^']+)'", query.get("$filter", ""))
        if match is None or "serviceName eq 'Virtual Machines'" not in query["$filter"]:
            raise Refusal(400, "BadRequest", "no such filter")
        items = [item for item in self.world.prices if item["armRegionName"] == match[1]]
        start = int(query.get("$skip", "0"))
        page, more = items[start : start + self.world.page_size], start + self.world.page_size < len(items)
        following = urllib.parse.urlencode({**query, "$skip": str(start + self.world.page_size)})
        link = f"{self.url}/api/retail/prices?{following}" if more else None
        return 200, {"BillingCurrency": "USD", "Items": page, "NextPageLink": link, "Count": len(page)}

    def _page(self, path: str, query: dict[str, str], items: list[Body]) -> tuple[int, Any]:
        start = int(query.get("$skiptoken", "0"))
        end = start + self.world.page_size
        answer: Body = {"value": items[start:end]}
        if end < len(items):
            following = urllib.parse.urlencode({**query, "$skiptoken": str(end)})
            answer["nextLink"] = f"{self.url}{path}?{following}"
        return 200, answer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # head and body in one segment
    disable_nagle_algorithm = True
    server_of: AzureServer

    def date_time_string(self, timestamp: float | None = None) -> str:
        world = self.server_of.world
        return super().date_time_string(world.clock.now() + world.clock_off_s)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def _serve(self) -> None:
        with self.server_of.limits.call(self.command) as is_let_in:
            self._obey(is_let_in)

    def _obey(self, is_let_in: bool) -> None:
        server = self.server_of
        url = urllib.parse.urlsplit(self.path)
        query = {key: values[-1] for key, values in urllib.parse.parse_qs(url.query).items()}
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(url.path)
        body = json.loads(raw) if raw else None
        fault = server.fault_for(self.command, path)
        status, answer, headers = 0, None, {}
        if fault is None or fault.is_after:
            try:
                if not is_let_in:
                    raise Refusal(429, "TooManyRequests", "Too many requests.", {"Retry-After": "5"})
                status, answer = server.answer(
                    self.command, path, query, body, self.headers.get("Authorization", "")
                )
            except Refusal as refusal:
                status, headers = refusal.status, refusal.headers
                answer = {"error": {"code": refusal.code, "message": refusal.message}}
        if fault is not None:
            status, headers = fault.status, fault.headers
            answer = {"error": {"code": fault.code, "message": fault.message}} if fault.code else None
        with server._lock:
            server.calls.append(Call(self.command, path, query, body, status))
        if status == 0:
            self.close_connection = True
            return
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": len(data),
            **headers,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_DELETE = do_POST = do_PATCH = _serve


def _status_only(body: Body) -> Body:
    properties = {key: body["properties"][key] for key in ("vmId", "provisioningState", "instanceView")}
    return {key: body[key] for key in ("id", "name", "type", "location")} | {"properties": properties}


__all__ = ["VM", "AzureServer", "Call", "Fault"]
