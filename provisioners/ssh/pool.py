"""A pool of the user's own hosts: what config.yaml says about them, and what they offer.

    clouds:
      ssh:
        pools:
          rack:                              # a pool, which is a region
            user: ubuntu
            identity_file: ~/.ssh/id_ed25519
            known_hosts: ~/.ssh/known_hosts  # the default; or per host, host_key: ssh-ed25519 AAAA…
            hosts:
              - {name: gpu-1, address: 10.0.0.1, accelerators: {L4: 4}}
              - {name: gpu-2, address: 10.0.0.2, accelerators: {H100: 8}, exclusive: true, price_usd_hour: 12.5}

How hosts are reached, of the pool or of a single host: `bastion` (user@host:port, or a mapping with host, user, port, identity_file,
known_hosts, host_key), or `proxy_command` as in OpenSSH (%h, %p and %r stand for address, port and user). `certificate_file`,
`passphrase_file` and `ssh_agent` go with the key, or stand in for it.

A host is a zone of its own, unless `zone` puts several in one. An `exclusive` host is had as a whole; others are shared,
GPU by GPU. Controllers that share a host log in as the same user, so that all of them see each
other's claims. A host is not preempted: its machines are on-demand ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from policies.model import CapacityType, Offer, Role, Zone
from provisioners.offers.explain_no_offer import NoOffer
from provisioners.offers.matching import each_once, ranked_by
from provisioners.port.base import Candidate, Requirements
from provisioners.remote.ssh_config import ACCESS_KEYS, SshAccess, access_of

CLOUD = "ssh"
INSTANCE_TYPE = "host"
_POOL_KEYS = (*ACCESS_KEYS, "hosts")


class PoolError(ValueError):
    """The pools in config.yaml are wrong; the message names everything that is, by path."""


@dataclass(frozen=True, slots=True)
class PoolHost:
    """`price_usd_hour` is of the whole host.

    `address` is where we reach it, by the way that `access` says, `private_address` where the others do.
    """

    name: str
    pool: str
    address: str
    access: SshAccess
    private_address: str | None = None
    accelerator: str | None = None
    gpus: int = 0
    exclusive: bool = False
    zone: str = ""
    price_usd_hour: float = 0.0

    @property
    def place(self) -> Zone:
        return Zone(CLOUD, self.pool, self.zone or self.name)


@dataclass(frozen=True, slots=True)
class HostPools:
    hosts: tuple[PoolHost, ...]

    def in_zone(self, zone: Zone) -> tuple[PoolHost, ...]:
        return tuple(host for host in self.hosts if host.place == zone)

    def host(self, name: str) -> PoolHost | None:
        return next((host for host in self.hosts if host.name == name), None)


def load_pools(raw: Mapping[str, Any]) -> HostPools:
    """Return what `clouds.ssh.pools` of config.yaml says. Raises PoolError."""
    complaints: list[str] = []
    hosts = tuple(_hosts(raw, complaints))
    names = [host.name for host in hosts]
    complaints += [
        f"clouds.ssh.pools: there are two hosts {name!r}"
        for name in sorted(set(names))
        if names.count(name) > 1
    ]
    if complaints:
        raise PoolError("; ".join(complaints))
    return HostPools(hosts)


def offers_of(pools: HostPools, need: Requirements) -> list[Offer]:
    """Return what the hosts could take if they were idle, cheapest first; with `need.ordered`, in the candidates' order."""
    if need.role is Role.LOAD_BALANCER:  # it would have the whole of an exclusive host
        pools = HostPools(tuple(host for host in pools.hosts if not host.exclusive))
    groups = [
        sorted(_fitting(pools, candidate, need.num_nodes), key=ranked_by(need.work))
        for candidate in need.candidates
    ]
    offers = each_once(offer for group in groups for offer in group)
    return offers if need.ordered else sorted(offers, key=ranked_by(need.work))


def explain_no_offer(pools: HostPools, candidate: Candidate) -> NoOffer | None:
    """Return which wish of the candidate left no host; None if it has an offer."""
    if candidate.use_spot:
        return NoOffer("use_spot", "your own hosts are not spot machines", "they are not preempted")
    if _any(candidate.instance_type) not in (None, INSTANCE_TYPE):
        return NoOffer("instance_type", f"hosts of yours are no {candidate.instance_type}", "leave it out")
    name, count = candidate.accelerator, candidate.accelerator_count
    wanted = f"{name}:{count:g}"
    left: Sequence[PoolHost] = pools.hosts
    for field, asked in (("region", _any(candidate.region)), ("zone", _any(candidate.zone))):
        known = sorted({_named(host.place, field) for host in left})
        left = [host for host in left if asked in (None, _named(host.place, field))]
        if not left:
            return NoOffer(
                field, f"config.yaml has no {field} {asked!r} of hosts", f"it has {', '.join(known)}"
            )
    if not any(has_gpus(host, name, 0) for host in left):
        names = sorted({host.accelerator for host in left if host.accelerator})
        return NoOffer(
            "accelerator", f"no host of yours has {name}", f"they have {', '.join(names) or 'none'}"
        )
    if not any(has_gpus(host, name, math.ceil(count)) for host in left):
        most = max(host.gpus for host in left if has_gpus(host, name, 0))
        return NoOffer(
            "accelerator_count", f"no host of yours has {wanted}", f"the most that one has is {most}"
        )
    if next(_fitting(pools, candidate, 1), None) is not None:
        return None
    offers = _fitting(pools, replace(candidate, max_hourly_cost=None), 1)
    least = min(offer.price_usd_hour for offer in offers)
    return NoOffer(
        "max_hourly_cost",
        f"the cheapest of your hosts costs {least:g} USD per hour",
        f"max_hourly_cost is {candidate.max_hourly_cost:g}",
    )


def _fitting(pools: HostPools, candidate: Candidate, num_nodes: int) -> Iterator[Offer]:
    if candidate.use_spot or _any(candidate.instance_type) not in (None, INSTANCE_TYPE):
        return
    wanted = math.ceil(candidate.accelerator_count) if candidate.accelerator else 0
    cheapest: dict[Zone, float] = {}
    places: Counter[Zone] = Counter()
    for host in pools.hosts:
        asked = (candidate.cloud, candidate.region, candidate.zone)
        has = (host.place.cloud, host.place.region, host.place.name)
        if not all(_any(one) in (None, other) for one, other in zip(asked, has, strict=True)):
            continue
        if has_gpus(host, candidate.accelerator, wanted):
            share = 1.0 if host.exclusive or not host.gpus else wanted / host.gpus
            price = round(host.price_usd_hour * share, 6)
            cheapest[host.place] = min(price, cheapest.get(host.place, price))
            places[host.place] += host.gpus // wanted if wanted and not host.exclusive else 1
    for zone, price in cheapest.items():
        if candidate.max_hourly_cost is None or price <= candidate.max_hourly_cost:
            total = round(price * num_nodes, 6)
            count = candidate.accelerator_count if candidate.accelerator else 0.0
            yield Offer(
                zone=zone,
                instance_type=INSTANCE_TYPE,
                accelerator=candidate.accelerator,
                accelerator_count=count,
                capacity_type=CapacityType.ON_DEMAND,
                price_usd_hour=total,
                on_demand_usd_hour=total,
                choice=candidate.choice,
                # A shared host has no fixed number of places for replicas without a GPU.
                places=places[zone] // num_nodes if wanted else None,
            )


def _named(zone: Zone, field: str) -> str:
    return zone.region if field == "region" else zone.name


def has_gpus(host: PoolHost, accelerator: str | None, count: float) -> bool:
    """Return whether the idle host has that number of accelerators."""
    if accelerator is None:
        return True
    return (host.accelerator or "").lower() == accelerator.lower() and host.gpus >= count


def _hosts(raw: Mapping[str, Any], complaints: list[str]) -> Iterator[PoolHost]:
    for pool, section in raw.items():
        if not isinstance(section, Mapping) or not isinstance(section.get("hosts"), Sequence):
            complaints.append(f"clouds.ssh.pools.{pool}: must have `hosts`, a list")
            continue
        complaints += [
            f"clouds.ssh.pools.{pool}.{key}: unknown key (known: {', '.join(_POOL_KEYS)})"
            for key in section
            if key not in _POOL_KEYS
        ]
        defaults = {key: section[key] for key in _POOL_KEYS[:-1] if key in section}
        for place, entry in enumerate(section["hosts"]):
            path = f"clouds.ssh.pools.{pool}.hosts[{place}]"
            found = _host(pool, path, {**defaults, **entry} if isinstance(entry, Mapping) else {}, complaints)
            if found is not None:
                yield found


def _host(pool: str, path: str, raw: Mapping[str, Any], complaints: list[str]) -> PoolHost | None:
    before = len(complaints)
    values = dict(raw)
    if not isinstance(values.get("address"), str):
        complaints.append(f"{path}.address: is missing")
    known = {one.name for one in fields(PoolHost)} - {"pool", "accelerator", "gpus", "access"}
    known |= {"accelerators", "host_key", *ACCESS_KEYS}
    complaints += [f"{path}.{key}: unknown key" for key in values if key not in known]
    access = access_of(
        {key: values.pop(key) for key in ("host_key", *ACCESS_KEYS) if key in values}, path, complaints
    )
    accelerators = values.pop("accelerators", {})
    if not isinstance(accelerators, Mapping) or len(accelerators) > 1:
        complaints.append(f"{path}.accelerators: must be one kind, like {{L4: 4}}")
    elif not all(isinstance(count, int) and count > 0 for count in accelerators.values()):
        complaints.append(f"{path}.accelerators: must count whole GPUs")
    if access is None or len(complaints) > before:
        return None
    accelerator, gpus = next(iter(accelerators.items()), (None, 0))
    named = {"name": values["address"], **values}
    return PoolHost(**named, pool=pool, access=access, accelerator=accelerator, gpus=gpus)


def _any(wish: str | None) -> str | None:
    return None if wish == "*" else wish
