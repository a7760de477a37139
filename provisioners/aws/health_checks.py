"""Health checks of Route 53: each watches one load balancer from outside, so that its address leaves DNS without a controller.

A check requests `/-/ready` of the data port every INTERVAL_S seconds from several continents, and finds a load balancer unhealthy after
FAILURES failures. That path needs no API key and shows nothing but whether a request would find a replica.

A check is ours by its CallerReference: our prefix, the owner, a digest of the load balancer's token, and when it was made, as Route 53
never takes a reference again. It is tagged with owner and token, as machines are, so what a controller leaves behind when it is killed
is found like other orphans. A check without the tags is one that was made at that very moment.

Sources: "Creating, updating, and deleting health checks" and "CreateHealthCheck", Amazon Route 53 documentation; prices from "Amazon
Route 53 pricing".
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from provisioners.aws.api import AwsApi, Reply
from provisioners.port.dns import Endpoint
from provisioners.port.errors import AuthError, ProvisionError
from provisioners.port.vm import OWNER_TAG, TOKEN_TAG, OrphanedResource, Silent

SERVICE = "route53"
REGION = "us-east-1"  # where the one Route 53 there is responds
PATH = "/-/ready"
INTERVAL_S = 10
FAILURES = 3
USD_MONTH = 1.5  # of an address in AWS: 0.50 and 1.00 for the short interval; HTTPS 1.00 more, other addresses twice as much

_PREFIX = "skyserve-"
_PAGE = "100"
_TAGS_AT_ONCE = 10
_GONE = ("NoSuchHealthCheck",)


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One that exists."""

    id: str
    reference: str
    config: Mapping[str, Any]


def is_checkable(endpoint: Endpoint) -> bool:
    """Return whether Route 53 can reach the load balancer: it refuses addresses that are not public."""
    try:
        return bool(endpoint.scheme) and ipaddress.IPv4Address(endpoint.address).is_global
    except ValueError:
        return False


class HealthChecks:
    """Those of one account. Raises the classes of `provisioners.port.errors`."""

    kind: ClassVar[str] = "health-check"  # of an orphan

    def __init__(self, api: AwsApi) -> None:
        self._api = api

    def ensure(
        self, owner: str, name: str, endpoints: Sequence[Endpoint]
    ) -> tuple[dict[Endpoint, str], list[str]]:
        """Have a check for each endpoint. Returns their ids, and those of checks of these load balancers that nothing needs any more.

        `name` is what clients call, without a dot at its end.
        """
        listed = list(self._listed(owner)) if endpoints else []
        found: dict[Endpoint, str] = {}
        unneeded: list[str] = []
        for endpoint in endpoints:
            config = _config(endpoint, name)
            there = [one for one in listed if one.reference.startswith(_reference(owner, endpoint.token))]
            fitting = [one for one in there if _equals(one.config, config)]
            found[endpoint] = fitting[0].id if fitting else self._create(owner, name, endpoint, config)
            unneeded += [one.id for one in there if one.id != found[endpoint]]
        return found, unneeded

    def delete(self, check_id: str) -> None:
        """Delete a check that no record names; one that is gone is fine."""
        self._call("DeleteHealthCheck", unless=_GONE, HealthCheckId=check_id)

    def orphans(self, owner: str, silent: Silent | None = None) -> list[OrphanedResource]:
        """Return all checks of the owner: the caller knows which load balancers there are."""
        try:
            return list(self._owned(owner))
        except AuthError:
            return []  # these credentials cannot have made any
        except ProvisionError as error:
            if silent is None:
                raise
            silent(SERVICE, error)
            return []

    def _owned(self, owner: str) -> Iterator[OrphanedResource]:
        listed = list(self._listed(owner))
        for start in range(0, len(listed), _TAGS_AT_ONCE):
            some = listed[start : start + _TAGS_AT_ONCE]
            ids = [one.id for one in some]
            reply = self._call("ListTagsForResources", ResourceType="healthcheck", ResourceIds=ids)
            tokens = {each["ResourceId"]: _token(each) for each in reply.get("ResourceTagSets", ())}
            for one in some:
                made_at = float(one.reference.rpartition("-")[2])
                yield OrphanedResource(self.kind, one.id, REGION, tokens.get(one.id, ""), made_at, USD_MONTH)

    def _create(self, owner: str, name: str, endpoint: Endpoint, config: Mapping[str, Any]) -> str:
        reference = f"{_reference(owner, endpoint.token)}{int(self._api.now())}"
        made = self._call("CreateHealthCheck", CallerReference=reference, HealthCheckConfig=config)
        check_id = str(made["HealthCheck"]["Id"])
        tags = {"Name": f"{name} {endpoint.address}", OWNER_TAG: owner, TOKEN_TAG: endpoint.token}
        self._call(
            "ChangeTagsForResource",
            ResourceType="healthcheck",
            ResourceId=check_id,
            AddTags=[{"Key": key, "Value": value} for key, value in tags.items()],
        )
        return check_id

    def _listed(self, owner: str) -> Iterator[HealthCheck]:
        start: dict[str, str] = {}
        while True:
            page = self._call("ListHealthChecks", MaxItems=_PAGE, **start)
            for one in page.get("HealthChecks", ()):
                if one["CallerReference"].startswith(f"{_PREFIX}{owner}-"):
                    yield HealthCheck(one["Id"], one["CallerReference"], one["HealthCheckConfig"])
            if not page.get("IsTruncated"):
                return
            start = {"Marker": page["NextMarker"]}

    def _call(self, action: str, *, unless: Sequence[str] = (), **params: Any) -> Reply:
        return self._api.request(REGION, action, params, service=SERVICE, unless=unless)


def _config(endpoint: Endpoint, name: str) -> dict[str, Any]:
    config = {
        "IPAddress": endpoint.address,
        "Port": endpoint.port,
        "Type": endpoint.scheme.upper(),
        "ResourcePath": PATH,
        "FullyQualifiedDomainName": name,
        "RequestInterval": INTERVAL_S,
        "FailureThreshold": FAILURES,
    }
    return config | {"EnableSNI": True} if endpoint.scheme == "https" else config


def _equals(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a check is as it is wanted; what was not given has a default."""
    return all(there.get(key) == value for key, value in wanted.items())


def _reference(owner: str, token: str) -> str:
    return f"{_PREFIX}{owner}-{hashlib.sha256(token.encode()).hexdigest()[:16]}-"


def _token(tagged: Reply) -> str:
    return next((str(one["Value"]) for one in tagged.get("Tags", ()) if one["Key"] == TOKEN_TAG), "")
