"""HTTP as AWS speaks it: which service, region and action a request is for, and how each service refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from werkzeug.wrappers import Response

XMLNS = "http://ec2.amazonaws.com/doc/2016-11-15/"

# HTTP statuses by which the SDK decides whether to repeat: capacity is a server error in EC2, throttling is a 503.
STATUSES = {
    "DryRunOperation": 412,
    "InsufficientAddressCapacity": 500,
    "InsufficientCapacity": 500,
    "InsufficientInstanceCapacity": 500,
    "InternalError": 500,
    "RequestLimitExceeded": 503,
    "ServiceUnavailable": 503,
    "Unavailable": 503,
    "AuthFailure": 401,
    "AccessDenied": 403,
    "AccessDeniedException": 403,
    "ExpiredToken": 403,
    "InvalidClientTokenId": 403,
    "UnauthorizedOperation": 403,
}


class Refusal(Exception):
    """A refusal of a service."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(code)
        self.code = code
        self.message = message or f"refused with {code}"


@dataclass(slots=True)
class Call:
    """One request. `params` are the flat names of the query protocol, or the fields of the JSON document."""

    service: str
    region: str
    action: str
    params: dict[str, Any]
    responded: str = field(default="")  # "ok", a code, or "lost"

    @property
    def is_json(self) -> bool:
        return self.service in ("ssm", "servicequotas")

    def list(self, prefix: str) -> list[str]:
        """`prefix.1`, `prefix.2`, …"""
        found = []
        while (value := self.params.get(f"{prefix}.{len(found) + 1}")) is not None:
            found.append(str(value))
        return found

    def filters(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        while (name := self.params.get(f"Filter.{len(found) + 1}.Name")) is not None:
            found[str(name)] = self.list(f"Filter.{len(found) + 1}.Value")
        return found

    def tags(self, kind: str) -> dict[str, str]:
        """The tags that the request gives to what it makes of a kind."""
        at = 1
        while (of := self.params.get(f"TagSpecification.{at}.ResourceType")) is not None:
            if of == kind:
                found: dict[str, str] = {}
                prefix = f"TagSpecification.{at}.Tag"
                while (key := self.params.get(f"{prefix}.{len(found) + 1}.Key")) is not None:
                    found[str(key)] = str(self.params.get(f"{prefix}.{len(found) + 1}.Value", ""))
                return found
            at += 1
        return {}

    def body(self) -> bytes:
        return urlencode(self.params).encode() if not self.is_json else json.dumps(self.params).encode()


def call_of(environ: Mapping[str, Any], body: bytes) -> Call:
    """Read a signed request. One that is not signed has no owner."""
    parts = str(environ.get("HTTP_AUTHORIZATION", "")).partition("Credential=")[2].split(",")[0].split("/")
    if len(parts) != 5:
        raise Refusal("MissingAuthenticationToken")
    _, _, region, service, _ = parts
    target = environ.get("HTTP_X_AMZ_TARGET")
    if target is not None:
        return Call(service, region, str(target).rpartition(".")[2], json.loads(body or b"{}"))
    if service == "route53":  # REST: the path and the method are the action
        assert (environ["REQUEST_METHOD"], environ["PATH_INFO"]) == ("GET", "/2013-04-01/healthcheck"), (
            environ
        )
        return Call(service, region, "ListHealthChecks", {})
    params = dict(parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True))
    return Call(service, region, params["Action"], dict(params))


def refused(call: Call, refusal: Refusal) -> Response:
    code, message = escape(refusal.code), escape(refusal.message)
    status = STATUSES.get(refusal.code, 400)
    if call.is_json:
        text = json.dumps({"__type": refusal.code, "message": refusal.message})
        return Response(text, status, content_type="application/x-amz-json-1.1")
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    if call.service == "ec2":
        text = f"<Response><Errors>{error}</Errors><RequestID>r-1</RequestID></Response>"
    else:
        text = f"<ErrorResponse>{error}<RequestId>r-1</RequestId></ErrorResponse>"
    return Response(text, status, content_type="text/xml")


def answered_json(document: Mapping[str, Any]) -> Response:
    return Response(json.dumps(document), 200, content_type="application/x-amz-json-1.1")


def answered_list(
    action: str, name: str, items: Iterable[Mapping[str, Any]], next_token: str = ""
) -> Response:
    """An EC2 list: each item a mapping of element names to text, a mapping, or a list of mappings."""
    inner = "".join(f"<item>{_xml(item)}</item>" for item in items)
    more = f"<nextToken>{next_token}</nextToken>" if next_token else ""
    text = f'<{action}Response xmlns="{XMLNS}"><requestId>r-1</requestId><{name}>{inner}</{name}>{more}</{action}Response>'
    return Response(text, 200, content_type="text/xml")


def without_instances(body: bytes, hidden: set[str]) -> bytes:
    """A response of DescribeInstances in which some are missing, as in the first seconds."""
    ElementTree.register_namespace("", XMLNS)
    root = ElementTree.fromstring(body)  # noqa: S314 (our own response)
    for instances in root.iterfind(".//{*}instancesSet"):
        for item in list(instances):
            if item.findtext("{*}instanceId") in hidden:
                instances.remove(item)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def id_of_the_instance(body: bytes) -> str:
    """Which RunInstances has made."""
    (found,) = re.findall(rb"<instanceId>([^<]+)<", body)
    return str(found.decode())


def with_launch_time(body: bytes, at: float) -> bytes:
    return re.sub(rb"<launchTime>[^<]*<", f"<launchTime>{iso(at)}<".encode(), body)


def utc(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def iso(at: float) -> str:
    return utc(at).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _xml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "".join(f"<{name}>{_xml(inner)}</{name}>" for name, inner in value.items())
    if isinstance(value, list):
        return "".join(f"<item>{_xml(item)}</item>" for item in value)
    return escape(str(value))
