"""How long requests of a simulated market take: they wait in the order in which they came, and an engine's profile says the rest.

The queue is that of `slo_queue`: a replica serves at most `MOST` times its capacity, and requests of a step come at an even pace.
With `r` requests per second and replica, of `p` prompt and `d` response tokens, Little's law gives the sequences of a batch, and the
formula of `engine.profiles` the time of an iteration that carries them and the prompts which come meanwhile:

    t = t0 / (1 - r (a p + d (b + c (p + d / 2))))         at most that of a full batch
    TTFT = wait + base + t + a p,        end to end = TTFT + (d - 1) t

All requests of a step have the same length, its mean, so percentiles are those of load and waiting. Requests of a replica that is lost
are not served again. What still waits at the end counts with its wait until then.

With a timeout, a request fails whose response would not be complete that long after it came. It waits until what is left is less than
its service takes on a fully loaded replica, and then takes nothing of a replica, so no work is lost on requests that fail. Failed
requests are counted apart: percentiles are those of the others.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from skyserve_cli.account.runs import Percentiles
from skyserve_cli.engine.profiles import Profile
from skyserve_cli.sim.slo_queue import MOST

LOADED = 0.7  # of an engine's time, at its capacity
_BIN = 1.01  # from one bin of seconds to the next
_PARTS = 4  # of requests that wait, each with its own wait; and of a step, which time out one by one


class Tokens(NamedTuple):
    """Of a request: its prompt and its response."""

    prompt: float
    response: float


class EngineTimes(NamedTuple):
    """What an engine needs of time for requests of a kind, in seconds."""

    profile: Profile
    tokens: Tokens

    @property
    def request_s(self) -> float:
        """The engine's time that a request takes from others."""
        profile, (prompt, response) = self.profile, self.tokens
        per_token = profile.per_sequence.value + profile.per_context.value * self._context / 1000.0
        return (profile.prefill.value * prompt + per_token * response) / 1000.0

    @property
    def _context(self) -> float:
        return self.tokens.prompt + self.tokens.response / 2.0

    @property
    def _most_sequences(self) -> float:
        room = self.profile.kv_capacity.value / max(1.0, self._context)
        return max(1.0, min(self.profile.max_num_seqs.value, room))

    def iteration_s(self, rate: float) -> float:
        """Return how long an iteration takes at `rate` requests per second."""
        load, most = rate * self.request_s, self._most_sequences
        chunk = round(self.profile.max_batched_tokens.value)
        full_s = self.profile.iteration_s(chunk, round(most), round(most * self._context))
        return min(full_s, self.profile.iteration_s(0, 0, 0) / (1.0 - load)) if load < 1.0 else full_s

    def capacity_qps(self) -> float:
        """Return the rate that takes `LOADED` of its time, or fills its batch at `MOST` times as much."""
        loaded, most = LOADED / self.request_s, self._most_sequences
        t0_s = self.profile.iteration_s(0, 0, 0)
        # n = r d t0 / (1 - r s) sequences run at a rate r.
        full = most / (self.tokens.response * t0_s + most * self.request_s)
        return min(loaded, full / MOST)

    def served(self, rate: float) -> tuple[float, float]:
        """Return the time to the first token, and to the last, of a request that does not wait."""
        each_s = self.iteration_s(rate)
        first_s = self.profile.base_s + each_s + self.profile.prefill.value * self.tokens.prompt / 1000.0
        return first_s, first_s + max(0.0, self.tokens.response - 1.0) * each_s


class _Cohort(NamedTuple):
    """Requests that came at an even pace from `start_s` to `end_s`, and their work."""

    start_s: float
    end_s: float
    requests: float
    work: float
    tokens: Tokens
    longest_s: float = math.inf  # that one waits

    def part(self, start: float, end: float) -> _Cohort:
        """Return what came between two shares of its time."""
        length_s, share = self.end_s - self.start_s, end - start
        times = self.start_s + start * length_s, self.start_s + end * length_s
        return _Cohort(*times, self.requests * share, self.work * share, self.tokens, self.longest_s)


@dataclass(slots=True)
class Latencies:
    """The requests of one run, in replicas that carry `capacity_qps` each; those that take longer than `timeout_s` fail."""

    profile: Profile
    capacity_qps: float
    timeout_s: float = math.inf
    failed: float = 0.0
    _waiting: deque[_Cohort] = field(default_factory=deque)  # oldest first
    _first: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _total: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def step(
        self, at_s: float, length_s: float, ready: int, requests: int, work: float, tokens: Tokens
    ) -> None:
        """Add the requests of a step that begins at `at_s`, and serve what `ready` replicas can."""
        ends_at = at_s + length_s
        if requests:
            self._add(_Cohort(at_s, ends_at, requests, work, tokens))
        if ready > 0:
            done = self._serve(at_s, ends_at, MOST * self.capacity_qps * ready)
            served = sum(cohort.requests for cohort, _, _ in done)
            for cohort, first_s, last_s in done:
                self._count(cohort, first_s, last_s, served / length_s / ready)
        while self._waiting and ends_at - self._waiting[0].start_s > self._waiting[0].longest_s:
            self.failed += self._waiting.popleft().requests

    @property
    def waiting(self) -> float:
        """The work that waits."""
        return sum(cohort.work for cohort in self._waiting)

    def _add(self, cohort: _Cohort) -> None:
        if self.timeout_s == math.inf:
            self._waiting.append(cohort)
            return
        rate = MOST * self.capacity_qps * cohort.requests / cohort.work if cohort.work else 0.0
        _, total_s = EngineTimes(self.profile, cohort.tokens).served(rate)
        cohort = cohort._replace(longest_s=max(0.0, self.timeout_s - total_s))
        self._waiting.extend(cohort.part(part / _PARTS, (part + 1) / _PARTS) for part in range(_PARTS))

    def _serve(self, free_at: float, ends_at: float, pace: float) -> list[tuple[_Cohort, float, float]]:
        """Return what is served at `pace` from `free_at` on, each with the wait of its first and of its last request."""
        done = []
        while self._waiting and free_at < ends_at:
            cohort = self._waiting.popleft()
            begins_at = max(free_at, cohort.start_s)
            if begins_at - cohort.start_s > cohort.longest_s:
                self.failed += cohort.requests
                continue
            took_s = cohort.work / pace
            share = min(1.0, (ends_at - begins_at) / took_s) if took_s else 1.0
            now = cohort.part(0.0, share)
            free_at = begins_at + share * took_s
            done.append((now, begins_at - now.start_s, max(0.0, free_at - now.end_s)))
            if share < 1.0:
                self._waiting.appendleft(cohort.part(share, 1.0))
                break
        return done

    def _count(self, cohort: _Cohort, first_s: float, last_s: float, rate: float) -> None:
        first_token_s, total_s = EngineTimes(self.profile, cohort.tokens).served(rate)
        if total_s > self.timeout_s:
            self.failed += cohort.requests
            return
        last_s = min(last_s, cohort.longest_s)
        parts = _PARTS if first_s or last_s else 1
        for part in range(parts):
            wait_s = first_s + (last_s - first_s) * (part + 0.5) / parts
            self._first[_bin(wait_s + first_token_s)] += cohort.requests / parts
            self._total[_bin(wait_s + total_s)] += cohort.requests / parts

    def percentiles(self, ends_at: float) -> tuple[Percentiles, Percentiles] | None:
        """Return those of the time to the first token, and to the last; None without a request that did not fail."""
        while self._waiting:
            cohort = self._waiting.popleft()
            self._count(cohort, ends_at - cohort.start_s, max(0.0, ends_at - cohort.end_s), 0.0)
        return (_percentiles(self._first), _percentiles(self._total)) if self._first else None


def _bin(seconds: float) -> int:
    return math.ceil(math.log(max(seconds, 1e-3)) / math.log(_BIN))


def _percentiles(bins: defaultdict[int, float]) -> Percentiles:
    total, found, seen = sum(bins.values()), [], 0.0
    ordered = iter(sorted(bins.items()))
    number = 0
    for share in (0.5, 0.9, 0.99):
        while seen < share * total - 1e-9:
            number, count = next(ordered)
            seen += count
        found.append(_BIN**number)
    return Percentiles(*found)
