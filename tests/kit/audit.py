"""The production reconciler, which also decides about every service that it would leave as it is, and compares.

In simulated lives this finds a trigger that is missing from `controller.kept`.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyserve_cli.controller.reconcile.ports import InstanceListing
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.controller.reconcile.tick_cache import Kept, Orders
from skyserve_cli.state.values import ServiceRow


class StaleError(BaseException):
    """What is kept of a service is not what a new decision comes to. Past the net for one service's trouble."""


class AuditedReconciler(Reconciler):
    """Raises StaleError. `stood` counts the comparisons."""

    stood = 0

    def _stand(self, kept: Kept, row: ServiceRow, listings: Sequence[InstanceListing], now: float) -> Orders:
        decided = self._service_turn.decide(row, (), listings, now)
        if decided.commit is not None:
            raise StaleError(f"{now:.1f} {row.name}: not written: {decided.commit}")
        orders = self._order_maker.of(decided, listings, now)
        if orders != kept.orders:
            raise StaleError(f"{now:.1f} {row.name}: {orders} instead of {kept.orders}")
        self.stood += 1
        return kept.orders
