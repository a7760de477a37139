"""What this agent and others know of the caches of replicas, and what of it goes into the trees of prompts. Pure.

An agent reports by digests (`policies.routing.cache_digest`) which prompts it has sent to the replicas of its own table. What it hears it
uses as if it had forwarded the beginning of the prompt itself: for a replica of its own table in the trees of the routing policies, for a
replica of another region in the tree of peers. That happens when a request comes that begins so, since a digest has no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, Final

from policies.routing.base import RequestView
from policies.routing.cache_digest import CacheLog, Digest, Held, KnownCaches, Marker
from policies.routing.radix_tree import beginning_of

BYTES_PER_S: Final = 16_384  # to all other agents together
_LONGEST_S: Final = 1.0  # of silence on a link, that is made up for at once


class _Reader:
    """A link to another agent: how far it has read, and when."""

    __slots__ = ("at", "read_at")

    def __init__(self, at: int, now: float) -> None:
        self.at = at
        self.read_at = now


class SharedCaches:
    """The digests of one agent. Without a `key`, which all agents of a service have, there are none."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key
        self._marker = Marker(key)
        self._agents: frozenset[str] = frozenset()
        self.age_s: dict[str, tuple[float, float]] = {}  # of the last digest of each agent, and when it came
        self.sent_bytes: Counter[str] = Counter()  # of digests, by agent
        self._log = CacheLog()
        self._known = KnownCaches()
        self._readers: dict[str, _Reader] = {}
        self._marked: tuple[RequestView | None, tuple[list[int], list[int]]] = None, ([], [])

    def retain(self, agents: Collection[str], target_ids: Collection[str], now: float) -> None:
        """These are the other agents and the replicas of the table from now on."""
        self._agents = frozenset(agents) if self.key else frozenset()
        self._log.retain(target_ids, now)
        self._known.retain(agents)
        self._readers = {name: reader for name, reader in self._readers.items() if name in agents}
        self.age_s = {name: age for name, age in self.age_s.items() if name in agents}
        self.sent_bytes = Counter({name: self.sent_bytes[name] for name in agents})

    def connected(self, agent: str) -> None:
        """A new connection to the agent: what the last one carried may be lost."""
        self._readers.pop(agent, None)

    def to_json(self, now: float) -> list[dict[str, Any]]:
        """Return a row for each of the other agents: bytes of digests sent to it, and how old the newest one is that it sent."""
        ages = {name: round(age_s + now - at, 3) for name, (age_s, at) in self.age_s.items()}
        return [
            {"id": name, "sent_bytes": self.sent_bytes[name], "age_s": ages.get(name)}
            for name in sorted(self._agents)
        ]

    # --- out

    def sent(self, view: RequestView, target_id: str, zones: frozenset[str], now: float) -> None:
        """The request was sent to a replica of the table; `zones` are those of its residency."""
        if self._agents and view.prompt:
            marks, session = self._marks(view)
            self._log.sent(target_id, marks + session if session else marks, zones, now)

    def unsent(self, agent: str, served: Collection[str], now: float) -> Digest | None:
        """Return what to send to one of the agents, which serves those zones; None: nothing."""
        reader = self._readers.get(agent)
        if reader is None:
            reader = self._readers[agent] = _Reader(0, now - _LONGEST_S)
        room = (
            int(BYTES_PER_S / len(self._agents) * min(now - reader.read_at, _LONGEST_S))
            if self._agents
            else 0
        )
        if reader.at >= self._log.end or not room:
            return None
        digest, reader.at = self._log.read(reader.at, served, room, now)
        reader.read_at = now
        return digest if digest.rows else None

    # --- in

    def reported(self, agent: str, digest: Digest, now: float) -> None:
        """A digest of another agent has come."""
        if agent not in self._agents:
            return
        self.age_s[agent] = digest.age_s, now
        self._known.reported(agent, digest, now)

    def news(self, view: RequestView, now: float) -> list[tuple[Held, RequestView]]:
        """Return who has which beginning of a request that has come, or its session alone, by news from other agents."""
        if not self.age_s or not view.prompt:
            return []
        marks, session = self._marks(view)
        found = [
            (held, _of_cache(view, view.prompt[: held.bytes], "")) for held in self._known.news(marks, now)
        ]
        return found + [(held, _of_cache(view, b"", view.session)) for held in self._known.news(session, now)]

    def _marks(self, view: RequestView) -> tuple[list[int], list[int]]:
        """Return the marks of the prompt, and that of the session if it has one."""
        before, found = self._marked
        if before is not view:
            prompt = view.prompt or b""
            found = (
                self._marker.marks_of(view.scope, beginning_of(prompt)),
                [self._marker.of_session(view.scope, view.session)] if view.session else [],
            )
            self._marked = view, found
        return found


def _of_cache(view: RequestView, prompt: bytes, session: str) -> RequestView:
    """Return what a cache is known to have of a request."""
    return RequestView(
        view.id, view.method, view.path, view.body_bytes, prompt, view.scope, session, view.max_tokens
    )
