"""The routing policies in use: the table's own, and those that requests have named.

All of them are informed of every request, whichever policy has chosen its target, so that each knows the whole load and every
prompt. A new one is informed at once of requests under way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from lb.core.target_state import Booking
from policies.routing.base import Policy, RequestView, RoutingPolicy
from policies.routing.cached_tree import EngineCaches
from policies.routing.prefix_policy import PrefixPolicy

UNUSED_S = 300.0


class ActivePolicies:
    """`own` decides for requests that name no policy.

    The hooks are lists of bound methods, without those that do nothing: an empty list costs nothing.
    """

    __slots__ = (
        "_by_name",
        "_make",
        "_under_way",
        "_used_at",
        "caches",
        "needs_prompt",
        "on_cached",
        "on_ended",
        "on_record",
        "on_responded",
        "own",
        "own_waits",
    )

    def __init__(
        self, name: str, make: Callable[[str], RoutingPolicy], under_way: Collection[Booking]
    ) -> None:
        """`make` raises UnknownPolicyError; so do the methods that take a name, and have changed nothing then.

        `under_way` is read when a policy is new: what is in it then, it is informed of.
        """
        self._make = make
        self._under_way = under_way
        self.own: RoutingPolicy = make(name)
        self._by_name: dict[str, RoutingPolicy] = {name: self.own}
        self._used_at: dict[str, float] = {}  # of those that requests have named
        self.caches: EngineCaches | None = None  # None: engines do not report what they have cached
        self._learn_hooks()

    def adopt(self, name: str) -> None:
        """`name` is the table's own from now on; the one before it is dropped with what it remembers."""
        if name == self.own.name:
            return
        successor = self.named(name)
        self._drop(self.own.name)
        self._used_at.pop(name, None)
        self.own = successor
        self._learn_hooks()

    def follow(self, *, on: bool) -> None:
        """From now on engines report what they have cached, or none does any longer."""
        if on is (self.caches is not None):
            return
        self.caches = EngineCaches() if on else None
        for policy in self._by_name.values():
            _follow(policy, self.caches)
        self._learn_hooks()

    def named(self, name: str | None) -> RoutingPolicy:
        """Return the policy of that name; None: the table's own."""
        if name is None:
            return self.own
        policy = self._by_name.get(name)
        if policy is None:
            policy = self._make(name)
            if self.caches is not None:
                _follow(policy, self.caches)
            for booking in sorted(self._under_way, key=_since):
                if not booking.entry.departed:
                    policy.record(booking.request, booking.key.id, booking.since)
                    if booking.responded:
                        policy.responded(booking.request, booking.key.id, booking.since)
            self._by_name[name] = policy
            self._learn_hooks()
        return policy

    def used(self, name: str, now: float) -> None:
        """A request has named this policy."""
        if name != self.own.name:
            self._used_at[name] = now

    def drop_unused(self, now: float) -> None:
        """Drop policies that no request has named lately: every request feeds every policy, and trees take memory."""
        old = [
            name
            for name in self._by_name
            if name != self.own.name and now - self._used_at.get(name, now) >= UNUSED_S
        ]
        for name in old:
            self._drop(name)
            del self._used_at[name]
        if old:
            self._learn_hooks()

    def forget(self, target_id: str) -> None:
        for policy in self._by_name.values():
            policy.forget(target_id)
        if self.caches is not None:
            self.caches.index.forget(target_id)

    def _drop(self, name: str) -> None:
        policy = self._by_name.pop(name)
        if self.caches is not None:
            _follow(policy, None)

    def _learn_hooks(self) -> None:
        every = list(self._by_name.values())
        self.own_waits = self.own.waits  # asked of each request
        self.needs_prompt = any(policy.needs_prompt for policy in every)
        self.on_record: list[Callable[[RequestView, str, float], None]] = _doing(every, "record")
        self.on_cached: list[Callable[[RequestView, str, float], None]] = _doing(every, "cached")
        self.on_responded: list[Callable[[RequestView, str, float], None]] = _doing(every, "responded")
        self.on_ended: list[Callable[[RequestView, str, float, int | None], None]] = _doing(every, "ended")
        if self.caches is not None:
            self.on_record.insert(0, self.caches.record)  # before the trees have the prompt
            self.on_responded.append(self.caches.responded)
            self.on_ended.append(self.caches.ended)


def _doing(policies: Iterable[RoutingPolicy], hook: str) -> list[Any]:
    """Return the hook of every policy that has not left it empty."""
    empty = getattr(Policy, hook)
    return [getattr(policy, hook) for policy in policies if getattr(type(policy), hook) is not empty]


def _follow(policy: RoutingPolicy, caches: EngineCaches | None) -> None:
    if isinstance(policy, PrefixPolicy):
        policy.follow(caches)


def _since(booking: Booking) -> float:
    return booking.since
