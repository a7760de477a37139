"""From the alternatives of `resources` to what is asked of clouds, and back from an offer to its alternative. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from types import MappingProxyType

from policies.model import CapacityType, Offer, Zone
from provisioners.base import Candidate
from provisioners.catalog.names import canonical
from skyserve_cli.spec.model import EVERYWHERE, FileMount, ResourceChoice, ServiceSpec

_SAME_COUNT = 0.005

#: Kinds of buckets that a name is enough for, and how their URLs begin. One of Azure's has an account as well.
BUCKETS_BY_NAME = MappingProxyType({"s3": "s3", "gcs": "gs"})


def candidates_of(choice: ResourceChoice, preference: int = 0) -> list[Candidate]:
    """What to ask the clouds for. One for each place if the images are by place: others have none."""
    return [
        Candidate(
            cloud=cloud,
            region=region,
            zone=choice.zone,
            accelerator=choice.accelerator,
            accelerator_count=choice.accelerator_count,
            cpus=choice.cpus,
            memory=choice.memory,
            instance_type=choice.instance_type,
            use_spot=choice.use_spot,
            max_hourly_cost=choice.max_usd_hour,
            preference=preference,
        )
        for cloud, region in choice.places()
    ]


def choice_of(spec: ServiceSpec, offer: Offer) -> ResourceChoice:
    """The alternative that the offer is an answer to: the first that it fits, those of its capacity type before those
    it stands in for. Zones decide last, because an account may have names of its own for them."""
    fitting = [choice for choice in spec.resources if _fits(choice, offer)]
    is_spot = offer.capacity_type is CapacityType.SPOT

    def strangeness(choice: ResourceChoice) -> tuple[bool, bool]:
        return choice.use_spot != is_spot, choice.zone not in (None, offer.zone.name)

    return min(fitting or spec.resources, key=strangeness)  # the first of equals


def _fits(choice: ResourceChoice, offer: Offer) -> bool:
    """As far as an offer shows it."""
    if choice.cloud not in (None, offer.zone.cloud):
        return False
    if choice.region is not None and choice.region.lower() != offer.zone.region.lower():
        return False
    if choice.images and image_of(choice, offer.zone) is None:
        return False
    if choice.instance_type is not None:
        named = offer.instance_type.lower()
        if choice.instance_type.lower() not in (named, named.partition("+")[0]):
            return False
    if choice.accelerator is None:
        return choice.instance_type is not None or offer.accelerator is None
    same = offer.accelerator is not None and canonical(choice.accelerator) == canonical(offer.accelerator)
    return same and abs(choice.accelerator_count - offer.accelerator_count) < _SAME_COUNT


def image_of(choice: ResourceChoice, zone: Zone) -> str | None:
    """The image for a machine there: the region's, the cloud's, or that for all."""
    images = dict(choice.images)
    found = (images.get(place) for place in (zone.region, zone.cloud, EVERYWHERE))
    return next((image for image in found if image is not None), None)


def copies_of(mounts: Sequence[FileMount]) -> dict[str, str]:
    """What is to be copied, by where it goes. Several sources of one mount come to stand in it side by side, by their
    own names."""
    copies = {}
    for mount in mounts:
        if len(mount.sources) == 1:
            copies[mount.path] = mount.sources[0]
        for source in mount.sources if len(mount.sources) > 1 else ():
            copies[f"{mount.path.rstrip('/')}/{PurePosixPath(source).name}"] = source
        kind = BUCKETS_BY_NAME.get(mount.store or "s3")
        if mount.bucket is not None and not mount.sources and kind is not None:
            copies[mount.path] = f"{kind}://{mount.bucket}"
    return copies
