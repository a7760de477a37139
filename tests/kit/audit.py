"""The production reconciler, which also decides about every service that it would leave as it is, and compares.

In simulations this finds a trigger that is missing from `controller.reconcile.tick_cache`.
"""

from __future__ import annotations

from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.controller.reconcile.tick_cache import Orders
from skyserve_cli.controller.reconcile.turn_cache import Observed
from skyserve_cli.state.values import ServiceRow


class StaleError(BaseException):
    """The cached decision of a service differs from a new one. Past the net for one service's trouble."""


class AuditedReconciler(Reconciler):
    """Raises StaleError. `stood` counts the comparisons."""

    stood = 0

    def _standing(self, row: ServiceRow, tick: Observed) -> Orders | None:
        standing = super()._standing(row, tick)
        if standing is None:
            return None
        decided = self._service_turn.decide(row, (), tick.listings, tick.now)
        if decided.commit is not None:
            raise StaleError(f"{tick.now:.1f} {row.name}: not written: {decided.commit}")
        orders = self._kept.orders_of(decided, tick)
        if orders != standing:
            raise StaleError(f"{tick.now:.1f} {row.name}: {orders} instead of {standing}")
        self.stood += 1
        return standing
