"""Numbers of a span of time that can be added up: to longer spans, and over replicas. Pure.

Times to first token are counts in buckets of fixed bounds, because quantiles of quantiles mean nothing. Everything else is a sum
too, so that folding six samples of 10 seconds and one of a minute give the same figures.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

#: Upper bounds of the buckets in seconds, as of `lb.observe.counters`; the last bucket has none.
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
#: The key of the service itself, beside those of replicas, which count from 1.
WHOLE = 0
#: Replicas that one stored slot has: those with the most requests.
MOST_REPLICAS = 64


class Sample(NamedTuple):
    """What happened in a span of time. `polls` are the readings of which `in_flight` and `queued` are the sums."""

    polls: float = 0
    in_flight: float = 0
    queued: float = 0
    requests: int = 0
    errors: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    prompt_bytes: int = 0
    matched_bytes: int = 0
    ttft: tuple[int, ...] = ()

    def view(self) -> dict[str, Any]:
        """Return it for readers: means, quantiles in seconds, and the hit rate; None where nothing says what it was."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "ttft_p50_s": quantile(self.ttft, 0.5),
            "ttft_p90_s": quantile(self.ttft, 0.9),
            "hit_rate": round(self.matched_bytes / self.prompt_bytes, 4) if self.prompt_bytes else None,
            "in_flight": round(self.in_flight / self.polls, 3) if self.polls else None,
            "queued": round(self.queued / self.polls, 3) if self.polls else None,
        }


#: Samples of one slot: of the service (`WHOLE`) and of replicas by id.
Slot = Mapping[int, Sample]


def added(samples: Iterable[Sample]) -> Sample:
    """Return the sample of spans one after another."""
    found = list(samples)
    *numbers, ttft = zip(*found, strict=True) if found else [(0,)] * len(Sample._fields)
    return Sample._make((*map(sum, numbers), _added_buckets([each for each in ttft if each])))


def combined(samples: Iterable[Sample]) -> Sample:
    """Return the sample of several agents of one service over the same span: their means of `in_flight` add up."""
    found = [_mean(each) for each in samples if each.polls]
    return added(found)._replace(polls=1) if found else Sample()


def folded(slots: Iterable[Slot], most: int = MOST_REPLICAS) -> dict[int, Sample]:
    """Return the slot of several shorter ones, with the `most` replicas that had the most requests."""
    groups: dict[int, list[Sample]] = {}
    for slot in slots:
        for key, sample in slot.items():
            groups.setdefault(key, []).append(sample)
    return busiest({key: added(samples) for key, samples in groups.items()}, most)


def busiest(slot: Slot, most: int = MOST_REPLICAS) -> dict[int, Sample]:
    """Return the service itself and the `most` replicas that had the most requests."""
    order = sorted(slot, key=lambda key: (key != WHOLE, -slot[key].requests, key))
    return {key: slot[key] for key in sorted(order[: most + 1])}


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return a quantile in seconds, as Prometheus' `histogram_quantile` estimates it.

    Within a bucket values are taken to be evenly spread; beyond the last bound nothing is known but that bound. None without
    observations.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for index, count in enumerate(counts[: len(BOUNDS_S)]):
        if count and below + count >= rank:
            lower = BOUNDS_S[index - 1] if index else 0.0
            return round(lower + (BOUNDS_S[index] - lower) * (rank - below) / count, 6)
        below += count
    return BOUNDS_S[-1]


def packed(slot: Slot) -> bytes:
    """Return a slot for the database."""
    return zlib.compress(orjson.dumps({str(key): list(sample) for key, sample in slot.items()}), 1)


def unpacked(content: bytes) -> dict[int, Sample]:
    """Return a slot from the database."""
    rows = orjson.loads(zlib.decompress(content))
    return {int(key): Sample._make((*numbers, tuple(ttft))) for key, (*numbers, ttft) in rows.items()}


def _mean(sample: Sample) -> Sample:
    return sample._replace(
        polls=1, in_flight=sample.in_flight / sample.polls, queued=sample.queued / sample.polls
    )


def _added_buckets(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*counts, strict=True)))
