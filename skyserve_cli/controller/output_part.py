"""What replicas that come up have printed last: a part of the controller, which shows it beside what their probe meets.

An image that is pulled, weights that are downloaded, a setup that installs: programs print how far they are, and `MESSAGE` quotes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from policies.model import Replica, ReplicaState
from provisioners.port.base import Instance, LogSource, Provisioner
from provisioners.port.errors import ProvisionError
from skyserve_cli.causes.log_text import cleaned, last_line
from skyserve_cli.controller.cache_starts import CacheStarts
from skyserve_cli.controller.part import Kernel, Part
from skyserve_cli.state.values import ServiceRow

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
