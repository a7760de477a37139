"""From the alternatives of `resources` to the candidates that clouds are requested, and to images and copies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from policies.model import Zone
from provisioners.port.base import Candidate
from skyserve_cli.spec.model import BUCKETS_BY_NAME, EVERYWHERE, FileMount, ResourceChoice


def candidates_of(choice: ResourceChoice, preference: int = 0, index: int = 0) -> list[Candidate]:
    """Return what to request from the clouds.

    One for each place if the images are by place: others have none. `index` is where the alternative stands under
    `resources`.
    """
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
            choice=index,
            reservation=choice.reservation,
        )
        for cloud, region in choice.places()
    ]


def image_of(choice: ResourceChoice, zone: Zone) -> str | None:
    """Return the image for a machine there: the region's, the cloud's, or that for all."""
    images = dict(choice.images)
    found = (images.get(place) for place in (zone.region, zone.cloud, EVERYWHERE))
    return next((image for image in found if image is not None), None)


def copies_of(mounts: Sequence[FileMount]) -> dict[str, str]:
    """Return the files to copy, by where they go.

    Several sources of one mount come to stand in it side by side, by their own names.
    """
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
