"""What replicas of services with `cache: node` have left on hosts, removed when a service is taken down with --purge.

Nodes of Kubernetes are out of reach here: what is on them stays (docs/howto/volumes-and-files.md says how to remove it).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, runtime_checkable

from provisioners.port.base import Cache
from provisioners.port.errors import ProvisionError
from skyserve_cli.clouds import CloudNotEnabledError, Clouds
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.clouds.garbage_collector import Collected
from skyserve_cli.controller.reconcile.mappers import cache_of, requirements_of
from skyserve_cli.state.values import ServiceRow


@runtime_checkable
class CacheSource(Protocol):
    """A provisioner whose hosts keep folders, and that can remove them."""

    def remove_cache(self, cache: Cache) -> tuple[list[str], list[str]]:
        """Return where the folder was removed, and a sentence for each place where it was not."""
        ...


def purged(
    names: Collection[str], rows: Iterable[ServiceRow], specs: SpecCache, owner: str, clouds: Clouds
) -> Collected:
    """Remove the folders of those services of `names` that are down, with --purge, and have no replica left."""
    removed: list[str] = []
    problems: list[str] = []
    for row in rows:
        if row.name not in names or not (row.down and row.purge) or row.attempts:
            continue
        spec = specs.get(row.name, row.version)
        cache = cache_of(owner, row.team, row.name, spec)
        if cache is None or cache.claim is not None:
            continue
        try:
            need = clouds.resolve(requirements_of(spec))
            for cloud in sorted({str(one.cloud) for one in need.candidates}):
                provisioner = clouds.get(cloud)
                if isinstance(provisioner, CacheSource):
                    gone, left = provisioner.remove_cache(cache)
                    removed += [f"the cache of {row.name} on {cloud}: {where}" for where in gone]
                    problems += left
        except (CloudNotEnabledError, ProvisionError) as error:
            problems.append(f"the cache of {row.name} is not removed: {error}")
    return Collected(tuple(removed), (), tuple(problems))
