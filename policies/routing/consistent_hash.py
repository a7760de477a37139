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
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import ceil
from typing import ClassVar

from policies.routing.base import Choice, Policy, RequestView, TargetView
from policies.routing.least_load import LeastLoad, load

VIRTUAL_NODES = 160
BALANCE = 1.25

_TERMS = ("load", "bound", "place")
_POINTS_PER_DIGEST = 8


class ConsistentHash(Policy):
    """Remembers nothing but the ring, which follows from the ids: to build it on sight is no decision."""

    name: ClassVar[str] = "consistent_hash"

    def __init__(self, virtual_nodes: int = VIRTUAL_NODES, balance: float = BALANCE) -> None:
        if balance < 1.0:
            raise ValueError(f"balance must be at least 1 (got {balance}): less than its share fits nobody")
        self._ring = Ring(virtual_nodes)
        self._balance = balance
        self._least_load = LeastLoad()

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not request.session or not targets:
            return self._least_load.choose(request, targets, now)
        offered = {target.id: target for target in targets}
        for target_id in offered:
            self._ring.add(target_id)
        fleet_load = sum(map(load, targets)) + 1
        share = self._balance * fleet_load / sum(target.capacity for target in targets)
        scored: list[tuple[str | float, ...]] = []
        for target_id in self._ring.clockwise(f"{request.scope}\0{request.session}"):
            target = offered.get(target_id)
            if target is None:
                continue
            place, bound = len(scored), ceil(share * target.capacity)
            if load(target) < bound:
                scored.append((target_id, place, load(target), bound, place))
                break
            # Full: it costs more than any target further on.
            scored.append((target_id, len(targets) + place, load(target), bound, place))
        because = "the session's own target" if len(scored) == 1 else "the session's next target with room"
        return Choice(str(scored[-1][0]), because, _TERMS, tuple(scored))

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self._least_load.record(request, target_id, now)

    def forget(self, target_id: str) -> None:
        self._ring.remove(target_id)
        self._least_load.forget(target_id)


class Ring:
    """Points on a circle and their owners."""

    def __init__(self, virtual_nodes: int = VIRTUAL_NODES) -> None:
        self._virtual_nodes = virtual_nodes
        self._points: list[tuple[int, str]] = []
        self._members: set[str] = set()

    def add(self, member: str) -> None:
        if member in self._members:
            return
        self._members.add(member)
        self._points.extend((point, member) for point in _points(member, self._virtual_nodes))
        self._points.sort()

    def remove(self, member: str) -> None:
        if member in self._members:
            self._members.remove(member)
            self._points = [one for one in self._points if one[1] != member]

    def clockwise(self, key: str) -> Iterator[str]:
        """Every member once, in the order in which a walk from the key's place meets them."""
        points, met = self._points, set[str]()
        start = bisect_left(points, (_points(key, 1)[0], ""))
        for index in range(start, start + len(points)):
            member = points[index % len(points)][1]
            if member not in met:
                met.add(member)
                yield member


def _points(text: str, count: int) -> list[int]:
    """`count` places on the circle that belong to the text; one digest holds several."""
    digests = (
        blake2b(b"%d\0%s" % (index, text.encode("utf-8", "surrogatepass"))).digest()
        for index in range(ceil(count / _POINTS_PER_DIGEST))
    )
    return [int.from_bytes(digest[at : at + 8], "big") for digest in digests for at in range(0, 64, 8)][
        :count
    ]
