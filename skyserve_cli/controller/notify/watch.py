"""Looks every few seconds for something to notify of, on a thread of its own, and stores it in the outbox."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import SEEK_END
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from provisioners.remote.host_agent.lines import text_lines
from skyserve_cli.config_notify import Destination
from skyserve_cli.controller.notify.alarms import Notice, decide
from skyserve_cli.controller.notify.conditions import BACKUP, KINDS, STORE, of_backup, of_services, of_store
from skyserve_cli.controller.notify.courier import Courier
from skyserve_cli.controller.notify.delivery import deliver
from skyserve_cli.controller.notify.message import message_of
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.shell_commands import CommandRunner
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.outbox import Alarm, Key, Outbox

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LOG_LINES = 5
_LOG_BYTES = 4096
#: The views of services are read at every fifth look, that of the controller's health at each.
SERVICES_EVERY = 5

View = Mapping[str, Any]


class NotificationWatch(threading.Thread):
    """`health` and `services` return views of the API. `draw` returns a new id."""

    def __init__(
        self,
        destinations: Sequence[Destination],
        outbox: Outbox,
        clock: Clock,
        health: Callable[[], View],
        services: Callable[[], Sequence[View]],
        draw: Callable[[], str],
    ) -> None:
        super().__init__(name="notifications", daemon=True)
        self._destinations = destinations
        self._outbox = outbox
        self._clock = clock
        self._health = health
        self._services = services
        self._draw = draw
        self._commands = CommandRunner()
        self._alarms: dict[Key, Alarm] = {}
        self._has_started = False
        self._looks = 0
        self._stopping = threading.Event()
        self.couriers = {one.name: self._courier(one) for one in destinations}

    def _courier(self, to: Destination) -> Courier:
        def send(message: View) -> str:
            return deliver(to, message, self._clock.now(), self._commands.execute)

        return Courier(to.name, self._outbox, send, random.Random())

    def run(self) -> None:
        for courier in self.couriers.values():
            courier.start()
        while not self._stopping.is_set():
            try:
                self.step()
            except (SQLAlchemyError, LeaseLostError) as error:  # the next step tries again
                log.warning("nothing is notified of: %s", type(error).__name__)
            except Exception:
                log.exception("notifications")
            self._stopping.wait(LOOK_EVERY_S)

    def stop(self) -> None:
        self._stopping.set()
        for courier in self.couriers.values():
            courier.stop()
        self._commands.kill()
        if self.is_alive():
            self.join(timeout=10.0)

    def view(self) -> dict[str, Any]:
        """Return for each destination how many notifications wait (None: the store cannot be read) and why the last one failed."""
        waiting: Mapping[str, int] | None = None
        with suppress(SQLAlchemyError):
            waiting = self._outbox.waiting_notifications() if self.couriers else {}
        return {
            name: {"waiting": None if waiting is None else waiting.get(name, 0), "trouble": courier.trouble}
            for name, courier in self.couriers.items()
        }

    def step(self) -> None:
        """Look once. Raises SQLAlchemyError, LeaseLostError if nothing could be stored; then nothing was decided."""
        now = self._clock.now()
        health = self._health()
        found, known = of_store(health, now) | of_backup(health, now), [STORE, BACKUP]
        try:
            if not self._has_started:
                self._alarms = self._begin() | self._alarms
                self._has_started = True
            if self._looks % SERVICES_EVERY == 0:
                found |= of_services(self._services(), now, _last_lines)
                known = list(KINDS)
            self._looks += 1
        except SQLAlchemyError as error:  # the rest is decided without the store
            log.debug("services cannot be read: %s", type(error).__name__)
        alarms, notices = decide(self._alarms, found, now, known)
        if alarms == self._alarms and not notices:
            return
        messages = [(notice, message_of(notice, self._draw(), now)) for notice in notices]
        routed = [
            (to.name, message)
            for notice, message in messages
            for to in self._destinations
            if to.accepts(notice.kind, notice.service)
        ]
        try:
            dropped = self._outbox.put_notifications(alarms, routed, now=now)
        except (SQLAlchemyError, LeaseLostError):  # the latter, too, where the state is not the one it had
            self._send_of_store(alarms, messages)
            raise
        self._alarms = alarms
        for notice in notices:
            log.info("notification: %s", notice.text)
        if dropped:
            log.warning("%d notifications are dropped: their destinations do not receive them", dropped)
        for name in {name for name, _ in routed}:
            self.couriers[name].wake()

    def _begin(self) -> dict[Key, Alarm]:
        """Return what an earlier controller decided."""
        dropped = self._outbox.forget_destinations(list(self.couriers))
        if dropped:
            log.warning("%d notifications to destinations that are no longer configured are dropped", dropped)
        return self._outbox.alarms()

    def _send_of_store(self, alarms: Mapping[Key, Alarm], messages: Sequence[tuple[Notice, View]]) -> None:
        """Send that the store cannot be written, which cannot be stored."""
        key = ("", STORE)
        if key in alarms:
            self._alarms = {**self._alarms, key: alarms[key]}
        for notice, message in messages:
            for to in self._destinations:
                if notice.kind == STORE and to.accepts(STORE, ""):
                    self.couriers[to.name].send_unstored(message)


def _last_lines(path: str) -> str:
    """Return the last lines of the log of a replica that is kept in the home, as far as it can be read."""
    with suppress(OSError), Path(path).open("rb") as file:
        file.seek(max(0, file.seek(0, SEEK_END) - _LOG_BYTES))
        return "\n".join(text_lines(file.read(_LOG_BYTES))[-LOG_LINES:])
    return ""
