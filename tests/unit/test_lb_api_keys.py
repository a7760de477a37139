"""API keys and their limits, in time that is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.config.options import Access, ApiKey
from lb.core.api_keys import ANONYMOUS, Admission, ApiKeyStore, Unauthorized
from lb.core.quota import Limited
from tests.kit.api_keys import api_key


def key(secret: str, name: str = "", **limits: float) -> ApiKey:
    return api_key(name or secret, secret, **limits)


def ring(*keys: ApiKey) -> ApiKeyStore:
    return ApiKeyStore(Access(keys), 0.0)


def bearer(secret: str) -> bytes:
    return f"Bearer {secret}".encode()


def enter(keyring: ApiKeyStore, header: bytes | None, now: float) -> Admission | Unauthorized | Limited:
    """A request comes with this header."""
    return keyring.admit_head(() if header is None else ((b"authorization", header),), now)


def admit(
    keyring: ApiKeyStore, header: bytes | None, now: float, tokens: int = 0
) -> tuple[str, float] | Unauthorized | Limited:
    """A request that ends at once, having used that many tokens: its tenant and the weight of it, or why it was refused."""
    admission = enter(keyring, header, now)
    if not isinstance(admission, Admission):
        return admission
    assert keyring.reserve(admission, "", 0, 0, now) is None
    keyring.settle(admission, 0, tokens, now)
    return admission.tenant, admission.weight


def is_let_in(keyring: ApiKeyStore, secret: str, now: float) -> bool:
    return not isinstance(admit(keyring, bearer(secret), now), (Unauthorized, Limited))


def allowed(keyring: ApiKeyStore, secret: str, now: float, tries: int = 10_000) -> int:
    """How many requests in a row are let in."""
    for count in range(tries):
        if not is_let_in(keyring, secret, now):
            return count
    return tries


@pytest.mark.parametrize("header", [None, b"", b"Bearer anything", b"Basic eDp5"])
def test_without_keys_everybody_is_the_anonymous_tenant(header: bytes | None) -> None:
    keyring = ring()
    assert admit(keyring, header, 0.0) == (ANONYMOUS, 1.0)


VERDICTS = {
    "the key": (b"Bearer alice", ("alice", 1.0)),
    "another's key": (b"Bearer bob", ("bob", 3.0)),
    "scheme in lower case": (b"bearer alice", ("alice", 1.0)),
    "more than one space": (b"Bearer   alice ", ("alice", 1.0)),
    "no header": (None, Unauthorized(False)),
    "empty header": (b"", Unauthorized(True)),
    "unknown key": (b"Bearer carol", Unauthorized(True)),
    "part of a key": (b"Bearer alic", Unauthorized(True)),
    "longer than a key": (b"Bearer alicea", Unauthorized(True)),
    "key without scheme": (b"alice", Unauthorized(True)),
    "other scheme": (b"Basic alice", Unauthorized(True)),
    "the digest itself": (b"Bearer " + key("alice").sha256.encode(), Unauthorized(True)),
    "not ascii": ("Bearer ällice".encode("latin-1"), Unauthorized(True)),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_who_may_come_in(case: str) -> None:
    header, verdict = VERDICTS[case]
    keyring = ring(key("alice"), key("bob", weight=3.0))
    assert admit(keyring, header, 0.0) == verdict


def test_a_minutes_worth_at_once_then_evenly() -> None:
    keyring = ring(key("alice", requests_per_minute=60))
    assert allowed(keyring, "alice", 0.0) == 60
    assert admit(keyring, bearer("alice"), 0.25) == Limited("alice", "requests", 60, 0.75)
    assert allowed(keyring, "alice", 10.0) == 10
    assert allowed(keyring, "alice", 3600.0) == 60, "no more than a minute's worth is saved up"


def test_less_than_one_a_minute_lets_one_in_now_and_then() -> None:
    keyring = ring(key("alice", requests_per_minute=0.5))
    assert [allowed(keyring, "alice", now) for now in (0.0, 60.0, 121.0)] == [1, 0, 1]


def test_what_is_said_to_wait_is_enough() -> None:
    keyring = ring(key("alice", requests_per_minute=7))
    allowed(keyring, "alice", 0.0)
    verdict = admit(keyring, bearer("alice"), 3.0)
    assert isinstance(verdict, Limited)
    assert isinstance(admit(keyring, bearer("alice"), 3.0 + verdict.retry_after_s * 0.99), Limited)
    assert is_let_in(keyring, "alice", 3.0 + verdict.retry_after_s * 1.01)


def test_tokens_are_charged_afterwards_and_debts_are_paid_by_waiting() -> None:
    keyring = ring(key("alice", tokens_per_minute=600))
    assert allowed(keyring, "alice", 0.0, tries=5) == 5
    admit(keyring, bearer("alice"), 0.0, tokens=1200)  # 600 more than there were
    verdict = admit(keyring, bearer("alice"), 0.0)
    assert isinstance(verdict, Limited)
    assert (verdict.what, verdict.limit) == ("tokens", 600)
    assert verdict.retry_after_s == pytest.approx(60.1)
    assert is_let_in(keyring, "alice", 60.2)


def test_a_request_refused_for_tokens_is_not_charged_as_a_request() -> None:
    keyring = ring(key("alice", requests_per_minute=3, tokens_per_minute=60))
    admit(keyring, bearer("alice"), 0.0, tokens=60)
    assert [admit(keyring, bearer("alice"), 0.0).__class__ for _ in range(5)] == [Limited] * 5
    assert allowed(keyring, "alice", 1.0) == 2


def test_one_tenants_limits_are_nobody_elses() -> None:
    keyring = ring(key("alice", requests_per_minute=1), key("bob", requests_per_minute=1))
    assert allowed(keyring, "alice", 0.0) == 1
    assert allowed(keyring, "bob", 0.0) == 1


def test_the_tokens_of_one_who_has_left_are_nobodys() -> None:
    alice = key("alice", tokens_per_minute=1)
    keyring = ring(alice, key("mallory", tokens_per_minute=1))
    admission = enter(keyring, bearer("mallory"), 0.0)
    assert isinstance(admission, Admission)
    keyring.apply(Access((alice,)), 0.0)
    keyring.settle(admission, 0, 1000, 0.0)
    assert is_let_in(keyring, "alice", 0.0)


PUSHES = {
    "the same": (60, 60, 0),
    "more": (60, 600, 0),
    "less": (60, 6, 0),
    "none now": (60, 0, 10_000),
    "one where none was": (0, 30, 30),
}


@pytest.mark.parametrize("case", PUSHES)
def test_a_push_keeps_the_levels(case: str) -> None:
    before, after, then = PUSHES[case]
    keyring = ring(key("alice", requests_per_minute=before))
    allowed(keyring, "alice", 0.0)
    keyring.apply(Access((key("alice", requests_per_minute=after),)), 0.0)
    assert allowed(keyring, "alice", 0.0) == then


def test_a_push_that_lowers_a_limit_takes_away_what_was_saved_up() -> None:
    keyring = ring(key("alice", requests_per_minute=600))
    keyring.apply(Access((key("alice", requests_per_minute=6),)), 0.0)
    assert allowed(keyring, "alice", 0.0) == 6


def test_an_old_key_and_its_successor_share_the_limits_of_the_last() -> None:
    keyring = ring(
        key("old", "alice", requests_per_minute=100), key("new", "alice", requests_per_minute=4, weight=2.0)
    )
    assert admit(keyring, bearer("old"), 0.0) == ("alice", 2.0)
    assert allowed(keyring, "new", 0.0) == 3
    keyring.apply(Access((key("new", "alice", requests_per_minute=4),)), 0.0)
    assert admit(keyring, bearer("old"), 0.0) == Unauthorized(True)
    assert allowed(keyring, "new", 15.0) == 1


def test_taking_the_last_key_away_opens_the_door_and_closing_it_again_starts_anew() -> None:
    keyring = ring(key("alice", requests_per_minute=1))
    keyring.apply(Access(()), 0.0)
    assert admit(keyring, None, 0.0) == (ANONYMOUS, 1.0)
    keyring.apply(Access((key("alice", requests_per_minute=1),)), 0.0)
    assert admit(keyring, None, 0.0) == Unauthorized(False)


def test_usage_tells_what_was_used_and_what_is_left() -> None:
    keyring = ring(key("alice", requests_per_minute=2, tokens_per_minute=100), key("bob"))
    for _ in range(3):
        admit(keyring, bearer("alice"), 0.0, tokens=15)
    admit(keyring, bearer("bob"), 0.0, tokens=5)
    found = [
        (one.tenant, one.admitted, one.limited, one.tokens, one.requests_left, one.tokens_left)
        for one in keyring.usage(0.0)
    ]
    assert found == [("alice", 2, 1, 30, 0.0, 70.0), ("bob", 1, 0, 5, None, None)]


@given(
    per_minute=st.floats(0.5, 1000.0),
    gaps_s=st.lists(st.floats(0.0, 120.0), min_size=1, max_size=80),
)
def test_over_any_time_nobody_gets_more_than_the_rate_and_one_minutes_worth(
    per_minute: float, gaps_s: list[float]
) -> None:
    keyring = ring(key("alice", requests_per_minute=per_minute))
    now, let_in = 0.0, 0
    for gap_s in gaps_s:
        now += gap_s
        let_in += is_let_in(keyring, "alice", now)
        assert let_in <= max(1.0, per_minute) + per_minute * now / 60.0 + 1e-6
