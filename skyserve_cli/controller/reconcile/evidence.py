"""What the daemon knows about its own view of the services: the input of `policies.brake`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from policies.brake import Evidence
from policies.health import FailedProbe, Work
from policies.history import Load

ONLINE_S = 90.0  # the slowest of what should respond is a listing of a cloud, every 10 s and with retries


class Watcher(Protocol):
    """`Attention`."""

    @property
    def since(self) -> float: ...

    def now(self) -> float: ...

    def at(self, instant: float) -> float:
        """Return the instant of the controller's clock for one of the event loop."""
        ...


class ProbeLog(Protocol):
    """`HttpProber`."""

    def failed(self, service: str) -> Mapping[int, FailedProbe]: ...


class Remote(Protocol):
    """Something that speaks with other machines."""

    def reached_at(self) -> float | None:
        """Return when another machine last responded to it; None if it has nothing to do with another machine."""
        ...


class WorkLog(Protocol):
    """`ServedReplicas`, in instants of the event loop."""

    def work(self, service: str) -> Mapping[int, Work]: ...


class Loads(Protocol):
    """Load balancers beside the controller."""

    def load(self, service: str) -> Load: ...


class RegionalLoads(Protocol):
    def loads(self, service: str) -> Iterable[Load]: ...


class DaemonEvidence:
    """Puts it together, once per service and tick. Safe to be called from the tick's thread."""

    def __init__(
        self,
        attention: Watcher,
        prober: ProbeLog,
        fleet: Loads,
        regional: RegionalLoads,
        remotes: Iterable[Remote],
        served: WorkLog,
    ) -> None:
        self._attention = attention
        self._prober = prober
        self._fleet = fleet
        self._regional = regional
        self._remotes = tuple(remotes)
        self._served = served
        self._asked_since = attention.now()

    def of(self, service: str) -> Evidence:
        responsive = {replica_id for load in self._loads(service) for replica_id in load.responsive}
        failed, work = self._prober.failed(service), self._served.work(service)
        return Evidence(self._attention.since, failed, responsive, self._is_online(), self._on_clock(work))

    def _on_clock(self, work: Mapping[int, Work]) -> dict[int, Work]:
        moved_s = self._attention.at(0.0)
        return {number: one.moved(moved_s) for number, one in work.items()}

    def _loads(self, service: str) -> tuple[Load, ...]:
        return (self._fleet.load(service), *self._regional.loads(service))

    def _is_online(self) -> bool | None:
        reached = [at for remote in self._remotes if (at := remote.reached_at()) is not None]
        if not reached:
            return None
        # A process that has just started has had no time to be responded to.
        return self._attention.now() - max(*reached, self._asked_since) <= ONLINE_S
