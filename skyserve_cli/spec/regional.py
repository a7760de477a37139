"""The section `service.load_balancers`: agents on machines of their own, near the users."""

import re
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from policies.goals import AgentRegion
from policies.regions.names import DEFAULT_REGION_POLICY, REGION_NAMES
from skyserve_cli.spec.fields import Money, Port, not_bool, one_of, refuse
from skyserve_cli.spec.infra import KUBERNETES, cloud_of, cloud_refusal, known_clouds
from skyserve_cli.spec.model import DnsName, Pairs, RegionalAgents
from skyserve_cli.spec.section import Section

AT = "service.load_balancers"
_ANY_CLOUD = "*"
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_LONGEST_NAME = 253


def _places(value: object) -> tuple[AgentRegion, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise refuse("must be a list of regions, like [aws/us-east-1, gcp/europe-west4]", value)
    places = [_place(one, index) for index, one in enumerate(given)]
    first = {place: index for index, place in reversed(list(enumerate(places)))}
    for index, place in enumerate(places):
        if first[place] < index:
            raise refuse("is there twice; count says how many agents a region has", given[index], at=(index,))
    return tuple(places)


def _place(value: object, index: int) -> AgentRegion:
    cloud, slash, region = value.partition("/") if isinstance(value, str) else ("", "", "")
    cloud = cloud.lower()
    if cloud == "local":
        message = "is this machine; without load_balancers the load balancer stands here"
        raise refuse(message, value, at=(index,))
    if cloud_of(cloud) == KUBERNETES:
        if not region or "/" in region or _ANY_CLOUD in region:
            raise refuse(
                "must be kubernetes/CONTEXT, a name of clouds.kubernetes.contexts", value, at=(index,)
            )
        return AgentRegion(KUBERNETES, region)
    if not slash or not region or "/" in region or _ANY_CLOUD in region:
        raise refuse("must be cloud/region", value, at=(index,))
    refusal = cloud_refusal(cloud, cloud, "")
    if refusal is not None:
        raise refuse(refusal.problem.message, at=(index,), hint=refusal.problem.hint)
    return AgentRegion(cloud, region)


def _instance_types(value: object) -> Pairs:
    if isinstance(value, str) and value:
        return ((_ANY_CLOUD, value),)
    if not isinstance(value, Mapping) or not all(isinstance(one, str) and one for one in value.values()):
        raise refuse("must be an instance type, or a mapping from cloud to instance type", value)
    clouds = [cloud for cloud in known_clouds() if cloud != "local"]
    strange = next((cloud for cloud in value if cloud not in clouds), None)
    if strange is not None:
        raise refuse(f"must be one of {', '.join(clouds)}", strange)
    return tuple((str(cloud), str(name)) for cloud, name in value.items())


def _domain(value: object) -> str:
    """With the dot at its end, as DNS has it."""
    name = value.removesuffix(".") if isinstance(value, str) else ""
    if len(name) > _LONGEST_NAME or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise refuse("must be a domain name", value)
    return f"{name.lower()}."


def _name(value: object) -> str:
    """Empty for the zone itself, which DNS people write as @."""
    return "" if value == "@" else _domain(value).removesuffix(".")


def _url(value: object) -> str:
    """Without a slash at its end, as endpoints are."""
    text = value.rstrip("/") if isinstance(value, str) else ""
    try:
        found = urlsplit(text)
        fits = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        fits = False
    if not fits or found.username is not None or found.path or found.query or found.fragment:
        raise refuse("must be http://HOST or https://HOST, with :PORT if it is another than usual", value)
    return text


Places = Annotated[
    tuple[AgentRegion, ...],
    PlainValidator(_places),
    WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}, "minItems": 1}),
]
InstanceTypes = Annotated[
    Pairs,
    PlainValidator(_instance_types),
    WithJsonSchema({"type": ["string", "object"], "additionalProperties": {"type": "string"}}),
]
Domain = Annotated[str, PlainValidator(_domain), WithJsonSchema({"type": "string"})]
Name = Annotated[str, PlainValidator(_name), WithJsonSchema({"type": "string"})]
Url = Annotated[str, PlainValidator(_url), WithJsonSchema({"type": "string"})]
_SPILLS = REGION_NAMES
Spill = Annotated[str, PlainValidator(one_of(*_SPILLS)), WithJsonSchema({"enum": list(_SPILLS)})]
AgentCount = Annotated[int, BeforeValidator(not_bool), Field(ge=1, le=16)]


class DnsSection(Section):
    zone: Domain
    """The hosted zone in Route 53, like example.com."""
    name: Name
    """The name in it, like chat for chat.example.com; @ for the zone's own."""
    health_check: bool = True
    """Whether Route 53 checks each load balancer, and leaves an unhealthy one out of its responses."""


class LoadBalancersSection(Section):
    regions: Places
    """Where agents stand: cloud/region, one or a list."""
    count: AgentCount = 1
    """How many agents each region has."""
    instance_type: InstanceTypes | None = None
    """Machines they stand on, by cloud if there are several. Default: a small one."""
    port: Port | None = None
    """Port they listen on. Default: 8000, or a free one on a host that is shared."""
    spill: Spill = DEFAULT_REGION_POLICY
    """When a request is forwarded to another region: one_cost, skywalker, gorgo or local (never)."""
    usd_per_second: Money | None = None
    """What a second of waiting is worth: one_cost counts the price of traffic between regions against it. Default: it does not."""
    dns: DnsSection | None = None
    """One name for all of them; clients are led to the nearest region."""
    url: Url | None = None
    """What clients call, if something of yours is before the load balancers: a Gateway that ends TLS, say. Shown as the endpoint."""


def regional_agents(section: LoadBalancersSection | None) -> RegionalAgents:
    if section is None:
        return RegionalAgents()
    dns = (
        None if section.dns is None else DnsName(section.dns.zone, section.dns.name, section.dns.health_check)
    )
    types = section.instance_type or ()
    return RegionalAgents(
        section.regions,
        section.count,
        types,
        section.port,
        dns,
        section.spill,
        section.usd_per_second,
        section.url,
    )


def is_ambiguous(section: LoadBalancersSection) -> bool:
    """Return whether one instance type is named for several clouds, which have no type in common."""
    types = dict(section.instance_type or ())
    return _ANY_CLOUD in types and len({place.cloud for place in section.regions}) > 1
