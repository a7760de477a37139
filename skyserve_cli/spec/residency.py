"""The section `service.residency`: zones, which are lists of regions that may serve certain requests."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field, PlainValidator, WithJsonSchema

from policies.regions.residency import EXCEPT, ResidencyZone, matches
from skyserve_cli.spec.fields import refuse
from skyserve_cli.spec.model import ResourceChoice
from skyserve_cli.spec.problems import Problem
from skyserve_cli.spec.section import Section

AT = "service.residency"
_PATTERN = re.compile(r"!?[a-z0-9_*]+/[A-Za-z0-9_.*-]+")


def _patterns(value: object) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise refuse("must be a list of regions, like [aws/eu-*, gcp/europe-west4]", value)
    for index, one in enumerate(given):
        if not isinstance(one, str) or not _PATTERN.fullmatch(one):
            raise refuse("must be cloud/region, with * for any; ! before it takes it out", one, at=(index,))
    if all(one.startswith(EXCEPT) for one in given):
        raise refuse("only takes regions out; name those that are in as well", value)
    return tuple(given)


RegionPatterns = Annotated[
    tuple[str, ...],
    PlainValidator(_patterns),
    WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}, "minItems": 1}),
]
ZoneName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")]


class ResidencySection(Section):
    served_in: RegionPatterns
    """Regions that may serve the zone: cloud/region, with * for any and ! before one that is not of it."""
    entered_in: RegionPatterns | None = None
    """Requests that enter at load balancers of these regions are of the zone. Default: only those of keys with this residency."""


def residency_zones(sections: Mapping[str, ResidencySection]) -> tuple[ResidencyZone, ...]:
    return tuple(ResidencyZone(name, one.served_in, one.entered_in or ()) for name, one in sections.items())


def problems(
    sections: Mapping[str, ResidencySection], keys: Sequence[str | None], choices: Sequence[ResourceChoice]
) -> Iterator[Problem]:
    """Yield keys of unknown zones, and zones that no replica can be in. `keys` has the residency of each API key."""
    for index, zone in enumerate(keys):
        if zone is not None and zone not in sections:
            known = f"known: {', '.join(sections)}" if sections else "service.residency has no zone"
            path = f"service.load_balancer.api_keys[{index}].residency"
            yield Problem(path, f"names a zone that is not in service.residency; {known}", zone)
    for name, section in sections.items():
        if choices and not any(_may_be_in(choice, section.served_in) for choice in choices):
            hint = "add a region of it to resources, or a region of resources to it"
            yield Problem(f"{AT}.{name}.served_in", "has no region where a replica may be", hint=hint)


def _may_be_in(choice: ResourceChoice, patterns: Sequence[str]) -> bool:
    for cloud, region in choice.places():
        if cloud is not None and region is not None:
            if matches(f"{cloud}/{region}", patterns):
                return True
        elif any(
            cloud is None or matches(cloud, [one.partition("/")[0]])
            for one in patterns
            if not one.startswith(EXCEPT)
        ):
            return True
    return False
