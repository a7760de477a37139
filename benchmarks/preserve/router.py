"""PreServe's router: the target with the least load in tokens, with the memory it will need counted.

    cost = prefill     prompt tokens sent to the target whose responses have not started, and this prompt's
         + decode      response tokens its requests have still to write, and this one's
         + overflow    tokens by which its KV cache will pass 80 % within three seconds, with this request
         + failures    1,000 tokens for each recent one

How long responses will be is guessed by a `ResponseLength`; what the cache will hold is read off a look-ahead
map per target, to which the request is added for the sake of the question only. Prefixes are ignored.

Source: PreServe, section 4.3.3, with its T_mem = 0.8 and beta = 1. Different here:

- *The guess* is learned from the requests that pass (`length_learner`), behind the port the paper's DistilBERT would
  fit. A request is compared by its typical length, and adds its mean to the load, since typical ones sum up to too little.
- *The capacity* of a cache is not known to a load balancer, so it is inferred: tokens in the map over the
  usage the engine reports, mixed with a tenth of an assumed `kv_tokens`. Reported usage also corrects the map's
  present; the map adds the growth. Where engines are silent `kv_tokens` is all there is.
- *Seconds per token* are learned per target from its responses, starting from those of the fleet.
- *Requests of other load balancers*, known from the engine's counts only, weigh like the average of our own.

Costs are rounded to whole tokens; among equals the target used longest ago. Of more than a few targets a sample is
compared (see `policies.routing.sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from random import Random
from typing import ClassVar, Protocol, runtime_checkable

from benchmarks.preserve.length_learner import LengthLearner
from benchmarks.preserve.lookahead import Expected, LookAhead
from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.request_work import BYTES_PER_TOKEN, prompt_bytes, streamed
from policies.routing.response_length import ResponseLength
from policies.routing.sampling import SamplingPolicy

IDEAL_USAGE = 0.8
KV_TOKENS = 100_000  # between an L4 (33,000) and an A100 (435,000) with an 8B model
ASSUMED_WEIGHT = 0.1  # of `kv_tokens` against a usage of 1
TROUBLE_TOKENS = 1000
FIRST_S_PER_TOKEN = 0.03
NEWEST_SHARE = 0.1  # in seconds per token and in the usual load
OUTLIER = 4.0

_TERMS = ("prefill_tokens", "decode_tokens", "overflow_tokens", "trouble_tokens", "last_turn")
_COST_THEN_TURN = itemgetter(1, 6)


@runtime_checkable
class SummedLength(Protocol):
    """Knows what typical lengths of responses add up to."""

    def mean(self, request: RequestView) -> float:
        """Return the expected tokens for a sum over requests, which a typical length would underestimate. Changes nothing."""
        ...


class PreServe(SamplingPolicy):
    name: ClassVar[str] = "preserve"
    needs_prompt: ClassVar[bool] = True  # for its length, and for whose request it is

    def __init__(
        self,
        lengths: ResponseLength | None = None,
        kv_tokens: int = KV_TOKENS,
        overflow_weight: float = 1.0,
        rng: Random | None = None,
    ) -> None:
        super().__init__(rng)
        self._lengths = lengths = lengths or LengthLearner()
        self._mean = lengths.mean if isinstance(lengths, SummedLength) else lengths.predict
        self._kv_tokens = kv_tokens
        self._overflow_weight = overflow_weight
        self._fleet_s_per_token = FIRST_S_PER_TOKEN
        self._usual_tokens = 0.0
        self._loads: dict[str, _TargetLoad] = {}
        self._attempts: dict[str, _RunningRequest] = {}

    def choose(self, request: RequestView, targets: Sequence[TargetView], now: float) -> Choice | None:
        if not targets:
            return None
        prompt_tokens = prompt_bytes(request) / BYTES_PER_TOKEN
        response_tokens = self._lengths.predict(request)
        scored = tuple(
            self._score(target, prompt_tokens, response_tokens, now) for target in self._sample(targets)
        )
        best = min(scored, key=_COST_THEN_TURN)
        return Choice(str(best[0]), "least load now and ahead", _TERMS, scored)

    def record(self, request: RequestView, target_id: str, now: float) -> None:
        self._leave(request.id, now)
        super().record(request, target_id, now)
        load = self._loads.get(target_id)
        if load is None:
            load = self._loads[target_id] = _TargetLoad(self._fleet_s_per_token)
        prompt_tokens = prompt_bytes(request) / BYTES_PER_TOKEN
        expected = Expected(prompt_tokens, self._mean(request), load.s_per_token)
        self._attempts[request.id] = _RunningRequest(load, expected, now)
        self._usual_tokens += NEWEST_SHARE * (sum(expected[:2]) - self._usual_tokens)
        load.queued_tokens += prompt_tokens
        load.ahead.advance(now)
        load.ahead.enter(request.id, expected, now)

    def responded(self, request: RequestView, target_id: str, now: float) -> None:
        attempt = self._attempts.get(request.id)
        if attempt is None or attempt.responded_at is not None:
            return
        attempt.responded_at = now
        attempt.load.queued_tokens -= attempt.expected.prompt_tokens
        attempt.load.ahead.advance(now)
        attempt.load.ahead.enter(request.id, attempt.expected, now)

    def ended(self, request: RequestView, target_id: str, now: float, tokens: int | None) -> None:
        attempt = self._leave(request.id, now)
        if not tokens:
            return
        self._lengths.learn(request, tokens)
        if attempt is None or attempt.responded_at is None:
            return
        began = attempt.responded_at if streamed(now - attempt.responded_at, tokens) else attempt.since
        s_per_token = (now - began) / tokens
        attempt.load.s_per_token = _nearer(attempt.load.s_per_token, s_per_token)
        self._fleet_s_per_token = _nearer(self._fleet_s_per_token, s_per_token)

    def forget(self, target_id: str) -> None:
        """Attempts under way keep the old load: their end cannot touch that of a target that returns."""
        self._loads.pop(target_id, None)
        super().forget(target_id)

    def _score(
        self, target: TargetView, prompt_tokens: float, response_tokens: float, now: float
    ) -> tuple[str | float, ...]:
        load = self._loads.get(target.id) or _TargetLoad(self._fleet_s_per_token)
        ahead = load.ahead
        prefill = load.queued_tokens + prompt_tokens
        decode = ahead.remaining_tokens(now) + response_tokens
        strangers = max(target.in_flight, (target.running or 0) + (target.pending or 0)) - len(ahead)
        if strangers > 0:
            decode += strangers * self._usual_tokens
        room = self._room(target.kv_usage, ahead.held_tokens(now))
        overflow = 0.0
        if prompt_tokens + ahead.max_growth(load.s_per_token) > room:
            newcomer = Expected(prompt_tokens, response_tokens, load.s_per_token)
            growth = ahead.peak_tokens(newcomer, now) - ahead.held_tokens(now)
            overflow = self._overflow_weight * max(0.0, growth - room)
        trouble = int(target.trouble + 0.5) * TROUBLE_TOKENS
        cost = round(prefill + decode + overflow + trouble)
        return target.id, cost, prefill, decode, overflow, trouble, self._turns.last(target.id)

    def _room(self, kv_usage: float | None, held_tokens: float) -> float:
        """Tokens that the cache can take before it is too full; negative if it is."""
        if kv_usage is None:
            return IDEAL_USAGE * self._kv_tokens - held_tokens
        capacity = (held_tokens + ASSUMED_WEIGHT * self._kv_tokens) / (kv_usage + ASSUMED_WEIGHT)
        return (IDEAL_USAGE - kv_usage) * capacity

    def _leave(self, request_id: str, now: float) -> _RunningRequest | None:
        attempt = self._attempts.pop(request_id, None)
        if attempt is not None:
            if attempt.responded_at is None:
                attempt.load.queued_tokens -= attempt.expected.prompt_tokens
            attempt.load.ahead.advance(now)
            attempt.load.ahead.leave(request_id)
        return attempt


class _TargetLoad:
    """Load of one target, and how fast it writes one response."""

    __slots__ = ("ahead", "queued_tokens", "s_per_token")

    def __init__(self, s_per_token: float) -> None:
        self.s_per_token = s_per_token
        self.queued_tokens = 0.0  # sums of quarters: exact
        self.ahead = LookAhead()


class _RunningRequest:
    __slots__ = ("expected", "load", "responded_at", "since")

    def __init__(self, load: _TargetLoad, expected: Expected, since: float) -> None:
        self.load = load
        self.expected = expected
        self.since = since
        self.responded_at: float | None = None


def _nearer(old: float, new: float) -> float:
    """Return the old value, moved towards the new one, which counts as an outlier from four times the old on."""
    return old + NEWEST_SHARE * (min(OUTLIER * old, max(old / OUTLIER, new)) - old)
