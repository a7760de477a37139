"""All services in brief, for a page that many read: without replicas, and with what load balancers counted lately."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.state.values import NoSuchServiceError

TRAFFIC_S = 900.0
#: Numbers over time are stored every ten seconds.
TRAFFIC_EVERY_S = 10.0
_LEFT_OUT = frozenset({"replicas", "load_balancers"})

View = Mapping[str, Any]


class FleetView:
    """`services` returns the views of all services, `traffic` what was counted of one since an instant of `clock`, or None.

    `traffic` raises NoSuchServiceError. For one caller at a time.
    """

    def __init__(
        self,
        services: Callable[[], Sequence[View]],
        traffic: Callable[[str, float], View | None],
        clock: Clock,
    ) -> None:
        self._services = services
        self._traffic = traffic
        self._clock = clock
        self._read_at = float("-inf")
        self._known: dict[str, View | None] = {}

    def content(self) -> dict[str, Any]:
        """Return {"services", "traffic_s"}; `traffic` of a service is over the last `traffic_s` seconds, null without any."""
        views = self._services()
        now = self._clock.now()
        if not 0.0 <= now - self._read_at < TRAFFIC_EVERY_S:
            self._known, self._read_at = {}, now
        for view in views:
            if view["name"] not in self._known:
                self._known[view["name"]] = self._of(view["name"], now)
        return {
            "traffic_s": TRAFFIC_S,
            "services": [
                {key: value for key, value in view.items() if key not in _LEFT_OUT}
                | {"traffic": self._known[view["name"]]}
                for view in views
            ],
        }

    def _of(self, name: str, now: float) -> View | None:
        try:
            return self._traffic(name, now - TRAFFIC_S)
        except NoSuchServiceError:  # it has gone since
            return None
