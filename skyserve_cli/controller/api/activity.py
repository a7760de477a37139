"""`GET /v1/activity`: what the controller is doing, from memory.

It needs neither the database nor a thread, so that it responds while all threads wait for the database. `reasons` makes sentences of
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from skyserve_cli.controller.api.access import Caller, calling
from skyserve_cli.controller.persistence.leadership import Leadership
from skyserve_cli.controller.reconcile.clock import Clock
from skyserve_cli.controller.reconcile.ports import CloudOperation
from skyserve_cli.controller.reconcile.reconciler import TickUnderWay
from skyserve_cli.controller.reconcile.store_health import StoreHealth
from skyserve_cli.state.database import Database

MOST_CALLS = 3
#: The name of the thread that ticks.
TICK_THREAD = "reconciler"


@dataclass(frozen=True, slots=True)
class Activity:
    """One per daemon. Thread-safe. `calls` are those of clouds that are being made, and for how many seconds, the oldest first."""

    database: Database
    store_health: StoreHealth
    leadership: Leadership
    clock: Clock
    tick_under_way: Callable[[], TickUnderWay | None] = lambda: None
    calls: Callable[[], Sequence[tuple[CloudOperation, float]]] = tuple
    last_jump: Callable[[], tuple[float, float] | None] = lambda: None
    is_stopping: Callable[[], bool] = lambda: False

    def to_json(self, caller: Caller | None = None) -> dict[str, Any]:
        """Return it with the names of the services that the caller covers; None: of all."""
        health, now = self.store_health.to_json(), self.clock.now()
        transactions = self.database.transactions
        jump = self.last_jump()
        return {
            "pid": os.getpid(),
            "stopping": self.is_stopping(),
            "database": {
                "url": self.database.url.render_as_string(hide_password=True),
                "slow_s": transactions.slow_for_s(),
                "longest_s": transactions.longest_s(),
                "ok": health["ok"],
                "why": health["why"],
                "bad_s": 0.0 if health["ok"] else max(0.0, now - health["since"]),
            },
            "lease": self.leadership.to_json(),
            "tick": self.tick(caller),
            "clock_jump": None if jump is None else {"by_s": jump[0], "ago_s": jump[1]},
            "cloud_calls": [
                {
                    "cloud": call.replica.zone.cloud,
                    "kind": call.kind.value,
                    "service": call.service,
                    "replica_id": call.replica.id,
                    "for_s": for_s,
                }
                for call, for_s in self.calls()
                if caller is None or caller.covers(call.service)
            ][:MOST_CALLS],
        }

    def tick(self, caller: Caller | None = None) -> dict[str, Any] | None:
        """Return the tick that goes on; None between two."""
        found = self.tick_under_way()
        if found is None:
            return None
        is_shown = caller is None or caller.covers(found.service)
        return {
            "for_s": found.for_s,
            "service": found.service if is_shown else "",
            "turn_s": found.turn_s,
            "database_s": self.database.transactions.longest_s(TICK_THREAD),
        }

    async def respond(self, request: web.Request) -> web.Response:
        return web.json_response(self.to_json(calling()), headers={"Cache-Control": "no-store"})
