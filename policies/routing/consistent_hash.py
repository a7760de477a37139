"""Consistent hashing with bounded loads: a session stays with its target while that target has room.

Every target owns `virtual_nodes` points on a circle of 64-bit hashes; a session (and the scope it belongs to)
is a point too, and belongs to the first target clockwise. A target that leaves gives its sessions to its
neighbours, one that joins takes about 1/n of everybody's; all others stay. No target takes more than
`balance` times its share of the load (its share is by capacity): a session whose target is full goes on
clockwise to the first one with room, always along the same path. A request without a session goes where the
load is least.

Sources: Karger et al., "Consistent Hashing and Random Trees" (STOC 1997); Mirrokni, Thorup, Zadimoghaddam,
"Consistent Hashing with Bounded Loads" (SODA 2018): with a bound of (1 + e) times the mean, a session that comes
or goes moves O(1/e^2) others. 1.25 is the bound of SGLang's router, 160 are the points of ketama. Different here:
shares are weighted by capacity; recent failures count as load, so a target that fails at once does not keep its
sessions.

Hashes are BLAKE2b: the same in every process and on every host, so agents side by side agree without talking.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from math import ceil
from random import Random
from typing import ClassVar

from policies.routing.base import Choice, Policy, RequestView, TargetView
from policies.routing.least_load import LeastLoad, load
from policies.routing.sampling import ALL
from policies.routing.target_list import finder, fleet

VIRTUAL_NODES = 160
BALANCE = 1.25

_TERMS = ("load", "bound", "place")
_POINTS_PER_DIGEST = 8


class ConsistentHash(Policy):
    """Remembers the ring, which follows from the ids, and how many requests are under way."""

    name: ClassVar[str] = "consistent_hash"

    def __init__(
        self, virtual_nodes: int = VIRTUAL_NODES, balance: float = BALANCE, rng: Random | None = None
    ) -> None:
        if balance < 1.0:
            raise ValueError(f"balance must be at least 1 (got {balance}): no target could take its share")
        self._sessions = Sessions(virtual_nodes)
        self._balance = balance
        self._least_load = LeastLoad(rng)
        self._under_way = 0

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not request.session or not targets:
            return self._least_load.choose(request, targets, now)
        passed, path = 0, self._sessions.path(request, targets)
        share = self._share(targets)
        scored: deque[tuple[str | float, ...]] = deque(maxlen=ALL)
        for target in path:
            target_id = target.id
            bound = ceil(share * target.capacity)
            if load(target) < bound:
                scored.append((target_id, passed, load(target), bound, passed))
                break
            # Full: it costs more than any target further on.
            scored.append((target_id, len(targets) + passed, load(target), bound, passed))
            passed += 1
        because = "the session's next target with room" if passed else "the session's own target"
        return Choice(str(scored[-1][0]), because, _TERMS, tuple(scored))

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self._under_way += 1
        self._least_load.record(request, target_id, now)

    def ended(self, request: RequestView, target_id: str, now: float, tokens: int | None) -> None:
        self._under_way -= 1

    def forget(self, target_id: str) -> None:
        self._sessions.forget(target_id)
        self._least_load.forget(target_id)

    def _share(self, targets: Sequence[TargetView]) -> float:
        """Return what a target of capacity 1 may have, with all of the fleet on the ring.

        Of a few targets the loads are added up. Of many that would cost more than the rest of the choice, so the
        requests under way are shared by the whole fleet.
        """
        if len(targets) <= ALL:
            fleet_load, capacity = sum(map(load, targets)), sum(target.capacity for target in targets)
        else:
            fleet_load, capacity = self._under_way, self._sessions.fleet_capacity
        return self._balance * (fleet_load + 1) / capacity


class Sessions:
    """Which target a session belongs to: the ring, with all of the fleet on it."""

    def __init__(self, virtual_nodes: int = VIRTUAL_NODES) -> None:
        self._ring = Ring(virtual_nodes)
        self._fleet: Sequence[TargetView] = ()  # as it was added to the ring
        self.fleet_capacity = 0.0

    def path(self, request: RequestView, targets: Sequence[TargetView]) -> Iterator[TargetView]:
        """Return the targets in the order in which the request's session prefers them, its own first."""
        members = fleet(targets)
        if members is not self._fleet:
            self._ring.add([target.id for target in members])
            self._fleet = members if members is not targets else ()
            self.fleet_capacity = sum(target.capacity for target in members)
        return self._walk(f"{request.scope}\0{request.session}", finder(targets))

    def _walk(self, key: str, find: Callable[[str], TargetView | None]) -> Iterator[TargetView]:
        for target_id in self._ring.clockwise(key):
            target = find(target_id)
            if target is not None:
                yield target

    def forget(self, target_id: str) -> None:
        self._ring.remove(target_id)


class Ring:
    """Points on a circle and their owners. Changes wait until the ring is used, and are then made together."""

    def __init__(self, virtual_nodes: int = VIRTUAL_NODES) -> None:
        self._virtual_nodes = virtual_nodes
        self._points: list[int] = []
        self._owners: dict[int, str] = {}
        self._members: dict[str, list[int]] = {}
        self._joined: list[int] = []
        self._left: set[int] = set()

    def add(self, members: Iterable[str]) -> None:
        """Those that are on it already are fine."""
        if self._left:
            self._settle()
        for member in members:
            if member in self._members:
                continue
            points = [one for one in _points(member, self._virtual_nodes) if one not in self._owners]
            self._members[member] = points
            self._owners.update(dict.fromkeys(points, member))
            self._joined += points

    def remove(self, member: str) -> None:
        """One that is not on it is fine."""
        for point in self._members.pop(member, ()):
            del self._owners[point]
            self._left.add(point)

    def clockwise(self, key: str) -> Iterator[str]:
        """Yield every member once, in the order in which a walk from the key's place meets them."""
        self._settle()
        points, owners, met = self._points, self._owners, set[str]()
        start = bisect_left(points, _points(key, 1)[0])
        for index in range(start, start + len(points)):
            member = owners[points[index % len(points)]]
            if member not in met:
                met.add(member)
                yield member

    def _settle(self) -> None:
        if self._joined:
            self._points += self._joined
            self._joined = []
            self._points.sort()  # nearly sorted input is cheap
        if self._left:
            left, self._left = self._left, set()
            self._points = [point for point in self._points if point not in left]


def _points(text: str, count: int) -> list[int]:
    """`count` places on the circle that belong to the text; one digest holds several."""
    digests = (
        blake2b(b"%d\0%s" % (index, text.encode("utf-8", "surrogatepass"))).digest()
        for index in range(ceil(count / _POINTS_PER_DIGEST))
    )
    return [int.from_bytes(digest[at : at + 8], "big") for digest in digests for at in range(0, 64, 8)][
        :count
    ]
