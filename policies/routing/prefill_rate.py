"""How many seconds one byte of prompt costs a target, learned from its own responses.

The time to the first byte is a line: a constant (network, tokenizer, a step of decoding) plus the slope times
the bytes that had to be computed first, those queued ahead included. GORGO (table 1) fits it by hand with R2
= 0.986. Here the fit is a weighted least squares, updated with each response in constant time:

- *Forgetting.* Each response makes all former ones count 1 % less.
- *Shrinking.* A prior slope counts as much as four prompts spread by 2 KiB. Where prompts are all of a size
  their time is no evidence about the slope, and the prior stays; no threshold decides when to believe the fit.
- *Doubt.* Where a prior is as good as its own fleet, a slope is moved towards it by some standard errors and
  equals it if it is within. Equal targets are thus thought equal: noise taken for speed sends work to the
  lucky ones.
- *Ageing.* What was learned counts half after a minute without news, a tenth after three. A target that was
  slow once is thus tried again; otherwise it would never get the request that could show its recovery.
- *Outliers.* The first eight responses begin the fit together, pulled in to a Theil-Sen line (the median of the
  slopes between all pairs, which two wild ones of eight cannot move far): an engine's first response often pays
  for its compilation. After that a response further from the line than four typical deviations is counted at
  that distance (Huber's rule). The typical deviation grows by what it sees, so a lasting change is believed
  after a few dozen responses.
"""

from __future__ import annotations

from itertools import combinations
from math import sqrt
from statistics import median
from typing import NamedTuple

FORGETTING = 0.99
FADING_S = 60.0
FIRST = 8
OUTLIER = 4.0
DEVIATION_SHARE = 0.1  # of the newest response in the typical deviation
LEAST_DEVIATION_S = 0.001
PRIOR_WEIGHT = 4 * 2048.0**2  # bytes squared
LEAST_SHARE = 0.02  # of the prior: no fit makes prompts free


class _FirstByte(NamedTuple):
    work_bytes: float
    first_byte_s: float


class PrefillRate:
    """One line.

    Nothing is believed of it before it has FIRST responses, and of its slope only how far it is beyond `doubt` standard
    errors from the prior.
    """

    __slots__ = (
        "_deviation",
        "_doubt",
        "_first",
        "_mean_s",
        "_mean_work",
        "_seen_at",
        "_weight",
        "_work_s",
        "_work_work",
    )

    def __init__(self, doubt: float = 0.0) -> None:
        self._doubt = doubt
        self._first: list[_FirstByte] = []
        self._weight = 0.0
        self._mean_work = 0.0
        self._mean_s = 0.0
        self._work_work = 0.0  # centred sums of squares and of products
        self._work_s = 0.0
        self._deviation = 0.0
        self._seen_at = 0.0

    def s_per_byte(self, prior: float, now: float) -> float:
        """Return seconds per byte, always positive; `prior` is the belief without news from here."""
        if not self._weight:
            return prior
        age = (now - self._seen_at) / FADING_S
        return self._slope(prior, 1.0 / (1.0 + age * age))

    def learn(self, work_bytes: float, first_byte_s: float, prior: float, now: float) -> None:
        """A response began `first_byte_s` after it was sent, with `work_bytes` to compute before."""
        self._seen_at = now
        if self._weight:
            expected = self._mean_s + self._slope(prior, 1.0) * (work_bytes - self._mean_work)
            self._add(work_bytes, self._pulled_in(first_byte_s, expected))
            return
        self._first.append(_FirstByte(work_bytes, first_byte_s))
        if len(self._first) == FIRST:
            self._begin(prior)

    def _slope(self, prior: float, trust: float) -> float:
        evidence = trust * self._work_work + PRIOR_WEIGHT
        off = trust * (self._work_s - prior * self._work_work) / evidence
        doubt = self._doubt * self._deviation / sqrt(evidence)
        if -doubt <= off <= doubt:
            return prior
        slope = prior + off - (doubt if off > 0.0 else -doubt)
        least = LEAST_SHARE * prior
        return slope if slope > least else least

    def _begin(self, prior: float) -> None:
        slopes = [
            (one.first_byte_s - other.first_byte_s) / (one.work_bytes - other.work_bytes)
            for one, other in combinations(self._first, 2)
            if one.work_bytes != other.work_bytes
        ]
        slope = median(slopes) if slopes else prior
        constant_s = median(one.first_byte_s - slope * one.work_bytes for one in self._first)
        lines = [constant_s + slope * one.work_bytes for one in self._first]
        self._deviation = median(
            abs(one.first_byte_s - line) for one, line in zip(self._first, lines, strict=True)
        )
        for one, line in zip(self._first, lines, strict=True):
            self._add(one.work_bytes, self._pulled_in(one.first_byte_s, line))
        self._first.clear()

    def _pulled_in(self, first_byte_s: float, expected_s: float) -> float:
        """Return the time, no further from what was expected than belief allows; the deviation learns from it."""
        reach = OUTLIER * max(self._deviation, LEAST_DEVIATION_S)
        off = max(-reach, min(reach, first_byte_s - expected_s))
        self._deviation += DEVIATION_SHARE * (abs(off) - self._deviation)
        return expected_s + off

    def _add(self, work: float, seconds: float) -> None:
        self._weight = FORGETTING * self._weight + 1.0
        work_off = work - self._mean_work
        self._mean_work += work_off / self._weight
        self._mean_s += (seconds - self._mean_s) / self._weight
        self._work_work = FORGETTING * self._work_work + work_off * (work - self._mean_work)
        self._work_s = FORGETTING * self._work_s + work_off * (seconds - self._mean_s)
