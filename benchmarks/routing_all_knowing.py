"""`all_knowing`: the cost of `gorgo` by what each engine really has in its cache at that moment. No load balancer can know it.

Prompts that are on their way to an engine, and have no first byte yet, count as cached there: they will be by the time that another
request has its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from policies.routing.base import RequestView
from policies.routing.gorgo import Gorgo
from policies.routing.radix_tree import Match

Look = Callable[[RequestView], dict[str, int]]
"""Returns how many bytes of a prompt each engine has in its cache, by its id; those that have none may be left out."""


class AllKnowing(Gorgo):
    name: ClassVar[str] = "all_knowing"

    def __init__(self) -> None:
        super().__init__()
        self._look: Look = _nothing
        self._on_its_way: dict[str, tuple[str, bytes]] = {}  # targets and prompts, by request

    def sees(self, look: Look) -> None:
        """From now on it knows the engines' caches by this."""
        self._look = look

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        super().record(request, target_id, now)
        self._on_its_way[request.id] = (target_id, request.prompt or b"")

    def responded(self, request: RequestView, target_id: str, now: float) -> None:
        super().responded(request, target_id, now)
        self._on_its_way.pop(request.id, None)

    def ended(self, request: RequestView, target_id: str, now: float, tokens: int | None) -> None:
        super().ended(request, target_id, now, tokens)
        self._on_its_way.pop(request.id, None)

    def _matches(self, request: RequestView) -> tuple[int, Match]:
        prompt = request.prompt or b""
        held = self._look(request)
        for target_id, other in self._on_its_way.values():
            longest = held.get(target_id, 0)
            if other[: longest + 1] == prompt[: longest + 1]:
                held[target_id] = _common(prompt, other, longest)
        return len(prompt), Match(held.get, few=held)


def _common(one: bytes, other: bytes, least: int) -> int:
    """Return how many bytes two prompts have in common at their beginnings, which are at least `least`."""
    most = min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def _nothing(request: RequestView) -> dict[str, int]:
    return {}
