"""The hand on the local cloud: what `serve local …` does.

Every function takes the home and returns at once; hosts notice within a quarter of a second. Wrong names are
InvalidRequestErrors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from policies.model import CapacityType
from provisioners.clock import unix_now
from provisioners.local.cloud import capacity_of, live_count
from provisioners.local.config import did_you_mean, load_cloud, read_market
from provisioners.local.spot_market import LocalMarket, load_market, save_market
from provisioners.local.store import CLOUD, InstanceFolder, LaunchRecord, LocalStore
from provisioners.port.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class ZoneStatus:
    """A zone as it is now. Capacities count taken places; None is any number."""

    region: str
    zone: str
    spot_usd_hour: float
    on_demand_usd_hour: float
    spot_capacity: int | None
    on_demand_capacity: int | None
    spot_live: int
    on_demand_live: int


def zones(home: Path, now: Callable[[], float] = unix_now) -> list[ZoneStatus]:
    """Return all zones, in the order of cloud.yaml."""
    store = LocalStore(home)
    cloud = load_cloud(store)
    at = now()
    return [
        ZoneStatus(
            region=region,
            zone=name,
            spot_usd_hour=zone.spot_usd_hour,
            on_demand_usd_hour=zone.on_demand_usd_hour,
            spot_capacity=capacity_of(store, cloud, name, CapacityType.SPOT, at),
            on_demand_capacity=capacity_of(store, cloud, name, CapacityType.ON_DEMAND, at),
            spot_live=live_count(store, name, CapacityType.SPOT),
            on_demand_live=live_count(store, name, CapacityType.ON_DEMAND),
        )
        for region, name, zone in cloud.zones()
    ]


def set_capacity(
    home: Path, zone: str, capacity: int | None, capacity_type: CapacityType = CapacityType.SPOT
) -> None:
    """Override the room in a zone, regardless of the market; None takes the override back.

    Less room than there are spot instances preempts the newest of them. On-demand instances are never
    preempted: less room only refuses launches.
    """
    store = LocalStore(home)
    known = [name for _, name, _ in load_cloud(store).zones()]
    if zone not in known:
        raise InvalidRequestError(f"there is no zone {zone!r}{did_you_mean(zone, known)}", cloud=CLOUD)
    if capacity is not None and capacity < 0:
        raise InvalidRequestError(f"capacity is {capacity}, and cannot be less than 0", cloud=CLOUD)
    with store.lock():
        market = load_market(store.market_path)
        overrides = {key: count for key, count in market.overrides.items() if key != (zone, capacity_type)}
        if capacity is not None:
            overrides[zone, capacity_type] = capacity
        save_market(store.market_path, replace(market, overrides=overrides))


def play_market(
    home: Path, source: Path, speed: float | None = None, now: Callable[[], float] = unix_now
) -> LocalMarket:
    """Let the market follow a timeline (YAML) or a spot trace (folder), from now on; overrides are dropped."""
    store = LocalStore(home)
    market = read_market(source.resolve(), load_cloud(store), now(), speed)
    with store.lock():
        save_market(store.market_path, market)
    return market


def calm(home: Path) -> None:
    """No schedule and no overrides: every zone has the room cloud.yaml gives it."""
    store = LocalStore(home)
    with store.lock():
        store.market_path.unlink(missing_ok=True)


def preempt(
    home: Path,
    target: str,
    notice_s: float = 0.0,
    now: Callable[[], float] = unix_now,
    *,
    node: int | None = None,
) -> list[str]:
    """Preempt one spot instance (by token or id) or all spot instances of a zone, or only their node of rank `node`.

    Returns their tokens.

    The zone's room stays as it is: what was taken can be launched again at once.
    """
    store = LocalStore(home)
    live = [(folder, record) for folder in store.nodes() if (record := folder.record()) and folder.is_live()]
    chosen = [entry for entry in _chosen(store, live, target) if node in (None, entry[1].rank)]
    at = now() + notice_s
    for folder, _ in chosen:
        folder.request_preemption(at)
    return list(dict.fromkeys(record.token for _, record in chosen))


def _chosen(
    store: LocalStore, live: list[tuple[InstanceFolder, LaunchRecord]], target: str
) -> list[tuple[InstanceFolder, LaunchRecord]]:
    names = [name for _, name, _ in load_cloud(store).zones()]
    if target in names:
        return [
            entry for entry in live if entry[1].zone == target and entry[1].capacity_type is CapacityType.SPOT
        ]
    named = [entry for entry in live if target in (entry[1].token, store.node_id(entry[0].head))]
    if any(record.capacity_type is not CapacityType.SPOT for _, record in named):
        raise InvalidRequestError(f"{target} is on-demand, and only spot is preempted", cloud=CLOUD)
    if named:
        return named
    known = [*names, *dict.fromkeys(record.token for _, record in live)]
    raise InvalidRequestError(
        f"{target!r} is neither a zone nor a live instance{did_you_mean(target, known)}", cloud=CLOUD
    )
