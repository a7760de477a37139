"""The ends of the logs of replicas that failed, kept in the home: their machines are given back, and their logs with them.

One file per node, NAME.REPLICA.NODE.OFFSET.log, whose offset is that of its first byte in the whole log: a client that reads a
log while the machine is given back goes on in the file without a gap. Beside it are the times of its lines (.times).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from policies.model import EndReason, Replica
from provisioners.files import write_bytes
from provisioners.port.base import Instance, LogSource, Provisioner
from provisioners.port.errors import ProvisionError

log = logging.getLogger(__name__)

KEPT_BYTES = 64 * 1024
KEPT_FILES = 200
MOST_MARKS = 10_000

#: Ends whose cause the replica itself may have printed.
REASONS_WITH_LOG = frozenset(
    {
        EndReason.SETUP_FAILED,
        EndReason.RUN_EXITED,
        EndReason.START_TIMEOUT,
        EndReason.PROBE_FAILED,
        EndReason.ONLY_ERRORS,
    }
)


class LogArchive:
    """Thread-safe, as its files are written whole and once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(
        self, service: str, replica: Replica, instance: Instance, cloud: Provisioner, num_nodes: int = 1
    ) -> None:
        """Fetch what a replica that failed has printed last, unless that was done.

        Takes as long as its machine does to respond; one that does not respond has said nothing. Raises nothing that would
        keep the machine.
        """
        if replica.end_reason not in REASONS_WITH_LOG or not isinstance(cloud, LogSource):
            return
        try:
            for node in range(num_nodes):
                if self.find(service, replica.id, node) is None:
                    offset, tail = _tail(cloud, instance, node)
                    if tail:
                        marks = cloud.log_times(instance, float("-inf"), offset, MOST_MARKS, node)
                        self._write(f"{service}.{replica.id}.{node}.{offset}.times", marks)
                        self._write(f"{service}.{replica.id}.{node}.{offset}.log", tail)
        except (ProvisionError, OSError) as error:
            log.warning("the log of %s replica %d is not kept: %s", service, replica.id, error)

    def find(self, service: str, replica_id: int, node: int = 0) -> tuple[Path, int] | None:
        """Return where it is kept, and the offset of its first byte."""
        found = next(self._folder.glob(f"{service}.{replica_id}.{node}.*.log"), None)
        return None if found is None else (found, int(found.name.split(".")[-2]))

    def times(self, service: str, replica_id: int, node: int = 0) -> Callable[[float, int], bytes]:
        """Reads the marks of the log that is kept; see `host_agent.log_times`."""
        path = next(self._folder.glob(f"{service}.{replica_id}.{node}.*.times"), None)
        from provisioners.remote.host_agent.log_times import marks_in  # rarely needed

        return lambda after, most: b"" if path is None else marks_in(path, after, 0, most)

    def _write(self, name: str, tail: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(self._folder / name, tail)
        kept = sorted(self._folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-KEPT_FILES]:
            path.unlink(missing_ok=True)
            path.with_suffix(".times").unlink(missing_ok=True)


def _tail(source: LogSource, instance: Instance, node: int) -> tuple[int, bytes]:
    first, end = source.log_window(instance, node)
    first = max(first, end - KEPT_BYTES)
    return first, source.read_log(instance, first, end - first, node) if end > first else b""
