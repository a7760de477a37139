"""Resources that are billed and belong to no machine: disks and reserved addresses with the owner's label.

Machines take their disks with them, and their addresses are not reserved, so there should be none. A disk that is new
may belong to a machine which is just being made, and is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.cloud import compute_v1

from provisioners.gcp.api import GcpApi
from provisioners.gcp.errors import CLOUD
from provisioners.gcp.translate import decode_label, last, owned, unix_s
from provisioners.port.errors import InvalidRequestError
from provisioners.port.vm import OWNER_TAG, TOKEN_TAG, OrphanedResource, Silent

_GRACE_S = 120.0

# "Disk and image pricing", "VPC network pricing", us-central1: a balanced disk, an external address that is not used.
_USD_GB_MONTH = 0.1
_ADDRESS_USD_MONTH = 7.3


class GcpOrphans:
    """A orphan's id is `SCOPE/KIND/NAME`, as in `zones/us-central1-a/disks/NAME`."""

    def __init__(self, api: GcpApi) -> None:
        self._api = api

    def of(self, owner: str, silent: Silent | None = None) -> Sequence[OrphanedResource]:
        """Return all of them, or an error; see `Machines.orphans`."""
        api, found = self._api, list[OrphanedResource]()
        disks = compute_v1.AggregatedListDisksRequest(project=api.project, filter=owned(owner))
        for scope, held in api.listed(
            api.client(compute_v1.DisksClient).aggregated_list, disks, silent=silent
        ):
            for disk in held.disks:
                if not disk.users and self._is_old(disk.creation_timestamp):
                    found.append(
                        OrphanedResource(
                            "disk",
                            f"{scope}/disks/{disk.name}",
                            _region(scope),
                            _token_of(disk),
                            unix_s(disk.creation_timestamp),
                            disk.size_gb * _USD_GB_MONTH,
                        )
                    )
        addresses = compute_v1.AggregatedListAddressesRequest(project=api.project, filter=owned(owner))
        for scope, held in api.listed(
            api.client(compute_v1.AddressesClient).aggregated_list, addresses, silent=silent
        ):
            for address in held.addresses:
                if not address.users and self._is_old(address.creation_timestamp):
                    found.append(
                        OrphanedResource(
                            "address",
                            f"{scope}/addresses/{address.name}",
                            _region(scope),
                            _token_of(address),
                            unix_s(address.creation_timestamp),
                            _ADDRESS_USD_MONTH,
                        )
                    )
        return found

    def owners(self, silent: Silent | None = None) -> set[str]:
        """Return whose instances and disks there are, by their labels."""
        api, tagged = self._api, f"labels.{OWNER_TAG}:*"
        instances = compute_v1.AggregatedListInstancesRequest(project=api.project, filter=tagged)
        disks = compute_v1.AggregatedListDisksRequest(project=api.project, filter=tagged)
        found: list[str] = []
        listed = api.listed(api.client(compute_v1.InstancesClient).aggregated_list, instances, silent=silent)
        found += [one.labels.get(OWNER_TAG, "") for _, held in listed for one in held.instances]
        listed = api.listed(api.client(compute_v1.DisksClient).aggregated_list, disks, silent=silent)
        found += [one.labels.get(OWNER_TAG, "") for _, held in listed for one in held.disks]
        return {decode_label(label) for label in found if label}

    def remove(self, orphan: OrphanedResource) -> None:
        """Request its deletion; already gone is success."""
        api, project = self._api, self._api.project
        match orphan.id.split("/"):
            case ["zones", zone, "disks", name]:
                disk = compute_v1.DeleteDiskRequest(project=project, zone=zone, disk=name)
                api.find(api.client(compute_v1.DisksClient).delete_unary, disk, name)
            case ["regions", region, "disks", name]:
                regional = compute_v1.DeleteRegionDiskRequest(project=project, region=region, disk=name)
                api.find(api.client(compute_v1.RegionDisksClient).delete_unary, regional, name)
            case ["regions", region, "addresses", name]:
                address = compute_v1.DeleteAddressRequest(project=project, region=region, address=name)
                api.find(api.client(compute_v1.AddressesClient).delete_unary, address, name)
            case ["global", "addresses", name]:
                everywhere = compute_v1.DeleteGlobalAddressRequest(project=project, address=name)
                api.find(api.client(compute_v1.GlobalAddressesClient).delete_unary, everywhere, name)
            case _:
                raise InvalidRequestError(
                    f"{orphan.id} is not an orphaned resource of Google Cloud", cloud=CLOUD
                )

    def _is_old(self, timestamp: str) -> bool:
        return (unix_s(timestamp) or 0.0) < self._api.now() - _GRACE_S


def _token_of(thing: compute_v1.Disk | compute_v1.Address) -> str:
    return decode_label(thing.labels.get(TOKEN_TAG, ""))


def _region(scope: str) -> str:
    name = last(scope)
    return name.rpartition("-")[0] if scope.startswith("zones/") else name
