"""Whether machines without public addresses reach anything outside of their network: Cloud NAT. Nothing is changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from google.cloud import compute_v1

from provisioners.gcp.api import GcpApi
from provisioners.gcp.paths import Network, NetworkSetup, network_of, network_of_url, subnetwork_of
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import Finding, Level

_WHAT = "way out of private networks"
_OWN = (
    "with use_private_ip and neither network nor subnets, machines are in a network that skyserve makes: it has no Cloud NAT, so "
    "they download nothing, and this host is not in it; set clouds.gcp.subnets (docs/network.md)"
)


def outbound(api: GcpApi, setup: NetworkSetup, regions: Sequence[str]) -> Iterator[Finding]:
    """Findings for machines without public addresses; none for others."""
    if not setup.use_private_ip:
        return
    if setup.makes_networks:
        yield Finding(_WHAT, Level.NOTE, _OWN)
        return
    try:
        wanted = _wanted(api, setup, regions)
        for network, where in sorted(wanted.items()):
            yield _finding(network, where, _regions_with_nat(api, network))
    except ProvisionError as error:
        yield Finding(_WHAT, Level.NOTE, f"not determined: {error.message}")


def _wanted(api: GcpApi, setup: NetworkSetup, regions: Sequence[str]) -> dict[Network, set[str]]:
    """Return the networks that are used, each with the regions that are; none: any region."""
    found: dict[Network, set[str]] = defaultdict(set)
    client = api.client(compute_v1.SubnetworksClient)
    for region, path in setup.subnets.items():
        project, _, name = subnetwork_of(path)
        get = compute_v1.GetSubnetworkRequest(project=project, region=region, subnetwork=name)
        found[network_of_url(api.call(client.get, get).network)].add(region)
    if setup.network is not None and not setup.subnets:
        found[network_of(setup.network, api.project)] |= set(regions)
    return found


def _regions_with_nat(api: GcpApi, network: Network) -> set[str]:
    request = compute_v1.AggregatedListRoutersRequest(project=network.project)
    scopes = api.listed(api.client(compute_v1.RoutersClient).aggregated_list, request)
    return {
        scope.removeprefix("regions/")
        for scope, held in scopes
        for router in held.routers
        if router.nats and network_of_url(router.network).name == network.name
    }


def _finding(network: Network, wanted: set[str], have: set[str]) -> Finding:
    lacking = sorted(wanted - have)
    if not wanted and have:
        return Finding(_WHAT, message=f"{network.name} has Cloud NAT in {', '.join(sorted(have))}")
    if wanted and not lacking:
        return Finding(_WHAT)
    where = f"in {', '.join(lacking)}" if lacking else "in any region"
    message = (
        f"the network {network.name} has no Cloud NAT {where}: machines there download nothing, unless routes of yours lead out; "
        "make one (`gcloud compute routers nats create`), see docs/network.md"
    )
    return Finding(_WHAT, Level.NOTE, message)
