"""What requests need of their proxy: a Protocol, so that `request` and `context` do not import each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from lb.config.options import Limits
from lb.core.forwarding import Forwarding
from lb.core.queue import RequestQueue
from lb.core.scheduler import Scheduler
from lb.core.sliding_window import WindowCounter, WindowMean
from lb.core.targets import Booking, Key, TargetTable
from lb.engines.kinds import EngineKind
from lb.http.messages import Reader
from lb.http.upstream import Pools
from lb.http.write_batch import WriteBatcher
from lb.observe.counters import TargetCounts
from lb.observe.metrics import Metrics
from lb.proxy.ending import Endings
from lb.proxy.fast_path import FastPath
from lb.proxy.faults import Faults
from lb.proxy.retries import Retries


class Services(Protocol):
    """The proxy, as its requests use it. Requests are `Any` here: only `context` names their class."""

    loop: asyncio.AbstractEventLoop
    write_batcher: WriteBatcher
    pools: Pools
    limits: Limits
    heads: Reader
    table: TargetTable
    forwarding: Forwarding | None  # to other regions
    metrics: Metrics
    faults: Faults
    endings: Endings
    retries: Retries
    fast_path: FastPath | None
    closing: bool  # no connection is kept alive any longer
    draining: bool  # serves on, but is not ready
    queueing: bool  # may a request wait for a target?
    queue: RequestQueue[Any]
    scheduler: Scheduler[Any]
    waiting: dict[Any, None]  # with an attempt that has no first byte yet
    waiting_until: float  # none of them has to be checked before
    relays: dict[Any, None]  # with a response under way
    tunnels: dict[Any, None]
    rejections: WindowCounter
    ongoing: WindowMean
    on_missing_model: Callable[[], None]  # a request was for a model that no target serves
    on_credit: Callable[[], None]  # a peer takes another request

    @property
    def clock(self) -> Callable[[], float]: ...
    @property
    def kind_of(self) -> Callable[[Key], EngineKind]: ...

    def kind_of_id(self, target_id: str) -> EngineKind:
        """Return the kind of engine of a target of the table, as far as it is known."""
        ...

    def kind_of_booking(self, booking: Booking) -> EngineKind:
        """Return the kind of engine that will have the request: of a peer, that of its replicas."""
        ...

    def table_of(self, booking: Booking) -> TargetTable:
        """Return the table that has the booking: that of replicas, or that of peers."""
        ...

    def may_wait(self, request: Any, now: float) -> bool:
        """Return whether a request of a peer may wait here."""
        ...

    def counts_of(self, booking: Booking) -> TargetCounts: ...

    def release(self, booking: Booking, now: float, tokens: int | None = None) -> None:
        """The attempt is over; a queued request may find room now."""
        ...

    def local_trouble(self, why: str, now: float) -> None:
        """A connect failed for want of something of this host."""
        ...

    def forget_body(self, request: Any) -> None:
        """Give the bytes of a body that is not needed any longer back to the budget."""
        ...

    def let_in_soon(self) -> None: ...
    def changed_soon(self) -> None: ...
