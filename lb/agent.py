"""One agent: the table and everything that acts on it, without the listening sockets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from lb import tablefile
from lb.health import HealthChecker
from lb.metrics import Metrics
from lb.proxy import Proxy
from lb.targets import Changes, Standing, TargetTable
from lb.upstream import Upstream
from lb.wire import Stats, Table
from policies.routing.registry import make_policy

_log = logging.getLogger("lb.agent")


class WrongServiceError(ValueError):
    """A table for another service was pushed to this agent."""


class Agent:
    """Composes the parts and owns the one way in which a table is replaced. Needs a running event loop."""

    def __init__(
        self,
        table: Table,
        *,
        region: str,
        table_file: Path | None,
        clock: Callable[[], float],
        id_prefix: str,
    ) -> None:
        self._region = region
        self._table_file = table_file
        self._clock = clock
        self._started_at = clock()
        self.closing = False
        self.targets = TargetTable(table, self._started_at)
        self.metrics = Metrics(table.service, region)
        self.metrics.use_policy(table.policy)
        self.upstream = Upstream()
        self.proxy = Proxy(self.targets, self.upstream, self.metrics, clock, id_prefix)
        self.checker = HealthChecker(
            self.targets,
            self.upstream,
            self.metrics,
            clock,
            changed=self.proxy.changed,
            anybody_held=lambda: self.proxy.held > 0,
        )

    @property
    def table(self) -> Table:
        return self.targets.table

    def apply(self, table: Table) -> Changes:
        """Store the table, then act on it. Raises WrongServiceError, UnknownPolicyError or OSError; then
        nothing has changed."""
        if table.service != self.table.service:
            raise WrongServiceError(f"this agent serves {self.table.service!r}, not {table.service!r}")
        make_policy(table.policy)
        if self._table_file is not None and table != self.table:
            tablefile.save(self._table_file, table)
        changes = self.targets.apply(table, self._clock())
        self.metrics.use_policy(table.policy)
        self.proxy.changed()
        if changes.added or changes.removed:
            _log.info("apply revision=%s added=%s removed=%s", table.revision, changes.added, changes.removed)
        return changes

    def ready(self) -> bool:
        """Whether a request that came now would find a target in good standing."""
        now = self._clock()
        return not self.closing and any(
            standing is Standing.GOOD for _, standing, _ in self.targets.rows(now)
        )

    def stats(self, window_s: float) -> Stats:
        now = self._clock()
        return Stats(
            service=self.table.service,
            region=self._region,
            revision=self.table.revision,
            uptime_s=now - self._started_at,
            window_s=window_s,
            requests=self.proxy.arrivals.count(now, window_s),
            in_flight=self.targets.in_flight,
            queued=self.proxy.held,
            rejected=self.proxy.rejections.count(now, window_s),
            ongoing=self.proxy.ongoing.mean(now, window_s),
            targets=self.targets.stats(now, window_s),
        )

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self.metrics.expose(self.targets, self.proxy.held, self._clock())
