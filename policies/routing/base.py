"""The port between a load balancer and the policy that chooses a target.

A policy chooses (`choose`), and is informed of what became of its choice (`record`, `responded`, `ended`) and of targets that left
(`forget`). Choosing reads, it never writes: a choice that is not followed leaves no trace. Loads, ejections and
exclusions belong to the caller; what a policy is given are the targets that may serve this request now. A policy
keeps only what its algorithm must remember. Every choice explains itself: the cost of each candidate, term by
term.

Values built for each request are plain classes, which are made in a sixth of the time of a NamedTuple once compiled; a
`TargetView` is built once per target and kept up to date by its owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

LONGEST_PUT_OFF_S: Final = 30.0


class RequestView:
    """What a policy may know of a request.

    `prompt` are the bytes of its messages or prompt in a canonical form (see `lb.stream.openai_request`), at most as many as the
    caller cares to look at; given only if the policy `needs_prompt`, as are `scope` and `max_tokens`. Two requests can share a prefix only within
    one `scope` (model and tenant). `session` is the client's routing key, empty if it has none. `max_tokens` is
    the limit the client has set on its response, 0 if it has set none. `due_at` is when its first byte is due, on the clock of
    `now`, `ttft_s` after it came, and `tpot_s` is how long each further token may take; 0: it does not matter.
    """

    __slots__ = (
        "body_bytes",
        "due_at",
        "id",
        "max_tokens",
        "method",
        "path",
        "prompt",
        "scope",
        "session",
        "tpot_s",
        "ttft_s",
    )

    def __init__(
        self,
        id: str,
        method: str,
        path: str,
        body_bytes: int = 0,
        prompt: bytes | None = None,
        scope: str = "",
        session: str = "",
        max_tokens: int = 0,
        due_at: float = 0.0,
        ttft_s: float = 0.0,
        tpot_s: float = 0.0,
    ) -> None:
        self.id = id
        self.method = method
        self.path = path
        self.body_bytes = body_bytes
        self.prompt = prompt
        self.scope = scope
        self.session = session
        self.max_tokens = max_tokens
        self.due_at = due_at
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s


@dataclass(slots=True, eq=False)
class TargetView:
    """One target that may serve the request now, as its load balancer sees it. Policies only read it.

    `in_flight` counts the requests this load balancer has on the target, `waiting` those among them without a
    first byte. `trouble` is the number of its recent failures, fading with time, so that a target which fails fast
    does not look like an idle one. `capacity` is its size relative to others of its service (requests per second
    its accelerator is meant for, if the service defines it; else 1).

    `running`, `pending` and `kv_usage` (0 to 1) are the engine's own account, with what has been sent since
    booked on top of `pending`; None where the engine reports nothing. `queued` are those that it reported as pending itself.
    `warming`: its cache is being filled; it is offered only where no other target has room.
    """

    id: str
    in_flight: int = 0
    trouble: float = 0.0
    region: str = ""
    zone: str = ""
    capacity_type: str = ""
    accelerator: str = ""
    capacity: float = 1.0
    waiting: int = 0
    running: int | None = None
    pending: int | None = None
    queued: int = 0
    kv_usage: float | None = None
    rtt_s: float = 0.0
    price_usd_hour: float = 0.0
    warming: bool = False


class Choice:
    """The chosen target, why in a few words, and every candidate with its cost.

    A row of `scored` is (target id, cost, value, value ...), lowest cost first choice; `terms` names the values.
    `matched_bytes` of the request's prompt are thought to be in the chosen target's cache.

    `wait`: the target has enough to do now, and is still the best one, so the request is better held for it than
    sent anywhere. Among those that wait there it goes as if it had come `put_off_s` later, LONGEST_PUT_OFF_S at most. Only a
    policy that `waits` sets them. `late`: no target is expected to keep the request's deadline. Its first byte is expected
    `first_s` from now; 0: not known, or not computed, as the request has no deadline.
    """

    __slots__ = (
        "because",
        "first_s",
        "late",
        "matched_bytes",
        "put_off_s",
        "scored",
        "target_id",
        "terms",
        "wait",
    )

    def __init__(
        self,
        target_id: str,
        because: str,
        terms: tuple[str, ...] = (),
        scored: tuple[tuple[str | float, ...], ...] = (),
        matched_bytes: int = 0,
        wait: bool = False,
        put_off_s: float = 0.0,
        late: bool = False,
        first_s: float = 0.0,
    ) -> None:
        self.target_id = target_id
        self.because = because
        self.terms = terms
        self.scored = scored
        self.matched_bytes = matched_bytes
        self.wait = wait
        self.put_off_s = put_off_s
        self.late = late
        self.first_s = first_s


class RoutingPolicy(Protocol):
    """Chooses among targets. Synchronous, deterministic, never blocks; one instance per target table.

    For each attempt the caller calls `record`, then at most once `responded`, then `ended` exactly once. A request
    has at most one attempt under way at a time.
    """

    name: ClassVar[str]
    needs_prompt: ClassVar[bool]
    waits: ClassVar[bool]  # measures the work of a target, and so may choose one that has no room yet

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        """Return the target to try next, or None only if `targets` is empty. Changes nothing."""
        ...

    def ready(self, target: TargetView, now: float, urgent: bool = False) -> bool:
        """Return whether the target could take work now, an `urgent` request for example.

        Called for a policy that waits only; changes nothing.
        """
        ...

    def keeps_room(self, now: float) -> bool:
        """Return whether a target that is not `ready` must get no request, although it admits one; changes nothing."""
        ...

    def queued(self, request: RequestView, choice: Choice, now: float) -> None:
        """The request waits for the target of `choice`. Repeated when it waits for another one."""
        ...

    def dequeued(self, request: RequestView) -> None:
        """It waits no longer, whether it is sent now or never; one that does not wait is fine."""
        ...

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        """The request is now on its way to `target_id`."""
        ...

    def responded(self, request: RequestView, target_id: str, now: float) -> None:
        """The first byte of its response has come."""
        ...

    def ended(self, request: RequestView, target_id: str, now: float, tokens: int | None) -> None:
        """The attempt is over, however it ended.

        `tokens` is how many tokens its response was long, as the engine reports them or else as the events of its stream
        carry text; None if that is not known or the response is not whole.
        """
        ...

    def cached(self, request: RequestView, target_id: str, now: float) -> None:
        """The prompt, and the state of its session, is in the target's cache, by a request that counts as no load here."""
        ...

    def forget(self, target_id: str) -> None:
        """The target has left the table for good; an unknown id is fine."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Return what an operator may want to watch, by name."""
        ...


class Policy:
    """The hooks that most policies leave empty."""

    needs_prompt: ClassVar[bool] = False
    waits: ClassVar[bool] = False

    def ready(self, target: TargetView, now: float, urgent: bool = False) -> bool:
        return True

    def keeps_room(self, now: float) -> bool:
        return False

    def queued(self, request: RequestView, choice: Choice, now: float) -> None: ...

    def dequeued(self, request: RequestView) -> None: ...

    def record(self, request: RequestView, target_id: str, now: float) -> None: ...

    def responded(self, request: RequestView, target_id: str, now: float) -> None: ...

    def ended(self, request: RequestView, target_id: str, now: float, tokens: int | None) -> None: ...

    def cached(self, request: RequestView, target_id: str, now: float) -> None: ...

    def forget(self, target_id: str) -> None: ...

    def gauges(self) -> Mapping[str, float]:
        return {}


class Turns:
    """Who was used how long ago, in turns instead of seconds: the memory of round robin and of fair ties.

    A counter modulo the number of targets skips and repeats when the list changes between two requests (a
    target ejected, another excluded by a retry). The order of last use does not: the target that waits longest is next,
    and a newcomer is first once.
    """

    def __init__(self) -> None:
        self._turn = 0
        self.by_target: dict[str, int] = {}  # the turn in which each was last used

    def last(self, target_id: str) -> int:
        """Return the turn in which the target was last used; 0 if never."""
        return self.by_target.get(target_id, 0)

    def use(self, target_id: str) -> None:
        self._turn += 1
        self.by_target[target_id] = self._turn

    def forget(self, target_id: str) -> None:
        self.by_target.pop(target_id, None)
