"""Token buckets, and who waits for them."""

from __future__ import annotations

from provisioners.rate_limit import Rate, RateLimiter, TokenBucket


def test_a_bucket_lets_a_burst_through_and_then_so_many_a_second() -> None:
    bucket = TokenBucket(Rate(burst=3, per_s=2))
    assert [bucket.take(10.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    assert bucket.take(11.0) == 0.5
    assert bucket.take(100.0) == 0.0


def test_a_drained_bucket_starts_from_nothing() -> None:
    bucket = TokenBucket(Rate(burst=3, per_s=2))
    bucket.take(10.0)
    bucket.drain()
    assert bucket.take(10.0) == 0.5


def test_a_clock_that_is_set_back_does_no_harm() -> None:
    bucket = TokenBucket(Rate(burst=1, per_s=1))
    assert bucket.take(100.0) == 0.0
    assert bucket.take(10.0) == 1.0


class Clock:
    """It stands still; `slept` is what was waited."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return 50.0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_each_group_has_a_bucket_of_its_own() -> None:
    clock = Clock()
    pacer = RateLimiter(clock.now, clock.sleep)
    for _ in range(3):
        pacer.take_turn("read", Rate(burst=1, per_s=2))
        pacer.take_turn("write", Rate(burst=3, per_s=1))
    assert clock.slept == [0.5, 1.0]


def test_a_refusal_empties_the_bucket_of_its_group_alone() -> None:
    clock = Clock()
    pacer = RateLimiter(clock.now, clock.sleep)
    for group in ("read", "write"):
        pacer.take_turn(group, Rate(burst=5, per_s=1))
    pacer.drain("read")
    pacer.drain("nobody's")
    for group in ("read", "write"):
        pacer.take_turn(group, Rate(burst=5, per_s=1))
    assert clock.slept == [1.0]
