"""Machines that were seen alive, for clouds that forget a machine's tags, or the machine itself, when it stops.

Google Cloud deletes a preempted machine and keeps only an operation with its name; Lambda keeps nothing. So what was made or listed here
is remembered until its end has been reported for a while. A controller that has just started remembers nothing, but learns about each
machine that it orders again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from policies.model import Zone
from provisioners.port.vm import Machine

RETENTION_S = 3600.0
RETAINED = 1000

Key = tuple[str, str]  # zone and instance name


def key_of(zone: Zone, name: str) -> Key:
    return zone.name, name


class MachineMemory:
    """Thread-safe. A machine is either alive here, or terminated at some time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: dict[Key, Machine] = {}
        self._ended: dict[Key, tuple[Machine, float]] = {}
        self._asked: set[Key] = set()

    def note(self, machine: Machine) -> None:
        """Record that it exists."""
        key = key_of(machine.zone, machine.id)
        with self._lock:
            self._ended.pop(key, None)
            self._alive[key] = machine

    def mark_gone(self, machine: Machine, now: float) -> None:
        """Record how it terminated. The first record stays."""
        key = key_of(machine.zone, machine.id)
        with self._lock:
            self._alive.pop(key, None)
            self._asked.discard(key)
            self._ended.setdefault(key, (machine, now))

    def drop(self, zone: Zone, name: str) -> None:
        """Forget a machine that never existed, or is not ours."""
        with self._lock:
            self._alive.pop(key_of(zone, name), None)

    def record_termination(self, zone: Zone, name: str) -> None:
        """Record that we are about to terminate it."""
        with self._lock:
            self._asked.add(key_of(zone, name))

    def is_termination_ours(self, machine: Machine) -> bool:
        """Return whether its end was our wish."""
        with self._lock:
            return key_of(machine.zone, machine.id) in self._asked

    def alive(self, owner: str) -> Mapping[Key, Machine]:
        """Return what should be there."""
        with self._lock:
            return {key: machine for key, machine in self._alive.items() if machine.owner == owner}

    def ended(self, owner: str, now: float) -> Mapping[Key, Machine]:
        """Return the machines that terminated lately."""
        with self._lock:
            kept = [entry for entry in self._ended.items() if entry[1][1] > now - RETENTION_S]
            self._ended = dict(kept[-RETAINED:])
            return {key: machine for key, (machine, _) in self._ended.items() if machine.owner == owner}
