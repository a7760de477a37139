"""What replicas that come up have printed last: a part of the controller, which shows it beside what their probe meets.

An image that is pulled, weights that are downloaded, a setup that installs: programs print how far they are, and `MESSAGE` quotes it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from policies.model import Replica, ReplicaState
from provisioners.port.base import Instance, LogSource, Provisioner
from provisioners.port.errors import ProvisionError
from skyserve_cli.causes.log_text import cleaned, last_line
from skyserve_cli.controller.part import Kernel, Part
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord, ServiceRow

log = logging.getLogger(__name__)

POLL_S = 3.0
MOST_READ = 16  # logs in one round: each is a call of a machine
TAIL_BYTES = 4096
_COMES_UP = (ReplicaState.PROVISIONING, ReplicaState.STARTING)

#: Of a replica: its cloud, and its instance as it was listed last.
Find = Callable[[Replica], tuple[Provisioner, Instance | None]]


class Key(NamedTuple):
    service: str
    replica_id: int


class OutputPart(Part):
    """Reads ends of logs while this controller leads."""

    name = "output"

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._stopping = threading.Event()

    def lead(self) -> None:
        service = self._kernel.service
        reader = OutputReader(self._kernel.store.services, service.sighted, service.printed)
        starts = CacheStarts(self._kernel.store, service.sighted, self._has_cache, self._kernel.clock.now)
        threading.Thread(target=self._run, args=(reader, starts), name="output", daemon=True).start()

    async def stop(self) -> None:
        self._stopping.set()

    def _has_cache(self, service: str, version: int) -> bool:
        return self._kernel.specs.get(service, version).cache is not None

    def _run(self, reader: OutputReader, starts: CacheStarts) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                reader.step()
                starts.step(self._kernel.store.services())
            except SQLAlchemyError as error:
                log.warning(
                    "the output of replicas is not read: %s", type(error).__name__
                )  # the next round tries again
            except Exception:
                log.exception("the output of replicas")


class OutputReader:
    """Keeps `printed` at the last line of each replica that comes up. Not thread-safe; `printed` may be read by others meanwhile."""

    def __init__(
        self,
        services: Callable[[], Iterable[ServiceRow]],
        find: Find,
        printed: dict[tuple[str, int], str],
    ) -> None:
        self._services = services
        self._find = find
        self._printed = printed
        self._read_to: dict[Key, int] = {}  # in the order in which they were read

    def step(self) -> None:
        """Read the logs that were read longest ago, MOST_READ at most, and forget replicas that no longer come up."""
        coming_up = dict(_coming_up(self._services()))
        for gone in self._read_to.keys() - coming_up.keys():
            del self._read_to[gone]
            self._printed.pop(gone, None)
        order = {key: place for place, key in enumerate(self._read_to)}
        for key in sorted(coming_up, key=lambda key: order.get(key, -1))[:MOST_READ]:
            before = self._read_to.pop(key, 0)
            self._read_to[key] = self._read(key, coming_up[key], before)

    def _read(self, key: Key, replica: Replica, before: int) -> int:
        """Read one log if it has grown since its end was at `before`. Returns where its end is."""
        try:
            cloud, instance = self._find(replica)
            if instance is None or not isinstance(cloud, LogSource):
                return before
            first, end = cloud.log_window(instance, 0)
            if end == before:
                return before
            first = max(first, end - TAIL_BYTES)
            line = last_line(cleaned(cloud.read_log(instance, first, end - first, 0)))
        except (ProvisionError, OSError):
            return before  # a machine that does not respond yet has nothing to show
        if line:
            self._printed[key] = line
        return end


def _coming_up(services: Iterable[ServiceRow]) -> Iterable[tuple[Key, Replica]]:
    for row in services:
        for replica in row.replicas:
            if replica.state in _COMES_UP and replica.instance_id is not None:
                yield Key(row.name, replica.id), replica


# How long replicas of services with a `cache` took to be ready, and what they had found in it: one event for each of them.
#
# Both are measured: the time from the launch to the first passed probe, and the line that the start of the replica has printed
# (`provisioners.remote.bootstrap_steps.cache_script`). Where either is not known within a minute there is no event.

KIND = "cache"
HEAD_BYTES = 4096
PATIENCE_S = 60.0  # from when the replica was ready: its log may not be readable at once, and a controller may be restarted
_KEEPING = ("local", "ssh", "kubernetes")  # the clouds on which a start prints the line

_LINE = re.compile(
    r"^cache: /.* (?:is empty|has ([0-9.,]{1,9}[A-Z]?|files) of earlier replicas)$", re.MULTILINE
)
_EMPTY = re.compile(r"ready after (\d+) s; its cache was empty")

#: Of a replica: its cloud, and its instance as it was listed last.


@dataclass(slots=True)
class _Known:
    """Of a service: the replicas that have an event, and the last one that found nothing, with its seconds."""

    noted: set[int] = field(default_factory=set)
    empty: tuple[int, int] | None = None


class CacheStarts:
    """Not thread-safe. `has_cache` is of a service's version, `now` the controller's clock, by which replicas are timed, too."""

    def __init__(
        self, store: Store, find: Find, has_cache: Callable[[str, int], bool], now: Callable[[], float]
    ) -> None:
        self._store = store
        self._find = find
        self._has_cache = has_cache
        self._now = now
        self._known: dict[str, _Known] = {}
        self._reads = 0

    def step(self, rows: Iterable[ServiceRow]) -> None:
        """Append an event for each replica that is ready and has none; read MOST_READ logs at most."""
        self._reads = 0
        for row in rows:
            for replica in row.replicas:
                is_meant = replica.state is ReplicaState.READY and replica.zone.cloud in _KEEPING
                if is_meant and self._has_cache(row.name, replica.version):
                    self._look(row, replica)

    def _look(self, row: ServiceRow, replica: Replica) -> None:
        ready_at, launched_at, now = replica.ready_at, replica.launched_at, self._now()
        if ready_at is None or launched_at is None or now - ready_at > PATIENCE_S:
            return
        known = self._known.get(row.name) or self._recall(row.name)
        if replica.id in known.noted or self._reads >= MOST_READ:
            return
        self._reads += 1
        found = self._found(replica)
        if found is None:
            return
        took_s = round(ready_at - launched_at)
        sentence = sentence_of(took_s, found, known.empty)
        if not found:
            known.empty = replica.id, took_s
        known.noted = {one.id for one in row.replicas if one.id in known.noted} | {replica.id}
        self._store.append_event(EventRecord("cache", sentence, replica.id), now=now, service=row.name)

    def _recall(self, service: str) -> _Known:
        """Return what the event log says, for a controller that has just been started."""
        known = self._known[service] = _Known()
        for line in self._store.events(service, newest=True):
            if line.record.kind == KIND and line.record.replica_id is not None:
                known.noted.add(line.record.replica_id)
                if empty := _EMPTY.fullmatch(line.record.message):
                    known.empty = line.record.replica_id, int(empty[1])
        return known

    def _found(self, replica: Replica) -> list[str] | None:
        """Return the sizes that the start of the replica has printed; None: not known."""
        try:
            cloud, instance = self._find(replica)
            if instance is None or not isinstance(cloud, LogSource):
                return None
            head = cloud.read_log(instance, 0, HEAD_BYTES)
        except (ProvisionError, OSError):
            return None
        lines = list(_LINE.finditer(cleaned(head)))
        return [line[1] for line in lines if line[1]] if lines else None


def sentence_of(took_s: int, found: list[str], empty: tuple[int, int] | None) -> str:
    """Return what the event says. `empty` is the replica that last found nothing, and how many seconds it took."""
    if not found:
        return f"ready after {took_s} s; its cache was empty"
    before = f"; replica {empty[0]} took {empty[1]} s with an empty one" if empty is not None else ""
    return f"ready after {took_s} s with {' and '.join(found)} in its cache{before}"
