"""The interface between an agent and the policy that chooses a region for a request.

Every region has an agent that knows its own replicas exactly, and the agents of other regions ("peers") by what they
report a few times a second. For a request that arrived from a client, a policy compares `LocalCost`, the cost here, with
the peers that the caller offers: those that are fresh and that the request is allowed to reach. A request that came from
a peer is never forwarded again (one hop), so no policy sees it.

Policies are pure: they read values and return a `RegionChoice`, which explains itself term by term. All times are seconds,
all lengths bytes of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol


class LocalCost(NamedTuple):
    """What the request costs in the region that it entered.

    `admits`: a replica takes the request now. `wait_s` is the time until its turn at the best replica, `prefill_s` the time
    to compute what that replica has not cached, `decode_s` how much later the response ends because of the sequences
    that run beside it, `network_s` the round trip to the replica. A replica of the region has `matched_bytes` of the prompt cached, and
    each byte takes `s_per_byte` at the best one.
    """

    admits: bool
    network_s: float
    wait_s: float
    prefill_s: float
    decode_s: float
    matched_bytes: int = 0
    s_per_byte: float = 0.0


class PeerView(NamedTuple):
    """An agent of another region, as its last report and what has been forwarded since describe it.

    `available` replicas took a request at once when the report was made; `queued` requests were waiting there. A new
    request waits `wait_s` there before its prefill, which takes `s_per_byte` for each byte that is not cached, and its response is
    later by `decode_s`. `matched_bytes` of this prompt were forwarded there before. `forwarded` requests have been sent since the
    report, `forwarded_s` seconds of prefill per available replica; at most `credit` may be sent until the next one.
    `last_turn` is the turn in which the peer was last used, 0 if never. `money_s` are the seconds that the price of the request's
    traffic to the peer and back is worth. The report came `age_s` ago.
    """

    region: str
    rtt_s: float
    available: int
    queued: int
    wait_s: float
    s_per_byte: float
    decode_s: float
    matched_bytes: int = 0
    forwarded: int = 0
    forwarded_s: float = 0.0
    credit: int = 0
    last_turn: int = 0
    money_s: float = 0.0
    age_s: float = 0.0


class RegionChoice(NamedTuple):
    """The region to forward to, or "" to stay (and wait here if no replica admits the request).

    A row of `scored` is (region, cost, value, value ...), "" being the region of the agent; `terms` names the values.
    """

    region: str
    because: str
    terms: tuple[str, ...] = ()
    scored: tuple[tuple[str | float, ...], ...] = ()


class RegionPolicy(Protocol):
    """Chooses a region. Synchronous, deterministic, without state."""

    name: ClassVar[str]
    needs_room: ClassVar[
        bool
    ]  # a peer that has no room for a forwarded request returns it instead of queueing it
    knows_caches: ClassVar[bool]  # agents report to each other what their replicas have in their caches

    def choose(
        self, prompt_bytes: int, local: LocalCost, peers: Sequence[PeerView], left_s: float
    ) -> RegionChoice:
        """Return where the request goes. It must have its first byte within `left_s` seconds."""
        ...


def stay(because: str) -> RegionChoice:
    """Return the decision to leave the request in its own region."""
    return RegionChoice("", because)
