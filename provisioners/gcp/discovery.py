"""What a Google Cloud project can have: machine types with GPUs by zone, and the quotas of GPUs by region."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from google.cloud import compute_v1

from policies.model import CapacityType
from provisioners.gcp.api import GcpApi
from provisioners.gcp.errors import CLOUD
from provisioners.gcp.prices import guest_accelerators, machine_types, shapes_of
from provisioners.gcp.translate import zone_of
from provisioners.offers.catalog.discovered import Discovery, Progress, RegionalType
from provisioners.offers.catalog.model import Shape
from provisioners.port.accelerator_names import canonical
from provisioners.port.errors import AuthError

_ARM = "ARM64"
_PREFIX: Mapping[CapacityType, str] = {CapacityType.SPOT: "PREEMPTIBLE_", CapacityType.ON_DEMAND: ""}

Metrics = Mapping[str, float]  # limits by metric


def discover(api: GcpApi, known: Sequence[Shape], progress: Progress) -> Discovery:
    """Return what the project can have: from two lists of all zones, and one of the regions with their quotas.

    `known` are the shapes of the catalog. GPUs can be attached to machines in hundreds of ways, and only those in `known` count.
    """
    notes: list[str] = []
    attached = {shape.name for shape in known if "+" in shape.name}
    plain = {shape.name: shape for shape in known if shape.accelerator is None}
    progress(0, 3, "machine types")
    types = machine_types(api)
    progress(1, 3, "accelerator types")
    guests = guest_accelerators(api)
    progress(2, 3, "quotas")
    quotas = _quotas(api, notes)
    zones: dict[tuple[str, str], list[str]] = defaultdict(list)  # by type and region
    shapes: dict[str, Shape] = {}
    for zone, held in types.items():
        for machine in held:
            for shape in _shapes(machine, guests.get(zone, {}), attached, plain):
                shapes[shape.name] = shape
                zones[shape.name, zone_of(zone).region].append(zone)
    offerings = tuple(
        RegionalType(
            shapes[name], region, tuple(sorted(held)), _closed(shapes[name], region, quotas.get(region, {}))
        )
        for (name, region), held in sorted(zones.items())
    )
    regions = sorted({zone_of(zone).region for zone in types})
    progress(3, 3, "")
    return Discovery(CLOUD, api.now(), tuple(regions), offerings, tuple(notes))


def _shapes(
    machine: compute_v1.MachineType,
    guests: Mapping[str, int],
    attached: set[str],
    plain: Mapping[str, Shape],
) -> Iterator[Shape]:
    if machine.architecture == _ARM:
        return
    if machine.name in plain:
        yield plain[machine.name]
    for name, (accelerator, count) in shapes_of(machine, guests):
        if (
            accelerator.startswith("nvidia-")
            and not accelerator.endswith("-vws")
            and ("+" not in name or name in attached)
        ):
            yield Shape(
                CLOUD,
                name,
                canonical(accelerator),
                float(count),
                float(machine.guest_cpus),
                machine.memory_mb / 1024,
            )


def _closed(shape: Shape, region: str, quotas: Metrics) -> dict[CapacityType, str]:
    """Return by market why the project cannot use a shape; nothing for a market that it can use.

    GPUs of the H100's generation and later have quotas that the Compute API does not list: nothing is known of them.
    """
    closed = {}
    for market in CapacityType:
        metric = f"{_PREFIX[market]}NVIDIA_{_metric(shape.accelerator or '')}_GPUS"
        limit = quotas.get(metric)
        if limit is not None and limit < shape.accelerator_count:
            closed[market] = (
                f"the quota {metric} is {limit:g} in {region}, and {shape.name} has {shape.accelerator_count:g}"
            )
    return closed


def _metric(accelerator: str) -> str:
    return accelerator.upper().replace("-", "_")


def _quotas(api: GcpApi, notes: list[str]) -> dict[str, Metrics]:
    """Return the limits of quotas by region. None, and a note, if they may not be listed."""
    request = compute_v1.ListRegionsRequest(project=api.project)
    try:
        listed = list(api.listed(api.client(compute_v1.RegionsClient).list, request))
    except AuthError as error:
        notes.append(f"quotas: {error}")
        return {}
    return {region.name: {quota.metric: quota.limit for quota in region.quotas} for region in listed}
