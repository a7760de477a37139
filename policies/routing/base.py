"""The port between a load balancer and the policy that chooses a target.

A policy is asked (`choose`), told what became of its advice (`record`) and told who left (`forget`). Choosing
reads, it never writes: a choice that is not followed leaves no trace. Loads, ejections and exclusions belong to
the caller; what a policy is given are the targets that may serve this request now. A policy keeps only what
its algorithm must remember. Every choice explains itself: the cost of each candidate, term by term.

Hot-path values are NamedTuples: they are built for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol


class RequestView(NamedTuple):
    """What a policy may know of a request. `prompt` is the raw body, given only if `needs_prompt`."""

    id: str
    method: str
    path: str
    body_bytes: int = 0
    prompt: bytes | None = None


class TargetView(NamedTuple):
    """One target that may serve the request now, as its load balancer sees it.

    `in_flight` counts the requests this load balancer has on the target. `trouble` is the number of its recent
    failures, fading with time, so that a target which fails fast does not look like an idle one.
    """

    id: str
    in_flight: int = 0
    trouble: float = 0.0
    region: str = ""
    zone: str = ""
    capacity_type: str = ""
    accelerator: str = ""


class Term(NamedTuple):
    """One summand or tie-breaker of a cost, by name."""

    name: str
    value: float


class Scored(NamedTuple):
    """One candidate with its cost (lowest wins) and the terms that led to it."""

    target_id: str
    cost: float
    terms: tuple[Term, ...] = ()


class Choice(NamedTuple):
    """The chosen target, why in a few words, and every candidate with its cost."""

    target_id: str
    because: str
    scored: tuple[Scored, ...] = ()


class RoutingPolicy(Protocol):
    """Chooses among targets. Synchronous, deterministic, never blocks; one instance per target table."""

    name: ClassVar[str]
    needs_prompt: ClassVar[bool]

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        """The target to try next, or None only if `targets` is empty. Changes nothing."""
        ...

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        """The request is now on its way to `target_id`."""
        ...

    def forget(self, target_id: str) -> None:
        """The target has left the table for good; an unknown id is fine."""
        ...


class Turns:
    """Who was used how long ago, in turns instead of seconds: the memory of round robin and of fair ties.

    A counter modulo the number of targets skips and repeats when the list changes between two requests (a
    target ejected, another excluded by a retry). The order of last use does not: whoever waits longest is next,
    and a newcomer is first once.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def last(self, target_id: str) -> int:
        """The turn in which the target was last used; 0 if never."""
        return self._last.get(target_id, 0)

    def use(self, target_id: str) -> None:
        self._turn += 1
        self._last[target_id] = self._turn

    def forget(self, target_id: str) -> None:
        self._last.pop(target_id, None)
