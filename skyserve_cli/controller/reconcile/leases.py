"""The leases of rented machines (`provisioners.port.lease`), as `serve status` shows them and as the event log warns of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from provisioners.port.base import Instance, InstanceState
from provisioners.port.lease import Lease
from skyserve_cli.output import span

KIND = "LeaseShort"  # of the events

Warn = Callable[[str, int, str], None]
_NOTHING: Mapping[str, Instance] = MappingProxyType({})


def lease_view(lease: Lease | None) -> dict[str, Any] | None:
    """As JSON, with instants in UNIX seconds; None for a machine without a lease.

    While a controller visits the machine there is no end: the lease begins again with each visit.
    """
    if lease is None:
        return None
    ends = lease.visited_at is not None
    return {
        "lease_s": lease.lease_s,
        "visited_at": lease.visited_at,
        "ends_at": lease.left_s(0.0) if ends else None,
        "ends_at_with_traffic": lease.most_left_s(0.0) if ends else None,
        "why": lease.why,
    }


def warning_of(lease: Lease, now: float) -> str:
    """Return the sentence of the event."""
    return (
        f"no visit for {span(now - (lease.visited_at or now))} ({lease.why}): the machine ends itself in "
        f"{span(lease.left_s(now))} without traffic, in {span(lease.most_left_s(now))} with it; "
        "make it reachable by ssh from this host, or end the service"
    )


class LeaseWatch:
    """Warns once of each machine whose lease is half over, until it has been visited again.

    `warn` takes the service, the replica and the sentence. For the thread of one cloud's listings. `by_id` are the instances of the
    last one that have a lease, or of which a message is shown while they run.
    """

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._warned: frozenset[tuple[str, float | None]] = frozenset()
        self.by_id: Mapping[str, Instance] = _NOTHING

    def observe(self, instances: Iterable[Instance], now: float) -> bool:
        """Return whether any of them differs from the last look."""
        before = self.by_id
        self.by_id = {
            one.id: one for one in instances if not one.state.is_gone and (one.lease or _is_said(one))
        }
        leased = [(one, one.lease) for one in self.by_id.values() if one.lease is not None]
        short = [(one, lease) for one, lease in leased if lease.is_short(now)]
        for one, lease in short:
            if (one.id, lease.visited_at) not in self._warned:
                self._warn(one.service, one.replica_id, warning_of(lease, now))
        self._warned = frozenset((one.id, lease.visited_at) for one, lease in short)
        return before != self.by_id


def _is_said(instance: Instance) -> bool:
    return instance.state is InstanceState.RUNNING and bool(instance.message)
