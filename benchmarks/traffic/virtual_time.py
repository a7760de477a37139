"""What simulated clients and load balancers share: a list of events, and engines that keep their own time by it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

from benchmarks.traffic.script import Script
from benchmarks.traffic.workloads import Call
from lb.core.admission import EngineLoad
from skyserve_cli.engine.kv import PrefixCache
from skyserve_cli.engine.model import EngineModel, Request
from skyserve_cli.engine.profiles import Profile

T = TypeVar("T")


class Events:
    """Events by their instants. Those of one instant happen in the order in which they were announced."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._serial = 0

    def at(self, at_s: float, happen: Callable[[Any, float], None], what: Any) -> None:
        self._serial += 1
        heappush(self._events, (at_s, self._serial, happen, what))

    def play(self) -> None:
        """Let everything happen until no event is left."""
        while self._events:
            now, _, happen, what = heappop(self._events)
            happen(what, now)


class Engine(Generic[T]):
    """The model of an engine, in iterations of continuous batching.

    `items` are what the caller keeps of each request. `first_token` is called with the item and the number of its prompt
    tokens that were cached, `last_token` with the item.
    """

    def __init__(
        self,
        profile: Profile,
        events: Events,
        first_token: Callable[[T, int, float], None],
        last_token: Callable[[T, float], None],
    ) -> None:
        self._events = events
        self._script = Script()
        self._model = EngineModel(profile, self._script)
        self._first_token = first_token
        self._last_token = last_token
        self._iterating = False
        self._seeds = 0  # of requests, by which the script finds their responses
        self._without_token: set[str] = set()
        self.items: dict[str, T] = {}
        self.busy_s = 0.0

    @property
    def preemptions(self) -> int:
        return self._model.counters.preemptions

    @property
    def cache(self) -> PrefixCache:
        """What it has cached, to be read and to be followed."""
        return self._model.cache

    def load(self) -> EngineLoad:
        model = self._model
        return EngineLoad(running=model.running, pending=model.waiting, kv_usage=model.kv_usage)

    def submit(self, name: str, call: Call, item: T, now: float) -> None:
        self._seeds += 1
        self._script.cast(self._seeds, call.answer)
        self.items[name] = item
        self._without_token.add(name)
        request = Request(
            name, call.prompt.tokens, max_tokens=len(call.answer), ignore_eos=True, seed=self._seeds
        )
        self._model.submit(request, now)
        self._iterate(None, now)

    def abort(self, name: str) -> None:
        """Stop computing a response, if the request is here."""
        if self.items.pop(name, None) is not None:
            self._without_token.discard(name)
            self._model.abort(name)

    def _iterate(self, _: None, now: float) -> None:
        """Begin an iteration if there is work, or come back when a request has passed the front end."""
        if self._iterating:
            return
        wakes_at = self._model.wakes_at(now)
        if wakes_at is None:
            return
        if wakes_at > now:
            self._events.at(wakes_at, self._iterate, None)
            return
        self._iterating = True
        duration_s = self._model.begin(now)
        self.busy_s += duration_s
        self._events.at(now + duration_s, self._finish, None)

    def _finish(self, _: None, now: float) -> None:
        self._iterating = False
        for name, _token, finish, cached_tokens in self._model.finish():
            if name in self._without_token:
                self._without_token.discard(name)
                self._first_token(self.items[name], cached_tokens, now)
            if finish is not None:
                self._last_token(self.items.pop(name), now)
        self.iterated(now)
        self._iterate(None, now)

    def iterated(self, now: float) -> None:
        """An iteration has ended. For those that look at the cache then."""
