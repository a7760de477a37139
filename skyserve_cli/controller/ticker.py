"""The reconciler's thread: it waits until it is woken or a tick has passed, and follows the host's clock before each tick."""

from __future__ import annotations

import logging
import threading

from skyserve_cli.controller.api.activity import TICK_THREAD
from skyserve_cli.controller.persistence.leadership import Leadership
from skyserve_cli.controller.reconcile.clock import JUMP_S, SystemClock
from skyserve_cli.controller.reconcile.reconciler import Reconciler
from skyserve_cli.state.lease import LeaseLostError
from skyserve_cli.state.store import Store
from skyserve_cli.state.values import EventRecord

log = logging.getLogger("skyserve.controller")

#: Ticks that are requested in a row are one tick, so that a burst of results is handled at once.
BETWEEN_TICKS_S = 0.02


class Ticker(threading.Thread):
    """Runs the reconciler: when woken, and once per `tick_s` at the least. Started when this controller's term begins."""

    def __init__(
        self,
        reconciler: Reconciler,
        store: Store,
        clock: SystemClock,
        woken: threading.Event,
        tick_s: float,
        leadership: Leadership,
    ) -> None:
        super().__init__(name=TICK_THREAD, daemon=True)
        self._reconciler = reconciler
        self._store = store
        self._clock = clock
        self._woken = woken
        self._tick_s = tick_s
        self._leadership = leadership
        self._stopping = threading.Event()
        self._turns = 0
        self._is_busy = False

    def run(self) -> None:
        self._woken.set()
        while not self._stopping.is_set() and self._leadership.leads:
            self._woken.wait(self._tick_s)
            self._woken.clear()
            self._turns += 1
            self._is_busy = True
            try:
                follow_clock(self._clock, self._store)
                self._reconciler.tick()
            except LeaseLostError:
                self._leadership.lost()
            except Exception:  # the database may be away for a while; the next tick is another chance
                log.exception("tick")
            self._is_busy = False
            self._stopping.wait(BETWEEN_TICKS_S)

    def turn(self) -> int | None:
        """Return the number of the tick that goes on; None between two."""
        return self._turns if self._is_busy else None

    def stop(self) -> None:
        self._stopping.set()
        self._woken.set()
        if self.is_alive():
            self.join(timeout=10.0)


def follow_clock(clock: SystemClock, store: Store) -> float:
    """If the host's clock was set, let ours follow it, and what it has measured. Returns by how much."""
    jump_s = clock.jump_s()
    if not jump_s:
        return 0.0
    if clock.moves_instants(jump_s):
        store.move_instants(jump_s, then=lambda: clock.follow(jump_s))
    else:
        clock.follow(jump_s)
    _record_jump(store, jump_s, clock.now())
    return jump_s


def catch_up(clock: SystemClock, store: Store) -> None:
    """If the host's clock was set back while no controller ran, move live replicas out of the future."""
    latest = store.latest_instant()
    if latest is not None and latest - clock.now() > JUMP_S:
        jump_s = clock.now() - latest
        store.move_instants(jump_s)
        _record_jump(store, jump_s, clock.now())


def _record_jump(store: Store, jump_s: float, now: float) -> None:
    log.warning("clock jumped by %+.1f s", jump_s)
    store.append_event(EventRecord("clock", f"clock jumped by {jump_s:+.0f} s"), now=now)
