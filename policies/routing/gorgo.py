"""GORGO for one region: the target where the response is expected soonest, in seconds, and with the least work.

    cost = network round trip
         + residual prefill    bytes of the prompt not thought to be in its cache x its seconds per byte
         + burden on others    PREFILL_WEIGHT - 1 times the same
         + queue wait          the same of requests before this one that have no first byte yet, sent or held
         + decode pressure     requests on the target x tokens expected of this answer, x seconds per token
         + failures            one second for each recent one
         + full memory         one second if the engine's KV cache is 95 % used

Source: Toniolo et al., GORGO (2026), section 3.4: network + prefill + queue, with weights set by hand.
Different here:

*Seconds per byte* are learned online (`prefill_rate`): those of the fleet start from the paper's A100 and 7B
model (0.0938 ms a token), those of a target from the fleet's, and differ from them only as far as its answers
leave no doubt.

*The queue* is what is really ahead: residual bytes, without what is cached, and without what the head of the
queue must have had computed since it became the head. A request leaves it with its first byte, and at its end
in any case. The authors' code counts whole prompts until completion, which is about what our decode pressure
is for. Requests the engine reports as pending beyond our own (those of other load balancers) count as the
usual residual.

*The burden on others.* A request that compares its own wait with its own prefill leaves the holder of its prompt as soon
as it gains by that itself. But the seconds of prefill are taken from the target: from its streams, from those who wait and
from those who have not come yet. Where prefixes carry the load (long shared documents) the fleet then does the same
work many times over. Counted twice, prefill is spared where that costs little time, and simulated fleets
have more hits, shorter waits and more tokens per second, at low load as well as at high.

*Waiting.* The best target may have enough to do. It does if the prompts that were sent to it and have no first byte will
take it PUSH_AHEAD_S or longer, which is enough for an engine never to run dry. Then the choice says `wait`, and the
caller that pushes by work holds the request for that target (see `lb.core.lanes`) instead of sending it somewhere. What
is held counts in the cost of others as far as it would go before them.

*Why it recovers from a burst.* Pushing to any target that has room sends requests where their prompts are not, for the
holders are the ones without room. Each such miss is seconds of prefill, which leave less room at the holders of other
prompts: the overload makes the work that keeps it up, and stays when the burst is over (a metastable failure). Here
a queue makes no work. A request leaves the holder only for a target where its first byte comes sooner by more
than the prefill weighs, so what it adds is less than half of what it saves in waiting; as the wait grows
everywhere, nothing is gained by leaving, and the share of hits stays what it was. Hits go first and cost next to
nothing, so the backlog is soon one of misses, which have to be computed once in any case. It shrinks by capacity
less load at the usual share of hits, and until then each request keeps its place in a queue that it can still
leave when another target becomes better.

*Decode pressure.* The paper's objective is the first token; a policy that follows it alone piles
conversations on the target that has their common prefix. A sequence in the batch lengthens every iteration by
about what one prompt token does: with the coefficients this project collected for its engine model, 0.25 ms
and 0.58 ms per 1,000 tokens of context on an L4 against 0.55 ms a prompt token, 0.05 and 0.086 against 0.094
on an A100. So an answer of D tokens next to n others is late by n x D times the prefill of one token.
`decode_weight` 0 and `prefill_weight` 1 give the paper's objective.

Costs are rounded to milliseconds, which is finer than anything is known; among equals the target used longest
ago.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import ClassVar, NamedTuple

from policies.forecast.response_length import ResponseLength, RunningMedian
from policies.routing.base import Choice, RequestView, TargetView, put_off_s
from policies.routing.prefill_rate import PrefillRate
from policies.routing.prefix_policy import PrefixPolicy
from policies.routing.work import BYTES_PER_TOKEN, prompt_bytes, streamed

DEFAULT_S_PER_BYTE = 0.0938e-3 / BYTES_PER_TOKEN
MAX_TREE_BYTES = 2**24
TROUBLE_S = 1.0
PREFILL_WEIGHT = 2.0
PUSH_AHEAD_S = 2.0
DOUBT = 3.0  # standard errors by which a target must differ from the fleet
FULL_KV_USAGE = 0.95  # from here the authors' code leaves a target out; we price it: there may be no other
FULL_S = 1.0
FIRST_USUAL_BYTES = 500 * BYTES_PER_TOKEN  # as the authors' code assumes of requests it does not know
USUAL_SHARE = 0.02  # of the newest request in the usual residual

_TERMS = (
    "rtt_s",
    "prefill_s",
    "burden_s",
    "wait_s",
    "decode_s",
    "trouble_s",
    "full_s",
    "last_turn",
    "matched_bytes",
)
_COST_THEN_TURN = itemgetter(1, 9)


class Gorgo(PrefixPolicy):
    name: ClassVar[str] = "gorgo"
    waits: ClassVar[bool] = True

    def __init__(
        self,
        lengths: ResponseLength | None = None,
        decode_weight: float = 1.0,
        max_tree_bytes: int = MAX_TREE_BYTES,
        prefill_weight: float = PREFILL_WEIGHT,
    ) -> None:
        super().__init__(max_tree_bytes)
        self._burden = prefill_weight - 1.0
        self._lengths = lengths or RunningMedian()
        self._decode_bytes = decode_weight * BYTES_PER_TOKEN
        self._fleet = PrefillRate()
        self._usual_bytes = float(FIRST_USUAL_BYTES)
        self._lines: dict[str, _Line] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._held: dict[str, _Held] = {}

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        _, matches = self._matches(request)
        size = prompt_bytes(request)
        decode_bytes = self._decode_bytes * self._lengths.predict(request)
        fleet = self._fleet.s_per_byte(DEFAULT_S_PER_BYTE, now)
        candidates = self._candidates(targets, matches)
        scored = tuple(
            self._score(target, size, matches.get(target.id, 0), decode_bytes, fleet, now, request.id)
            for target in candidates
        )
        best = min(scored, key=_COST_THEN_TURN)
        target_id, prefill_s = best[0], float(best[3])
        view = next(target for target in candidates if target.id == target_id)
        return Choice(
            str(target_id),
            "answer expected soonest",
            _TERMS,
            scored,
            matches.get(str(target_id), 0),
            wait=not self.ready(view, now),
            work_s=prefill_s,
        )

    def ready(self, target: TargetView, now: float) -> bool:
        """Whether it has less than PUSH_AHEAD_S of prefill before it."""
        line = self._lines.get(target.id)
        if line is None and not target.pending:
            return True
        line = line or _Line()
        s_per_byte = line.rate.s_per_byte(self._fleet_s_per_byte(now), now)
        return self._ahead_bytes(target, line, s_per_byte, now) * s_per_byte < PUSH_AHEAD_S

    def held(self, request: RequestView, choice: Choice, now: float) -> None:
        before = self._held.get(request.id)
        since = now if before is None else before.since
        self.left(request)
        line = self._lines.get(choice.target_id)
        if line is None:
            line = self._lines[choice.target_id] = _Line()
        place = since + put_off_s(choice.work_s)
        line.held.join(place, prompt_bytes(request) - choice.matched_bytes)
        self._held[request.id] = _Held(line, place, prompt_bytes(request) - choice.matched_bytes, since)

    def left(self, request: RequestView) -> None:
        held = self._held.pop(request.id, None)
        if held is not None:
            held.line.held.leave(held.place, held.residual)

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self._leave(request.id, now)
        line = self._lines.get(target_id)
        if line is None:
            line = self._lines[target_id] = _Line()
        _, matches = self._matches(request)
        residual = prompt_bytes(request) - matches.get(target_id, 0)
        super().record(request, target_id, now)
        self._usual_bytes += USUAL_SHARE * (residual - self._usual_bytes)
        s_per_byte = line.rate.s_per_byte(self._fleet_s_per_byte(now), now)
        self._attempts[request.id] = _Attempt(line, line.ahead_bytes(s_per_byte, now) + residual, now)
        line.join(request.id, residual, now)

    def answered(self, request: RequestView, target_id: str, now: float) -> None:
        attempt = self._attempts.get(request.id)
        if attempt is not None and attempt.answered_at is None:
            attempt.answered_at = now
            attempt.line.leave(request.id, now)

    def ended(self, request: RequestView, target_id: str, now: float, tokens: int | None) -> None:
        attempt = self._leave(request.id, now)
        if tokens:
            self._lengths.learn(request, tokens)
        if attempt is None or attempt.answered_at is None or not streamed(now - attempt.answered_at, tokens):
            return
        first_byte_s = attempt.answered_at - attempt.since
        attempt.line.rate.learn(attempt.work_bytes, first_byte_s, self._fleet_s_per_byte(now), now)
        self._fleet.learn(attempt.work_bytes, first_byte_s, DEFAULT_S_PER_BYTE, now)

    def forget(self, target_id: str) -> None:
        """Attempts under way keep the old line: their end cannot touch that of a target that returns."""
        self._lines.pop(target_id, None)
        super().forget(target_id)

    def _score(
        self,
        target: TargetView,
        size: int,
        matched: int,
        decode_bytes: float,
        fleet_s_per_byte: float,
        now: float,
        request_id: str,
    ) -> tuple[str | float, ...]:
        line = self._lines.get(target.id) or _Line()
        s_per_byte = line.rate.s_per_byte(fleet_s_per_byte, now)
        ahead_bytes = self._ahead_bytes(target, line, s_per_byte, now)
        if self._held:
            own = self._held.get(request_id)
            since = now if own is None else own.since
            place = since + put_off_s((size - matched) * s_per_byte)
            ahead_bytes += line.held.before(place, own is not None and own.line is line)
        pending = target.pending or 0
        streams = max(target.in_flight, (target.running or 0) + pending)
        rtt_s = target.rtt_s
        prefill_s = (size - matched) * s_per_byte
        wait_s = ahead_bytes * s_per_byte
        decode_s = streams * decode_bytes * s_per_byte
        trouble_s = int(target.trouble + 0.5) * TROUBLE_S
        full_s = FULL_S if (target.kv_usage or 0.0) >= FULL_KV_USAGE else 0.0
        burden_s = self._burden * prefill_s
        cost = round(rtt_s + prefill_s + burden_s + wait_s + decode_s + trouble_s + full_s, 3)
        last = self._turns.last(target.id)
        return target.id, cost, rtt_s, prefill_s, burden_s, wait_s, decode_s, trouble_s, full_s, last, matched

    def _ahead_bytes(self, target: TargetView, line: _Line, s_per_byte: float, now: float) -> float:
        """What has been sent to the target and has no first byte yet, by us and by others."""
        ahead_bytes = line.ahead_bytes(s_per_byte, now)
        strangers = (target.pending or 0) - line.waiting
        return ahead_bytes + strangers * self._usual_bytes if strangers > 0 else ahead_bytes

    def _fleet_s_per_byte(self, now: float) -> float:
        return self._fleet.s_per_byte(DEFAULT_S_PER_BYTE, now)

    def _leave(self, request_id: str, now: float) -> _Attempt | None:
        attempt = self._attempts.pop(request_id, None)
        if attempt is not None and attempt.answered_at is None:
            attempt.line.leave(request_id, now)
        return attempt


class _Line:
    """Prompts on one target whose answers have not begun, oldest first, and how fast it works them off."""

    __slots__ = ("_bytes", "_head_since", "_residuals", "held", "rate")

    def __init__(self) -> None:
        self.rate = PrefillRate(DOUBT)
        self._residuals: dict[str, int] = {}
        self._bytes = 0
        self._head_since = 0.0
        self.held = _HeldBytes()

    @property
    def waiting(self) -> int:
        return len(self._residuals)

    def join(self, request_id: str, residual: int, now: float) -> None:
        if not self._residuals:
            self._head_since = now
        self._residuals[request_id] = residual
        self._bytes += residual

    def leave(self, request_id: str, now: float) -> None:
        if request_id == next(iter(self._residuals)):
            self._head_since = now
        self._bytes -= self._residuals.pop(request_id)

    def ahead_bytes(self, s_per_byte: float, now: float) -> float:
        """What a newcomer waits for: all, without what the head has had computed since its turn came."""
        if not self._residuals:
            return 0.0
        head = next(iter(self._residuals.values()))
        return self._bytes - min(head, max(0.0, now - self._head_since) / s_per_byte)


class _HeldBytes:
    """Residual bytes of the requests that are held for one target, in the order of their places."""

    __slots__ = ("_bytes", "_places")

    def __init__(self) -> None:
        self._places: list[float] = []
        self._bytes: list[int] = []

    def join(self, place: float, residual: int) -> None:
        index = bisect_right(self._places, place)
        self._places.insert(index, place)
        self._bytes.insert(index, residual)

    def leave(self, place: float, residual: int) -> None:
        index = self._bytes.index(residual, bisect_left(self._places, place))
        del self._places[index], self._bytes[index]

    def before(self, place: float, is_one: bool) -> int:
        """Of those that go before a request of that place, which `is_one` of them or comes after its equals."""
        return sum(self._bytes[: (bisect_left if is_one else bisect_right)(self._places, place)])


class _Held(NamedTuple):
    """One request that is held for the target of `line`, since it was held for the first time."""

    line: _Line
    place: float
    residual: int
    since: float


class _Attempt:
    """One request on its way: `work_bytes` stood between it and its first byte when it was sent."""

    __slots__ = ("answered_at", "line", "since", "work_bytes")

    def __init__(self, line: _Line, work_bytes: float, since: float) -> None:
        self.line = line
        self.work_bytes = work_bytes
        self.since = since
        self.answered_at: float | None = None
