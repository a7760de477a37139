"""`event_callback` of a service file: a command that the daemon runs for each event of the service.

The event log is the queue: this thread reads new events in it, and the tick knows nothing of it. Of one service commands
run one after another, in the order of events; of all services at most AT_ONCE at the same time. Each has `shell_commands.TIMEOUT_S`. Of a
service that produces events faster, the oldest beyond MOST_WAITING are skipped.

The number of the last event before the first that is not finished is kept in a file. A controller that was killed reads on
from there, so each command runs at least once, and those that were running when it died run twice.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from provisioners.files import write_text
from skyserve_cli.controller.clouds.caches import SpecCache
from skyserve_cli.controller.part import Kernel, Part
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.shell_commands import CommandRunner
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord, NoSuchServiceError, StoredEvent

log = logging.getLogger(__name__)

POLL_S = 1.0
AT_ONCE = 4
MOST_WAITING = 100
READ_AT_ONCE = 500

#: Events that no command runs for: steps of a start that change no state, and what this module reports.
FAILED = "CallbackFailed"
_SILENT = frozenset({"Progressed", FAILED})


class Callback(NamedTuple):
    """One run: of which event, which command, and with which variables."""

    event: StoredEvent
    command: str
    variables: Mapping[str, str]


class Callbacks(threading.Thread):
    """`run` executes a callback and returns why it failed, or ""; `submit` calls a function on another thread."""

    def __init__(
        self,
        store: Store,
        specs: SpecCache,
        clock: Clock,
        position: Path,
        *,
        run: Callable[[Callback], str] | None = None,
        submit: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        super().__init__(name="callbacks", daemon=True)
        self._store = store
        self._specs = specs
        self._clock = clock
        self._position = position
        self._commands = CommandRunner()
        self._run = self._run_command if run is None else run
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="callback")
        self._submit = self._pool.submit if submit is None else submit
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Callback]] = {}
        self._running: dict[str, int] = {}  # the event whose command runs, by service
        self._failing: set[str] = set()  # services whose last command failed
        self._read_to: int | None = None
        self._written: int | None = None

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.step()
            except (SQLAlchemyError, LeaseLostError, OSError) as error:
                log.warning("callbacks wait: %s", type(error).__name__)  # the next step tries again
            except Exception:
                log.exception("callbacks")
            self._stopping.wait(POLL_S)

    def stop(self) -> None:
        """End the commands that run; they run again when a controller starts."""
        self._stopping.set()
        self._commands.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def step(self) -> None:
        """Read new events, and start commands that may start."""
        if self._read_to is None:
            self._read_to = self._first()
        while not self._stopping.is_set():
            events = self._store.events(None, after=self._read_to, limit=READ_AT_ONCE)
            self._take(events)
            if len(events) < READ_AT_ONCE:
                break
        self._start()
        self._write()

    def _take(self, events: Sequence[StoredEvent]) -> None:
        """Queue the callbacks of these events."""
        versions = {row.name: row.version for row in self._store.services()} if events else {}
        if any(event.service and event.service not in versions for event in events):
            versions |= {row.name: row.version for row in self._store.services(down=True)}
        skipped: Counter[str] = Counter()
        for event in events:
            self._read_to = event.seq
            callback = self._callback(event, versions.get(event.service))
            if callback is not None:
                skipped[event.service] += self._enqueue(callback)
        for service in +skipped:
            self._report(
                service, f"{skipped[service]} events are skipped: event_callback is slower than they come"
            )

    def _first(self) -> int:
        """Return where an earlier controller was, or the end of the event log if there was none or the database is another one."""
        newest = self._store.events(None, newest=True, limit=1)
        end = newest[-1].seq if newest else 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            return min(end, int(json.loads(self._position.read_text())["seq"]))
        return end

    def _callback(self, event: StoredEvent, version: int | None) -> Callback | None:
        if version is None or event.record.kind in _SILENT:
            return None
        try:
            spec = self._specs.get(event.service, version)
            if spec.event_callback is None:
                return None
            own = {**dict(spec.envs), **self._specs.secrets(event.service, version)}
        except (NoSuchServiceError, KeyError):  # removed meanwhile
            return None
        return Callback(event, spec.event_callback, {**own, **variables_of(event)})

    def _enqueue(self, callback: Callback) -> int:
        """Return how many are skipped for it."""
        with self._lock:
            waiting = self._waiting.setdefault(callback.event.service, deque())
            waiting.append(callback)
            if len(waiting) <= MOST_WAITING:
                return 0
            waiting.popleft()
            return 1

    def _start(self) -> None:
        with self._lock:
            ready = [name for name, queue in self._waiting.items() if queue and name not in self._running]
            chosen = sorted(ready, key=lambda name: self._waiting[name][0].event.seq)
            started = []
            for name in chosen[: AT_ONCE - len(self._running)]:
                callback = self._waiting[name].popleft()
                if not self._waiting[name]:
                    del self._waiting[name]
                self._running[name] = callback.event.seq
                started.append(callback)
        for callback in started:
            self._submit(lambda callback=callback: self._execute(callback))  # type: ignore[misc]

    def _execute(self, callback: Callback) -> None:
        service = callback.event.service
        if self._stopping.is_set():
            return
        try:
            why = self._run(callback)
        except Exception as error:
            log.exception("callback of %s", service)
            why = type(error).__name__
        if self._stopping.is_set():
            return  # it counts as not run
        with self._lock:
            is_news = bool(why) and service not in self._failing
            self._failing.discard(service)
            if why:
                self._failing.add(service)
        if is_news:
            self._report(service, f"event_callback failed, for {callback.event.record.kind}: {why}")
        with self._lock:
            del self._running[service]
        with suppress(OSError):
            self._write()
        self._start()

    def _run_command(self, callback: Callback) -> str:
        return self._commands.execute(callback.command, callback.variables)

    def _report(self, service: str, message: str) -> None:
        log.warning("%s: %s", service, message)
        with suppress(SQLAlchemyError, LeaseLostError):
            self._store.append_event(EventRecord(FAILED, message), now=self._clock.now(), service=service)

    def _write(self) -> None:
        """Record which events are finished."""
        with self._lock:
            pending = [queue[0].event.seq for queue in self._waiting.values() if queue]
            pending += self._running.values()
            done = min(pending) - 1 if pending else self._read_to
            if done is not None and done != self._written:
                write_text(self._position, json.dumps({"seq": done}))
                self._written = done


def variables_of(event: StoredEvent) -> dict[str, str]:
    """Return the environment of a command for an event: our names, and those that SkyPilot's scripts read."""
    record = event.record
    replica = "" if record.replica_id is None else str(record.replica_id)
    return {
        "SKYSERVE_SERVICE": event.service,
        "SKYSERVE_REPLICA_ID": replica,
        "SKYSERVE_EVENT": record.kind,
        "SKYSERVE_EVENT_ID": str(event.seq),
        "SKYSERVE_EVENT_TIME": f"{event.at:.3f}",
        "SKYSERVE_STATE": record.state or "",
        "SKYSERVE_MESSAGE": record.message.replace("\0", ""),
        "JOB_ID": replica,
        "JOB_STATUS": record.state or record.kind,
        "TASK_ID": replica,
        "TASK_NAME": event.service,
    }


class CallbacksPart(Part):
    """Runs the `event_callback` of services, while this controller leads."""

    name = "callbacks"

    def __init__(self, kernel: Kernel) -> None:
        self._callbacks = Callbacks(kernel.store, kernel.specs, kernel.clock, kernel.home.callbacks)

    def lead(self) -> None:
        self._callbacks.start()

    async def stop(self) -> None:
        self._callbacks.stop()
