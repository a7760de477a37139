"""`resources` -> the list of `ResourceChoice`: accelerators x alternatives, each merged and complete."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from skyserve_cli.spec.accelerators import Accelerators
from skyserve_cli.spec.infra import InfraPlace, InvalidInfra, cloud_of, cloud_refusal, narrowed, parse_infra
from skyserve_cli.spec.model import ResourceChoice
from skyserve_cli.spec.problems import Problem, SpecWarning, dotted, shown
from skyserve_cli.spec.schema import AlternativeSection, ResourcesSection

_BASE = "resources"
_NO_ACCELERATOR = Accelerators((("", 0.0),), ordered=False)
# Fields of an alternative that replace the base's as they are, and their name in a ResourceChoice.
_OVERRIDING = {
    "instance_type": "instance_type",
    "cpus": "cpus",
    "memory": "memory",
    "disk_size": "disk_size_gb",
    "disk_tier": "disk_tier",
    "network_tier": "network_tier",
    "local_disk": "local_disk",
    "image_id": "images",
    "max_hourly_cost": "max_usd_hour",
    "reservation": "reservation",
}


#: For each field of a choice (as `provisioners.port.base.Candidate` calls it) the path of the key that sets it, or of the
#: alternative if none does.
Origin = Mapping[str, str]


@dataclass(slots=True)
class ParsedAlternatives:
    """The alternatives, in order, with the problems and the warnings of the section."""

    origins: dict[ResourceChoice, Origin] = field(default_factory=dict)
    ordered: bool = False
    ports: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """For each alternative: the path of the key that sets its ports, and the ports."""
    problems: list[Problem] = field(default_factory=list)
    warnings: list[SpecWarning] = field(default_factory=list)

    @property
    def choices(self) -> list[ResourceChoice]:
        return list(self.origins)


def expand(resources: ResourcesSection, spot_knob: str | None) -> ParsedAlternatives:
    """Return the alternatives of `resources`. `spot_knob` is a key in use of the replica policy that needs spot replicas."""
    found = ParsedAlternatives()
    found.problems.extend(_duplicates(resources))
    merged = list(_merged(resources, spot_knob, found))
    menu_ordered = any(menu.ordered for _, menu, _ in merged)
    found.ordered = bool(resources.ordered) or menu_ordered
    if resources.ordered and any(len(menu.choices) > 1 for _, menu, _ in merged):
        message = (
            "gives an order, and so do several accelerators in one entry; write one accelerator per entry"
        )
        found.problems.append(Problem(dotted((_BASE, "ordered")), message))
    # An order of accelerators comes before the alternatives: the first accelerator anywhere, then the second.
    longest = max((len(menu.choices) for _, menu, _ in merged), default=0)
    turns = range(longest) if menu_ordered else [None]
    for turn in turns:
        for choice, menu, origin in merged:
            for name, count in menu.choices if turn is None else menu.choices[turn : turn + 1]:
                complete = replace(choice, accelerator=name or None, accelerator_count=count)
                found.origins.setdefault(complete, origin)
    return found


def _duplicates(resources: ResourcesSection) -> Iterator[Problem]:
    for path, section in _sections(resources):
        if section.infra and (section.cloud or section.region or section.zone):
            yield Problem(f"{path}.infra", "says what cloud, region and zone say; use one of the two forms")
        if section.gpus and section.accelerators:
            yield Problem(f"{path}.gpus", "is another name for accelerators; use one of them")
    for key in ("any_of", "ordered"):
        if getattr(resources, key) == []:
            yield Problem(f"{_BASE}.{key}", "names no alternative")
    if resources.any_of and resources.ordered:
        yield Problem(
            f"{_BASE}.ordered", "cannot stand next to any_of: either there is an order or there is none"
        )


def _sections(resources: ResourcesSection) -> Iterator[tuple[str, AlternativeSection]]:
    yield _BASE, resources
    yield from _alternatives(resources)


def _alternatives(resources: ResourcesSection) -> list[tuple[str, AlternativeSection]]:
    key = "any_of" if resources.any_of else "ordered"
    entries: list[AlternativeSection] = getattr(resources, key) or []
    return [(dotted((_BASE, key, index)), entry) for index, entry in enumerate(entries)]


def _merged(
    resources: ResourcesSection, spot_knob: str | None, found: ParsedAlternatives
) -> Iterator[tuple[ResourceChoice, Accelerators, Origin]]:
    """Yield each alternative laid over the base, without its accelerator; the accelerators it may have; its origin."""
    base = _place(_BASE, resources, InfraPlace())
    foreign: list[Problem] = []
    alternatives = _alternatives(resources) or [(_BASE, resources)]
    kept = 0
    for path, entry in alternatives:
        place = base if entry is resources else _place(path, entry, base)
        use_spot = _use_spot(path, entry, resources, spot_knob, found.problems)
        if isinstance(place, InvalidInfra):
            (foreign if place.foreign else found.problems).append(place.problem)
            continue
        kept += 1
        ports_path, ports = (path, entry.ports) if entry.ports is not None else (_BASE, resources.ports)
        found.ports.append((f"{ports_path}.ports", ports or ()))
        menu = entry.accelerators or entry.gpus or resources.accelerators or resources.gpus
        origin = _origin(path, entry, resources)
        yield _choice(place, use_spot, entry, resources), menu or _NO_ACCELERATOR, origin
    if kept:
        found.warnings.extend(SpecWarning(each.path, f"{each.message}; left out") for each in foreign)
    else:
        found.problems.extend(foreign)


def _place(
    path: str, section: AlternativeSection, base: InfraPlace | InvalidInfra
) -> InfraPlace | InvalidInfra:
    if section.infra is not None:
        return parse_infra(section.infra, f"{path}.infra")
    if section.cloud is not None:
        cloud = cloud_of(section.cloud.lower())
        refusal = cloud_refusal(cloud, section.cloud, f"{path}.cloud")
        # The base's region is one of the base's cloud: on another cloud it means nothing.
        known = base if isinstance(base, InfraPlace) and base.cloud in (None, cloud) else InfraPlace()
        return refusal or narrowed(known, cloud, section.region, section.zone)
    return base if isinstance(base, InvalidInfra) else narrowed(base, None, section.region, section.zone)


def _use_spot(
    path: str,
    entry: AlternativeSection,
    base: AlternativeSection,
    spot_knob: str | None,
    problems: list[Problem],
) -> bool:
    said_by = path if entry.use_spot is not None else _BASE
    said = entry.use_spot if entry.use_spot is not None else base.use_spot
    if spot_knob is not None and said is False:
        message = f"must not be false: {spot_knob} asks for spot replicas (got {shown(said)})"
        problems.append(Problem(f"{said_by}.use_spot", message, said))
    return spot_knob is not None if said is None else said


def _origin(path: str, entry: AlternativeSection, base: AlternativeSection) -> Origin:
    def of(*keys: str) -> str:
        said = (
            (at, key)
            for at, section in ((path, entry), (_BASE, base))
            for key in keys
            if getattr(section, key) is not None
        )
        return next((f"{at}.{key}" for at, key in said), path)

    accelerator = of("accelerators", "gpus")
    return {
        "cloud": of("infra", "cloud"),
        "ports": of("ports"),
        "region": of("infra", "region"),
        "zone": of("infra", "zone"),
        "accelerator": accelerator,
        "accelerator_count": accelerator,
        **{
            key: of(key)
            for key in (
                "cpus",
                "memory",
                "instance_type",
                "use_spot",
                "max_hourly_cost",
                "image_id",
                "reservation",
            )
        },
    }


def _choice(
    place: InfraPlace, use_spot: bool, entry: AlternativeSection, base: AlternativeSection
) -> ResourceChoice:
    overriding = {}
    for key, name in _OVERRIDING.items():
        value = getattr(entry, key) if getattr(entry, key) is not None else getattr(base, key)
        if value is not None:
            overriding[name] = value
    labels = {**(base.labels or {}), **(entry.labels or {})}
    return ResourceChoice(
        cloud=place.cloud,
        region=place.region,
        zone=place.zone,
        use_spot=use_spot,
        labels=tuple(sorted(labels.items())),
        **overriding,
    )
