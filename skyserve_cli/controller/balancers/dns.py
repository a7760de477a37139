"""Publishes the names of services: a thread of its own, level-triggered like all hands.

The wanted records are passed every tick; what was published last is remembered, and is published once after every start. A failure
is tried again, ever later. Deleting is given up in the end: a service must not stay up because its name cannot be deleted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.backoff import delay_s
from provisioners.port.dns import Endpoint, Publisher
from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.ports import NameOrder

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
DELETE_TRIES = 6


@dataclass(slots=True)
class _NameState:
    """What became of one name."""

    published: NameOrder | None = None
    failures: int = 0  # in a row
    not_before: float = 0.0
    why: str = ""


class ThreadDns:
    """The daemon's.

    `publisher` is made when the first name is wanted; `region_of` gives the region by which an agent at (cloud, region) is
    found, `allows` whether this controller may publish now.
    """

    def __init__(
        self,
        publisher: Callable[[], Publisher],
        region_of: Callable[[str, str], str],
        owner: str,
        clock: Clock,
        wake: Callable[[], None],
        allows: Callable[[], bool] = lambda: True,
    ) -> None:
        self._allows = allows
        self._publisher = publisher
        self._region_of = region_of
        self._owner = owner
        self._clock = clock
        self._wake = wake
        self._orders: dict[tuple[str, str], NameOrder] = {}
        self._records: dict[tuple[str, str], _NameState] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def ensure(self, orders: Sequence[NameOrder]) -> None:
        with self._changed:
            self._orders = {order.key: order for order in orders}
            self._records = {key: one for key, one in self._records.items() if key in self._orders}
            if self._thread is None and orders:
                self._thread = threading.Thread(target=self._live, name="names", daemon=True)
                self._thread.start()
            self._changed.notify()

    def is_settled(self, order: NameOrder) -> bool:
        with self._changed:
            record = self._records.get(order.key)
        if record is None:
            return False
        gave_up = not order.agents and record.failures >= DELETE_TRIES
        return record.published == order or gave_up

    def trouble(self, service: str) -> str:
        """Return a sentence about the name that cannot be published."""
        with self._changed:
            return next(
                (one.why for (name, _), one in self._records.items() if name == service and one.why), ""
            )

    def _live(self) -> None:
        while True:
            with self._changed:
                due = self._due()
                if due is None:
                    self._changed.wait(FIRST_PAUSE_S)
                    continue
            self._publish(due)

    def _due(self) -> NameOrder | None:
        """With the lock held."""
        now = self._clock.now()
        for key, order in self._orders.items():
            record = self._records.setdefault(key, _NameState())
            if record.published != order and record.not_before <= now and self._allows():
                return order
        return None

    def _publish(self, order: NameOrder) -> None:
        endpoints: dict[str, list[Endpoint]] = {}
        for cloud, region, endpoint in order.agents:
            endpoints.setdefault(self._region_of(cloud, region), []).append(endpoint)
        mark, why = f"skyserve-{self._owner}-{order.service}-", ""
        try:
            self._publisher().publish(order.zone, order.name, self._owner, mark, endpoints)
        except ProvisionError as error:
            why = error.message
        except Exception as error:  # a bug in the plug-in must not stop other names
            log.exception("publishing %s", order.name)
            why = f"{type(error).__name__}: {error}"
        with self._changed:
            record = self._records.setdefault(order.key, _NameState())
            if why:
                record.failures += 1
                pause_s = delay_s(record.failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
                record.not_before = self._clock.now() + pause_s
                if why != record.why:
                    log.warning("name %s of %s: %s", order.name, order.service, why)
                record.why = why
            else:
                record.published, record.failures, record.why = order, 0, ""
        self._wake()
