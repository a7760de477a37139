"""Cloud calls on threads, one in flight per replica, and a fixed number per cloud.

A slow or stuck call keeps no thread from the others.

A call stays "under way" until the tick has taken its result, not until the thread has exited: otherwise a tick
between the two would start it again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from policies.model import Event, Progressed
from provisioners.port.base import Instance, LaunchOrder, Provisioner
from provisioners.port.errors import ProvisionError
from skyserve_cli.controller.clouds.execute import Retry, backoff_s, perform, settle
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.mappers import token_of
from skyserve_cli.controller.reconcile.ports import CloudOperation, OperationKind

log = logging.getLogger(__name__)

NOT_ALLOWED = Retry(0.5, "this controller's lease is not confirmed", was_made=False)

Key = tuple[str, int]


@dataclass(slots=True)
class _OperationState:
    """State of a replica's current call."""

    kind: OperationKind
    tries: int = 0
    under_way: bool = False
    not_before: float = 0.0


class OperationsInFlight:
    """Which calls may start, and what their outcomes mean. Not thread-safe: the tick's own."""

    def __init__(self) -> None:
        self._records: dict[Key, _OperationState] = {}

    def startable(self, calls: Sequence[CloudOperation], now: float) -> list[CloudOperation]:
        """Return those of `calls` to start now; they count as under way from here on."""
        outstanding = {call.key for call in calls}
        for key in [k for k, r in self._records.items() if k not in outstanding and not r.under_way]:
            del self._records[key]
        started = []
        for call in calls:
            record = self._records.get(call.key)
            if record is None or (record.kind is not call.kind and not record.under_way):
                record = self._records[call.key] = _OperationState(call.kind)
            if record.under_way or record.not_before > now:
                continue
            record.under_way = True
            record.tries += 1
            started.append(call)
        return started

    def settled(self, call: CloudOperation, outcome: Event | Retry | None, now: float) -> Event | None:
        """Return the event an outcome amounts to; None if there is none, or the call is to be made again."""
        record = self._records[call.key]
        record.under_way = False
        if isinstance(outcome, Retry) and not outcome.was_made:
            record.tries -= 1
            record.not_before = now + outcome.after_s
            return None
        outcome = settle(call, outcome, record.tries)
        if isinstance(outcome, Retry):
            record.not_before = now + backoff_s(outcome, record.tries)
            return None
        del self._records[call.key]
        return outcome


class _NotAllowedError(Exception):
    """The lease has run out since the call began."""


class ThreadOperationRunner:
    """The daemon's runner.

    `threads` is how many calls to one cloud may be under way, `farewell` sees every instance that is about to be terminated
    by a call, and `allows` is called right before anything is launched or terminated.
    """

    def __init__(
        self,
        provisioners: Callable[[str], Provisioner],
        order: Callable[[CloudOperation], LaunchOrder],
        owner: str,
        clock: Clock,
        wake: Callable[[], None],
        *,
        farewell: Callable[[CloudOperation, Provisioner, Instance], object] = lambda call, cloud, instance: (
            None
        ),
        allows: Callable[[OperationKind], bool] = lambda kind: True,
        threads: int = 32,
    ) -> None:
        self._provisioners = provisioners
        self._order = order
        self._owner = owner
        self._clock = clock
        self._wake = wake
        self._farewell = farewell
        self._allows = allows
        self._book = OperationsInFlight()
        self._done: queue.SimpleQueue[tuple[CloudOperation, Event | Retry | None]] = queue.SimpleQueue()
        self._abandoned: set[str] = set()
        self._begun: dict[object, tuple[CloudOperation, float]] = {}  # the calls that threads are making
        self._threads = threads
        self._crews: dict[str, _Crew] = {}
        self._lock = threading.Lock()

    def ensure(self, calls: Sequence[CloudOperation]) -> None:
        for call in self._book.startable(calls, self._clock.now()):
            self._crew(call.replica.zone.cloud).submit(partial(self._make, call))

    def drain(self) -> list[tuple[str, Event]]:
        events = []
        while not self._done.empty():
            call, outcome = self._done.get()
            if isinstance(outcome, Retry) and outcome.was_made:
                log.warning("%s of %s replica %d: %s", call.kind.value, *call.key, outcome.message)
            event = self._book.settled(call, outcome, self._clock.now())
            is_again = event is None and call.kind is OperationKind.LAUNCH
            if is_again and isinstance(outcome, Retry) and outcome.was_made:
                event = Progressed(call.replica.id, f"trying again: {outcome.message}")
            if event is not None:
                events.append((call.service, event))
        return events

    def abandon(self, orphan: Instance) -> None:
        with self._lock:
            if orphan.id in self._abandoned:
                return
            self._abandoned.add(orphan.id)
        self._crew(orphan.zone.cloud).submit(lambda: self._end_orphan(orphan))

    def under_way(self) -> list[tuple[CloudOperation, float]]:
        """Return the calls that are being made now, and for how many seconds, the oldest first. Thread-safe."""
        now = self._clock.now()
        found = [(call, now - began) for call, began in list(self._begun.values())]
        return sorted(found, key=lambda one: -one[1])

    def _make(self, call: CloudOperation) -> None:
        key = object()
        self._begun[key] = call, self._clock.now()
        outcome = self._outcome(call) if self._allows(call.kind) else NOT_ALLOWED
        del self._begun[key]
        self._done.put((call, outcome))
        self._wake()

    def _outcome(self, call: CloudOperation) -> Event | Retry | None:
        cloud = call.replica.zone.cloud
        token = token_of(self._owner, call.service, call.incarnation, call.replica.id, call.replica.offer)
        try:
            provisioner = self._provisioners(cloud)
            farewell = partial(self._take_leave, call, provisioner)
            return perform(
                call, provisioner, lambda: self._order(call), token, self._owner, farewell=farewell
            )
        except _NotAllowedError:
            return NOT_ALLOWED
        except Exception as error:  # a bug in a plug-in must not lose the replica
            log.exception("%s of %s replica %d", call.kind.value, *call.key)
            return Retry(5.0, f"{type(error).__name__}: {error}")

    def _take_leave(self, call: CloudOperation, provisioner: Provisioner, instance: Instance) -> None:
        self._farewell(call, provisioner, instance)  # may have taken long
        if not self._allows(OperationKind.TERMINATE):
            raise _NotAllowedError

    def _end_orphan(self, orphan: Instance) -> None:
        try:
            if not self._allows(OperationKind.TERMINATE):
                return  # it will be seen again
            log.warning("terminate orphan %s in %s", orphan.id, orphan.zone)
            self._provisioners(orphan.zone.cloud).terminate(orphan)
        except ProvisionError as error:
            log.warning("orphan %s: %s", orphan.id, error)
        except Exception:  # it will be seen again; the thread is needed for the next call
            log.exception("orphan %s", orphan.id)
        finally:
            with self._lock:
                self._abandoned.discard(orphan.id)

    def _crew(self, cloud: str) -> _Crew:
        with self._lock:
            return self._crews.setdefault(cloud, _Crew(cloud, self._threads))


class _Crew:
    """Daemon threads of one cloud, made as needed and kept: a process that is stopped does not wait for a cloud."""

    def __init__(self, cloud: str, most_threads: int) -> None:
        self._cloud = cloud
        self._most_threads = most_threads
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unfinished = 0
        self._threads = 0
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], None]) -> None:
        self._work.put(job)
        with self._lock:
            self._unfinished += 1
            if self._threads < min(self._unfinished, self._most_threads):
                self._threads += 1
                name = f"{self._cloud}-{self._threads}"
                threading.Thread(target=self._serve, daemon=True, name=name).start()

    def _serve(self) -> None:
        while True:
            job = self._work.get()
            job()
            with self._lock:
                self._unfinished -= 1
