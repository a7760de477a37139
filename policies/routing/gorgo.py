"""GORGO for one region: the target where the response is expected soonest, in seconds, and with the least work.

    cost = network round trip
         + residual prefill    bytes of the prompt not thought to be in its cache x its seconds per byte
         + burden on others    PREFILL_WEIGHT - 1 times the same, for each request that it holds up
         + copy                COPY_WEIGHT times the prefill of what another target has in its cache, and this one has not
         + session             prefill of what no target is known to have in its cache, unless it is the session's own target
         + queue wait          until its turn comes: the same of requests before this one that have no first byte yet,
                               sent or held, or a seat in the batch (see `policies.routing.backlog`)
         + decode pressure     DECODE_WEIGHT x requests on the target x tokens expected of this response, x seconds per token;
                               requests up to EVEN times the mean of the targets count EVEN_WEIGHT each
         + failures            one second for each recent one
         + full memory         one second if the engine's KV cache is 95 % used

Source: Toniolo et al., GORGO (2026), section 3.4: network + prefill + queue, with weights set by hand.
Different here:

*Seconds per byte* are learned online (`prefill_rate`): those of the fleet start from the paper's A100 and 7B
model (0.0938 ms a token), those of a target from the fleet's, and differ from them only as far as its responses
leave no doubt.

*The queue* is the work really ahead: residual bytes, without cached ones, and without what the head of the
queue must have had computed since it became the head. A request leaves it with its first byte, and at its end
in any case. The authors' code counts whole prompts until completion, which is about what our decode pressure
is for. Requests the engine reports as pending beyond our own (those of other load balancers) count as the
usual residual.

*The burden on others.* A request that compares its own wait with its own prefill leaves the holder of its prompt as soon
as it gains by that itself. But the seconds of prefill are taken from the target: from its streams, from those who wait and
from those who have not come yet. Where prefixes carry the load (long shared documents) the fleet then does the same
work many times over. So prefill counts once more for each request that waits at the target, as a whole, and for each
response under way there, as STREAM_WEIGHT, since that is late by no more than one token; once more at least. Simulated
fleets then have more hits and more tokens per second, the more so the more there is to do.

*Copies.* What another target has in its cache and this one computes again takes memory here from other prompts, which must
then be computed again themselves. So a request leaves the holder of its prompt only if it gains several times the seconds
of that prefill. Without this term, conversations whose users think for a minute move between targets that are all nearly
idle, to gain milliseconds.

*Sessions.* A client that names its session expects its state on one target: a cache that the prompt does not show, or that
has been forgotten here. So what no target is known to have in its cache, SESSION_BYTES at least, is taken for cached where
the session was served last, as far as that is known here: less by e after each STAY_S, since caches forget, and then SESSION_BYTES.
Of a session that is not known here that is where it belongs by consistent hashing (`consistent_hash.Sessions`), on which all load
balancers agree without talking. It is a term like others: a session leaves its target for one where it gains more, and stays where its
prompt is.

*Waiting.* The best target may have enough to do. It does if the requests that were sent to it will have their first bytes
in PUSH_AHEAD_S or later, or if some of them wait for a seat in its batch already: either is enough for an engine never to
run dry. A request that is held for a seat may still choose another target, and one that is in the engine's queue may not. Then
the choice is marked `wait`, and the caller that pushes by work holds the request for that target (see `lb.core.lanes`) instead
of sending it somewhere. Held requests count in the cost of others as far as it would go before them.

*Who goes first of those held.* What would lose most by waiting: the next turn of a conversation, or a child in a tree of
thoughts, whose prefix is in the cache of this target alone, and will not be there for long once the cache is full. What
finds no more here than elsewhere has nothing to lose, be it a miss or the first request of a new conversation: it goes as
if it had come up to LONGEST_FOR_LOSS_S later. Thus what has been started ends first, and fewer conversations fill the
caches at a time. What has much to compute holds up others, and goes up to LONGEST_FOR_WORK_S later. Both together
are LONGEST_PUT_OFF_S, or half of the time for which a request may wait if that is less.

*Deadlines* (`policies.routing.deadlines`). A request that is due goes to the target of the lowest cost among those that are expected
to keep its deadline; if none is, the choice is `late`. For a while after such a request, others wait here as soon as a
target has HEADROOM of the shortest deadline ahead of it, instead of PUSH_AHEAD_S: what is in an engine's queue can be
overtaken by nothing.

*Why it recovers from a burst.* Pushing to any target that has room sends requests where their prompts are not, for the
holders are the ones without room. Each such miss is seconds of prefill, which leave less room at the holders of other
prompts: the overload makes the work that keeps it up, and stays when the burst is over (a metastable failure). Here
a queue makes no work. A request leaves the holder only for a target where its first byte comes sooner by more
than the prefill weighs, so what it adds is less than half of what it spares in waiting; as the wait grows
everywhere, nothing is gained by leaving, and the share of hits stays what it was. Hits go first and cost next to
nothing, so the backlog is soon one of misses, which have to be computed once in any case. It shrinks by capacity
less load at the usual share of hits, and until then each request keeps its place in a queue that it can still
leave when another target becomes better.

*Decode pressure.* The paper's objective is the first token; a policy that follows it alone piles
conversations on the target that has their common prefix. A sequence in the batch lengthens every iteration by
about what one prompt token does: with the coefficients this project collected for its engine model, 0.25 ms
and 0.58 ms per 1,000 tokens of context on an L4 against 0.55 ms a prompt token, 0.05 and 0.086 against 0.094
on an A100. So a response of D tokens next to n others is late by n x D times the prefill of one token, and by less as others
end before it. Responses end and others start all the time, so counts a little above or below the mean even out by themselves: up to
EVEN times the mean a request counts EVEN_WEIGHT, and in full only beyond that. Differences among targets that
have about as much to do are then worth no prefill. `decode_weight` 0, `prefill_weight` 1 and `copy_weight` 0 give the paper's objective.

Costs are rounded to milliseconds, which is finer than anything is known; among equals the target used longest
ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import exp, inf
from typing import ClassVar, Final, NamedTuple

from policies.routing.backlog import DEFAULT_S_PER_BYTE, FULL_KV_USAGE, USUAL_SHARE, Backlog, FleetMeans
from policies.routing.base import LONGEST_PUT_OFF_S, Choice, RequestView, TargetView
from policies.routing.consistent_hash import Sessions
from policies.routing.deadlines import APART_S, keeps
from policies.routing.prefix_policy import PrefixPolicy
from policies.routing.radix_tree import Match
from policies.routing.request_work import BYTES_PER_TOKEN, prompt_bytes, streamed
from policies.routing.response_length import ResponseLength, RunningMedian
from policies.routing.target_list import finder

__all__ = ["DEFAULT_S_PER_BYTE", "Gorgo"]

MAX_TREE_BYTES: Final = 2**24
TROUBLE_S: Final = 1.0
PREFILL_WEIGHT: Final = 2.0
COPY_WEIGHT: Final = 4.0
DECODE_WEIGHT: Final = 2.0
EVEN: Final = 1.1  # of the mean requests on a target
EVEN_WEIGHT: Final = 0.3
STAY_S: Final = 600.0
MOST_STAYS: Final = 20_000  # some 8 MiB
SESSION_BYTES: Final = 1024  # 24 ms at the paper's rate: of equal targets a session takes its own
STREAM_WEIGHT: Final = 0.1  # of the burden on a request that waits is that on one whose response is under way
PUSH_AHEAD_S: Final = 3.0
HEADROOM: Final = 0.3  # of a deadline
LEAST_AHEAD_S: Final = 0.15  # an engine that has less ahead could run dry before its next report
URGENT_FOR_S: Final = 60.0  # after a request with a deadline, room is kept for the next one
LONGEST_FOR_WORK_S: Final = 7.5  # of the time for which a request is put off
LONGEST_FOR_LOSS_S: Final = LONGEST_PUT_OFF_S - LONGEST_FOR_WORK_S
PUT_OFF_FOR_WORK: Final = 10.0  # seconds for each of prefill
SOONER_FOR_LOSS: Final = 200.0  # seconds for each of prefill that is spared
FULL_S: Final = 1.0  # where the authors' code leaves a target out: there may be no other

_TERMS: Final = (
    "rtt_s",
    "prefill_s",
    "burden_s",
    "copy_s",
    "wait_s",
    "decode_s",
    "trouble_s",
    "full_s",
    "session_s",
    "last_turn",
    "matched_bytes",
)


class Gorgo(PrefixPolicy):
    name: ClassVar[str] = "gorgo"
    waits: ClassVar[bool] = True

    def __init__(
        self,
        lengths: ResponseLength | None = None,
        decode_weight: float = DECODE_WEIGHT,
        max_tree_bytes: int = MAX_TREE_BYTES,
        prefill_weight: float = PREFILL_WEIGHT,
        copy_weight: float = COPY_WEIGHT,
    ) -> None:
        super().__init__(max_tree_bytes)
        self._burden = prefill_weight - 1.0
        self._copy = copy_weight
        self._lengths = lengths or RunningMedian()
        self._decode_bytes = decode_weight * BYTES_PER_TOKEN
        self._sessions = Sessions()
        self._stays = Stays()
        self._fleet = FleetMeans()
        self._backlogs: dict[str, Backlog] = {}
        self._unused = Backlog(self._fleet)  # of all targets that have had no request
        self._attempts: dict[str, _SentRequest] = {}
        self._queued: dict[str, _Queued] = {}
        self._headroom = Headroom()

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        _, matches = self._matches(request)
        candidates = self._candidates(targets, matches)
        home, worth = self._home(request, targets, now) if request.session else (None, 0.0)
        if home is not None and home not in candidates:
            candidates = [*candidates, home]
        scored, best = self._score(request, candidates, matches, now, home, worth)
        because, late = "response expected soonest", False
        if request.due_at:
            best, because, late = self._by_deadline(request, candidates, scored, best, now)
        row = scored[best]
        chosen = self._backlogs.get(row[0])
        if chosen is not None:
            chosen.target = candidates[best]
        wait, late_s = not self.ready(candidates[best], now, request.due_at > 0.0), 0.0
        if wait or self._queued:
            s_per_byte = self._backlogs.get(row[0], self._unused).s_per_byte
            late_s = put_off_s(row[3], (row[12] - min([other[12] for other in scored])) * s_per_byte)
        if not request.due_at:
            return Choice(row[0], because, _TERMS, tuple(scored), row[12], wait, late_s)
        return Choice(row[0], because, _TERMS, tuple(scored), row[12], wait, late_s, late, _first_s(row))

    def ready(self, target: TargetView, now: float, urgent: bool = False) -> bool:
        """Return whether what was sent to it has its first byte in less than PUSH_AHEAD_S, and few wait there for a seat.

        While requests with deadlines come, the limit is `Headroom.ahead_s`, and the next request must have a seat (`Backlog.has_seat`).
        """
        backlog = self._backlogs.get(target.id, self._unused)
        keeps_room = self._headroom.is_kept(now)
        if not backlog.sent and not target.pending:
            return not keeps_room or backlog.has_seat(target, urgent, now)
        backlog.speed(now)
        if not keeps_room:
            return backlog.wait_s(target, now) < PUSH_AHEAD_S and backlog.seats_are_ready(target)
        return backlog.wait_s(target, now) < self._headroom.ahead_s and backlog.has_seat(target, urgent, now)

    def keeps_room(self, now: float) -> bool:
        """Return whether requests with deadlines come."""
        return self._headroom.is_kept(now)

    def _home(
        self, request: RequestView, targets: Sequence[TargetView], now: float
    ) -> tuple[TargetView, float]:
        """Return the target of the request's session, and what share of the session's state may still be there."""
        stay = self._stays.of(request)
        if stay is not None:
            target = finder(targets)(stay.target_id)
            if target is not None:
                return target, exp((stay.at - now) / STAY_S)
        return next(self._sessions.path(request, targets)), 1.0

    def _by_deadline(
        self,
        request: RequestView,
        candidates: Sequence[TargetView],
        scored: list[_Row],
        best: int,
        now: float,
    ) -> tuple[int, str, bool]:
        """Return the best candidate for a request with a deadline, why, and whether it is sure to be late.

        `best` has the lowest cost of all.
        """
        left_s, tpot_s = request.due_at - now, request.tpot_s

        def kept(index: int) -> bool:
            return keeps(_first_s(scored[index]), self._token_s(candidates[index], tpot_s), left_s, tpot_s)

        if kept(best):
            return best, "response expected soonest", False
        every = range(len(scored))
        found = min(filter(kept, every), key=lambda index: scored[index][1], default=-1)
        if found >= 0:
            return found, "the best that keeps its deadline", False
        # How long it waits for a seat is a guess, and being late for a guess would make it true: only the work counts.
        soonest = min(every, key=lambda index: _first_s(scored[index]))
        if any(
            keeps(row[2] + row[3], self._token_s(target, tpot_s), left_s, tpot_s)
            for row, target in zip(scored, candidates, strict=True)
        ):
            return soonest, "first byte expected soonest", False
        return best, "no target keeps its deadline", True

    def _token_s(self, target: TargetView, tpot_s: float) -> float:
        """Return the pace of a target, as far as it matters. One that is idle may have been slow, and is not any longer."""
        is_paced = tpot_s and requests_on(target)
        return self._backlogs.get(target.id, self._unused).token_s if is_paced else 0.0

    def queued(self, request: RequestView, choice: Choice, now: float) -> None:
        before = self._queued.get(request.id)
        since = now if before is None else before.since
        self.dequeued(request)
        backlog = self._backlog(choice.target_id)
        place = since + choice.put_off_s
        if request.due_at:
            place = since + APART_S if choice.late or now >= request.due_at else request.due_at - APART_S
            self._headroom.seen(request.ttft_s, now)
        residual = prompt_bytes(request) - choice.matched_bytes
        backlog.held.join(place, residual)
        self._queued[request.id] = _Queued(backlog, place, residual, since)

    def dequeued(self, request: RequestView) -> None:
        held = self._queued.pop(request.id, None)
        if held is not None:
            held.backlog.held.leave(held.place, held.residual)

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self._leave(request.id, now)
        backlog = self._backlog(target_id)
        _, matches = self._matches(request)
        residual = prompt_bytes(request) - matches.get(target_id, 0)
        if request.due_at:
            self._headroom.seen(request.ttft_s, now)
        super().record(request, target_id, now)
        fleet = self._fleet
        fleet.usual_bytes += USUAL_SHARE * (residual - fleet.usual_bytes)
        work_bytes = residual + (backlog.sent_s(now) / backlog.speed(now) if backlog.sent else 0.0)
        known_work = None if backlog.needs_seat() else work_bytes
        self._attempts[request.id] = _SentRequest(backlog, known_work, now)
        backlog.join(request.id, residual, now)

    def cached(self, request: RequestView, target_id: str, now: float) -> None:
        super().cached(request, target_id, now)
        if request.session:
            self._stays.served(request, target_id, now)

    def responded(self, request: RequestView, target_id: str, now: float) -> None:
        attempt = self._attempts.get(request.id)
        if attempt is not None and attempt.responded_at is None:
            attempt.responded_at = now
            attempt.backlog.leave(request.id, now)

    def ended(self, request: RequestView, target_id: str, now: float, tokens: int | None) -> None:
        attempt = self._leave(request.id, now)
        if tokens:
            self._lengths.learn(request, tokens)
        if (
            attempt is None
            or attempt.responded_at is None
            or not streamed(now - attempt.responded_at, tokens)
        ):
            return
        stream_s = now - attempt.responded_at
        if tokens and tokens > 1:
            attempt.backlog.paced(stream_s / (tokens - 1))
        if attempt.work_bytes is None:
            attempt.backlog.streamed(stream_s)
            return
        attempt.backlog.served(attempt.work_bytes, attempt.responded_at - attempt.since, stream_s, now)

    def forget(self, target_id: str) -> None:
        """Attempts under way keep the old backlog: their end cannot touch that of a target that returns."""
        self._backlogs.pop(target_id, None)
        self._sessions.forget(target_id)
        self._stays.forget(target_id)
        super().forget(target_id)

    def _score(
        self,
        request: RequestView,
        candidates: Sequence[TargetView],
        matches: Match,
        now: float,
        home: TargetView | None,
        worth: float,
    ) -> tuple[list[_Row], int]:
        """Return a row for each candidate, and the index of the best. `worth` is the share of the session's state at `home`.

        Most of what a choice costs is this loop, which calls nothing for a target that has neither a queue nor strangers.
        """
        size = prompt_bytes(request)
        decode_bytes = self._decode_bytes * self._lengths.predict(request)
        burden, copied = self._burden, self._copy
        own = self._queued.get(request.id)
        since = now if own is None else own.since
        match, last_turn = matches.get, self._turns.by_target.get
        any_queued = bool(self._queued)
        common = min([match(target.id, 0) for target in candidates]) if any_queued else 0
        backlog_of, unused = self._backlogs.get, self._unused
        even, longest = even_and_longest(candidates, matches)
        session_bytes = 0 if home is None else max(worth * (size - longest), SESSION_BYTES)
        scored: list[_Row] = []
        best, lowest, oldest = 0, inf, 0
        for target in candidates:
            name = target.id
            backlog = backlog_of(name, unused)
            s_per_byte = backlog.s_per_byte if now < backlog.known_until else backlog.compute_speed(now)
            matched = match(name, 0)
            prefill_s = (size - matched) * s_per_byte
            streams, waiting = target.in_flight, len(backlog.sent)
            wait_s = backlog.free_at - now
            if wait_s < backlog.least_s:
                wait_s = backlog.least_s
            if target.running is not None or target.pending is not None:
                pending = target.pending or 0
                there = pending + (target.running or 0)
                if there > streams:
                    streams = there
                if target.queued or pending > waiting or there >= backlog.busy_from:
                    wait_s = backlog.wait_s(target, now)
                    waiting = pending
            if any_queued and backlog.held.places:
                is_one = own is not None and own.backlog is backlog
                place = place_of(request, now, since, prefill_s, (matched - common) * s_per_byte)
                wait_s = backlog.wait_s(target, now, place, is_one)
                waiting += len(backlog.held.places)
            others = waiting + STREAM_WEIGHT * streams
            burden_s = burden * prefill_s * others if others > 1.0 else burden * prefill_s
            copy_s = copied * (longest - matched) * s_per_byte if longest > matched else 0.0
            pressure = streams - (1.0 - EVEN_WEIGHT) * (streams if streams < even else even)
            decode_s = pressure * decode_bytes * s_per_byte
            trouble_s = int(target.trouble + 0.5) * TROUBLE_S if target.trouble else 0.0
            full_s = FULL_S if target.kv_usage and target.kv_usage >= FULL_KV_USAGE else 0.0
            session_s = session_bytes * s_per_byte if session_bytes and target is not home else 0.0
            rtt_s, last = target.rtt_s, last_turn(name, 0)
            cost_s = (
                rtt_s + prefill_s + burden_s + copy_s + wait_s + decode_s + trouble_s + full_s + session_s
            )
            cost_s = int(cost_s * 1000.0 + 0.5) / 1000.0
            if cost_s < lowest or (cost_s == lowest and last < oldest):
                best, lowest, oldest = len(scored), cost_s, last
            scored.append(
                (name, cost_s, rtt_s, prefill_s, burden_s, copy_s, wait_s, decode_s, trouble_s, full_s, session_s,
                 last, matched)
            )  # fmt: skip
        return scored, best

    def _backlog(self, target_id: str) -> Backlog:
        backlog = self._backlogs.get(target_id)
        if backlog is None:
            backlog = self._backlogs[target_id] = Backlog(self._fleet)
        return backlog

    def _leave(self, request_id: str, now: float) -> _SentRequest | None:
        attempt = self._attempts.pop(request_id, None)
        if attempt is not None and attempt.responded_at is None:
            attempt.backlog.leave(request_id, now)
        return attempt


def _first_s(row: _Row) -> float:
    """Return seconds until the first byte."""
    return row[2] + row[3] + row[6]


def even_and_longest(candidates: Sequence[TargetView], matches: Match) -> tuple[float, int]:
    """Return EVEN times the mean of the requests on a target, and the longest match of a target that is well."""
    total = longest = 0
    match = matches.get
    for target in candidates:
        total += requests_on(target)
        matched = match(target.id, 0)
        if matched > longest and is_well(target):
            longest = matched
    return EVEN * total / len(candidates), longest


def requests_on(target: TargetView) -> int:
    """Return how many requests a target has: ours, or those that its engine reports if these are more."""
    reported = (target.running or 0) + (target.pending or 0)
    return reported if reported > target.in_flight else target.in_flight


def is_well(target: TargetView) -> bool:
    """Return whether a target has memory to spare and no recent failure: only then is its cache worth a wait."""
    return int(target.trouble + 0.5) == 0 and not (target.kv_usage and target.kv_usage >= FULL_KV_USAGE)


def put_off_s(prefill_s: float, spared_s: float) -> float:
    """Return for how long a request that is held for a target is put off: at most LONGEST_PUT_OFF_S.

    It has `prefill_s` to compute there, and is spared `spared_s` by what is in the cache of this target alone.
    """
    for_work_s = min(PUT_OFF_FOR_WORK * prefill_s, LONGEST_FOR_WORK_S)
    return for_work_s + max(0.0, LONGEST_FOR_LOSS_S - SOONER_FOR_LOSS * spared_s)


def place_of(request: RequestView, now: float, since: float, prefill_s: float, spared_s: float) -> float:
    """Return the place of a request, which has been held `since` then, among those held for a target (see `lb.core.lanes`)."""
    if request.due_at > now:
        return request.due_at - APART_S
    return since + put_off_s(prefill_s, spared_s)


# A candidate: its id and cost, then the terms of the cost.
_Row = tuple[str, float, float, float, float, float, float, float, float, float, float, int, int]


class Stay(NamedTuple):
    """Where a session was served last, and when."""

    target_id: str
    at: float


class Stays:
    """The last target of each session; beyond MOST_STAYS those are forgotten that came longest ago."""

    __slots__ = ("_stays",)

    def __init__(self) -> None:
        self._stays: OrderedDict[tuple[str, str], Stay] = OrderedDict()

    def served(self, request: RequestView, target_id: str, now: float) -> None:
        key = request.scope, request.session
        self._stays[key] = Stay(target_id, now)
        self._stays.move_to_end(key)
        if len(self._stays) > MOST_STAYS:
            self._stays.popitem(last=False)

    def forget(self, target_id: str) -> None:
        """Forget the sessions of a target that has left: it may come back with an empty cache."""
        self._stays = OrderedDict(
            (key, stay) for key, stay in self._stays.items() if stay.target_id != target_id
        )

    def of(self, request: RequestView) -> Stay | None:
        """Return the last target of the request's session; None if it is not known."""
        return self._stays.get((request.scope, request.session))


class Headroom:
    """How much may be ahead of a target, so that a request with the shortest of the recent deadlines can keep it."""

    __slots__ = ("_shortest_s", "_until")

    def __init__(self) -> None:
        self._shortest_s = inf
        self._until = -inf

    def seen(self, allowed_s: float, now: float) -> None:
        """Note that a request came whose deadline is `allowed_s` after its arrival."""
        if now >= self._until or allowed_s <= self._shortest_s:
            self._shortest_s = allowed_s
            self._until = now + URGENT_FOR_S

    def is_kept(self, now: float) -> bool:
        """Return whether a request with a deadline came lately."""
        return now < self._until

    @property
    def ahead_s(self) -> float:
        """How many seconds of work may be ahead of a target that is given one more request without a deadline."""
        return min(PUSH_AHEAD_S, max(LEAST_AHEAD_S, HEADROOM * self._shortest_s))


class _Queued(NamedTuple):
    """One request that is held for the target of `backlog`. `since` is when it was held for the first time."""

    backlog: Backlog
    place: float
    residual: int
    since: float


class _SentRequest:
    """One request on its way: `work_bytes` stood between it and its first byte when it was sent.

    None if it may have waited for a seat in the batch as well.
    """

    __slots__ = ("backlog", "responded_at", "since", "work_bytes")

    def __init__(self, backlog: Backlog, work_bytes: float | None, since: float) -> None:
        self.backlog = backlog
        self.work_bytes = work_bytes
        self.since = since
        self.responded_at: float | None = None
