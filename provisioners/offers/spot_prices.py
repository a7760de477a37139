"""Current prices of spot machines, requested from the cloud in the background and used while they are fresh."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from policies.model import Zone
from provisioners.port.errors import ProvisionError
from provisioners.port.vm import Machines

_log = logging.getLogger(__name__)

PRICES_EVERY_S = 300.0
PRICES_KEPT_S = 3600.0  # an older price is worth less than the catalog's


class SpotPrices:
    """What spot machines cost now, requested in the background; a `vm.SpotPrice`.

    `zones` are those whose prices matter, and `instance_types` the types. A region that does not respond keeps the prices
    it had until they are too old.
    """

    def __init__(
        self,
        machines: Machines,
        zones: Iterable[Zone],
        now: Callable[[], float],
        instance_types: Iterable[str] = (),
    ) -> None:
        self._machines = machines
        self._now = now
        self._known: Mapping[
            str, tuple[float, Mapping[tuple[str, str], float]]
        ] = {}  # by region, with its time
        self._requested_at = float("-inf")
        self._in_flight = False
        self._lock = threading.Lock()
        self.cover(zones, instance_types)

    def cover(self, zones: Iterable[Zone], instance_types: Iterable[str]) -> None:
        """Request the prices of other zones and types from now on."""
        self._region_of = {zone.name: zone.region for zone in zones}
        self._regions = sorted(set(self._region_of.values()))
        self._instance_types = frozenset(instance_types)

    @property
    def cloud(self) -> str:
        return self._machines.name

    def __call__(self, instance_type: str, zone: Zone) -> float | None:
        at, prices = self._known.get(zone.region, (float("-inf"), {}))
        return prices.get((instance_type, zone.name)) if self._now() - at <= PRICES_KEPT_S else None

    def refresh_soon(self) -> None:
        """Request them, unless that is under way or was done a moment ago; returns at once."""
        with self._lock:
            if self._in_flight or self._now() - self._requested_at < PRICES_EVERY_S:
                return
            self._requested_at, self._in_flight = self._now(), True
        threading.Thread(target=self._refresh, daemon=True, name=f"prices-{self._machines.name}").start()

    def _refresh(self) -> None:
        try:
            self.refresh()
        finally:
            with self._lock:
                self._in_flight = False

    def refresh(self) -> None:
        """Request them now. What failed is logged, a sentence per region."""
        failed: dict[str, ProvisionError] = {}
        try:
            found = self._machines.spot_prices(self._regions, self._instance_types, failed.__setitem__)
        except ProvisionError as error:
            _log.warning("%s: spot prices cannot be read: %s", self.cloud, error)
            return
        for region, failure in sorted(failed.items()):
            _log.warning("%s/%s: spot prices cannot be read: %s", self.cloud, region, failure)
        by_region: dict[str, dict[tuple[str, str], float]] = {
            region: {} for region in self._regions if region not in failed
        }
        for (instance_type, zone), price in found.items():
            region_prices = by_region.get(self._region_of.get(zone, ""))
            if region_prices is not None:
                region_prices[instance_type, zone] = price
        now = self._now()
        self._known = {**self._known, **{region: (now, prices) for region, prices in by_region.items()}}
