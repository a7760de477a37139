"""Events that the controller's threads record beside those of the reconciler.

An event that cannot be stored is in the log, too, so a database that is away stops no thread.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from sqlalchemy.exc import SQLAlchemyError

from skyserve_cli.controller.reconcile import leases
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord

log = logging.getLogger("skyserve.controller")


class EventReports:
    """Appends events at the present instant. Thread-safe."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def closed_region(self, sentence: str) -> None:
        """Raise LeaseLostError, SQLAlchemyError: the poller reports it again."""
        self._store.append_event(EventRecord("RegionClosed", sentence), now=self._clock.now())

    def clock(self, sentence: str) -> None:
        """Record the offset of a cloud's clock."""
        self._append(EventRecord("clock", sentence))

    def lease(self, service: str, replica_id: int, sentence: str) -> None:
        """Record trouble with the lease of a replica's instance."""
        log.warning("%s/%d: %s", service, replica_id, sentence)
        self._append(EventRecord(leases.KIND, sentence, replica_id), service)

    def network_rules(self, cloud: str, sentence: str) -> None:
        """Record that rules cannot be set, and why; that they are set again if `sentence` is empty."""
        said = (
            f"rules for the network cannot be set: {sentence}"
            if sentence
            else "rules for the network are set"
        )
        self._append(EventRecord("network", f"{cloud}: {said}"))

    def _append(self, record: EventRecord, service: str = "") -> None:
        with suppress(SQLAlchemyError, LeaseLostError):
            self._store.append_event(record, now=self._clock.now(), service=service)
