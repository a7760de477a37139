"""The account of each request of a key: reserved at admission, settled once, whatever its ending."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lb.config.options import Access, ApiKey
from lb.core.api_keys import (
    Admission,
    AlreadySettledError,
    ApiKeyStore,
    Unauthorized,
    Usage,
)
from lb.core.quota import Limited
from lb.core.tenant import LEAST_EXPECTED
from tests.kit.api_keys import api_key


def key(name: str = "alice", **limits: float) -> ApiKey:
    return api_key(name, f"sk-{name}", **limits)


def store(**limits: float) -> ApiKeyStore:
    return ApiKeyStore(Access((key(**limits),)), 0.0)


BEARER = ((b"authorization", b"Bearer sk-alice"),)


def enter(keys: ApiKeyStore, now: float = 0.0) -> Admission:
    admission = keys.admit_head(BEARER, now)
    assert isinstance(admission, Admission)
    return admission


def account(keys: ApiKeyStore, now: float = 0.0) -> Usage:
    (usage,) = keys.usage(now)
    return usage


# --- headers


def basic(user_and_password: bytes) -> bytes:
    return b"Basic " + base64.b64encode(user_and_password)


CARRIERS = {
    "Authorization": ([(b"authorization", b"Bearer sk-alice")], (b"authorization",)),
    "x-api-key": ([(b"x-api-key", b"sk-alice")], (b"x-api-key",)),
    "api-key": ([(b"api-key", b" sk-alice ")], (b"api-key",)),
    "password of Basic": ([(b"authorization", basic(b"anyone:sk-alice"))], (b"authorization",)),
    "user of Basic": ([(b"authorization", basic(b"sk-alice:"))], (b"authorization",)),
    "user of Basic alone": ([(b"authorization", basic(b"sk-alice"))], (b"authorization",)),
    "a subprotocol": ([(b"sec-websocket-protocol", b"sk-alice")], (b"sec-websocket-protocol",)),
    "the query": ([(b"?api_key", b"sk-alice")], (b"?api_key",)),
    "the same key in two": (
        [(b"authorization", b"Bearer sk-alice"), (b"x-api-key", b"sk-alice")],
        (b"authorization", b"x-api-key"),
    ),
    "beside a key of the engine's": (
        [(b"authorization", b"Bearer engine"), (b"x-api-key", b"sk-alice")],
        (b"x-api-key",),
    ),
}


@pytest.mark.parametrize("case", CARRIERS)
def test_headers_that_carry_a_known_key_end_here(case: str) -> None:
    credentials, carried_by = CARRIERS[case]
    admission = store().admit_head(tuple(credentials), 0.0)
    assert isinstance(admission, Admission)
    assert (admission.tenant, admission.carried_by) == ("alice", carried_by)


@pytest.mark.parametrize(
    ("credentials", "given"),
    [
        ([], False),
        ([(b"x-api-key", b"sk-mallory")], True),
        ([(b"x-api-key", b"Bearer sk-alice")], True),
        ([(b"authorization", basic(b"sk-alice:other"))], True),
        ([(b"authorization", b"Basic sk-alice")], True),
        ([(b"authorization", b"Basic \xff")], True),
        ([(b"authorization", b"Digest sk-alice")], True),
    ],
    ids=[
        "no header",
        "unknown key",
        "scheme where none belongs",
        "user name beside a password",
        "Basic that is no base64",
        "Basic that is no text",
        "another scheme",
    ],
)
def test_without_a_known_key_it_is_401(credentials: list[tuple[bytes, bytes]], given: bool) -> None:
    assert store().admit_head(tuple(credentials), 0.0) == Unauthorized(given)


def test_the_first_known_key_says_whose_request_it_is() -> None:
    keys = ApiKeyStore(Access((key(), key("bob"))), 0.0)
    both = [(b"authorization", b"Bearer sk-bob"), (b"x-api-key", b"sk-alice")]
    admission = keys.admit_head(tuple(both), 0.0)
    assert isinstance(admission, Admission)
    assert admission.tenant == "bob"
    assert admission.carried_by == (b"authorization", b"x-api-key")


def test_without_keys_headers_pass_and_the_request_is_anonymous() -> None:
    keys = ApiKeyStore(Access(()), 0.0)
    admission = keys.admit_head(BEARER, 0.0)
    assert isinstance(admission, Admission)
    assert (admission.tenant, admission.weight, admission.carried_by) == ("", 1.0, ())
    assert keys.reserve(admission, "", 10**9, None, 0.0) is None
    keys.settle(admission, 0, 10**9, 0.0)


# --- tokens


def test_tokens_are_reserved_and_replaced_by_what_was_used() -> None:
    keys = store(tokens_per_minute=1000)
    admission = enter(keys)
    assert keys.reserve(admission, "", 100, 50, 0.0) is None
    assert (account(keys).reserved, account(keys).tokens_left) == (150, 850)
    keys.settle(admission, 0, 120, 0.0)
    found = account(keys)
    assert (found.admitted, found.tokens, found.tokens_left, found.reserved) == (1, 120, 880, 0)


def test_parallel_requests_get_the_limit_plus_one_request() -> None:
    keys = store(tokens_per_minute=60)
    accounts = [enter(keys) for _ in range(40)]  # all heads before any body
    verdicts = [keys.reserve(one, "", 4, 20, 0.0) for one in accounts]
    assert verdicts[:3] == [None] * 3
    assert verdicts[3:] == [Limited("alice", "tokens", 60, pytest.approx(13.0))] * 37
    assert account(keys).tokens_left == 60 - 3 * 24
    for one in accounts:
        keys.settle(one, 0, 0, 0.0)
    assert (account(keys).tokens_left, account(keys).in_flight) == (60, 0)


def test_a_request_larger_than_the_bucket_passes_when_it_is_full() -> None:
    keys = store(tokens_per_minute=60)
    large = enter(keys)
    assert keys.reserve(large, "", 6000, 0, 0.0) is None
    refused = keys.admit_head(BEARER, 1.0)
    assert isinstance(refused, Limited)
    keys.settle(large, 0, 6000, 1.0)
    assert isinstance(keys.admit_head(BEARER, 1.0 + refused.retry_after_s * 0.999), Limited)
    assert isinstance(keys.admit_head(BEARER, 1.0 + refused.retry_after_s * 1.001), Admission)


def test_what_is_used_beyond_the_reservation_is_charged() -> None:
    keys = store(tokens_per_minute=1000)
    admission = enter(keys)
    keys.reserve(admission, "", 10, 10, 0.0)
    keys.settle(admission, 0, 5000, 0.0)
    assert account(keys).tokens_left == -4000


def test_a_request_that_never_reserved_is_charged_what_it_used() -> None:
    keys = store(tokens_per_minute=1000)
    keys.settle(enter(keys), 0, 400, 0.0)
    assert account(keys).tokens_left == 600


def test_a_refused_reservation_gives_its_request_back() -> None:
    keys = store(requests_per_minute=5, tokens_per_minute=60)
    first, second = enter(keys), enter(keys)
    keys.reserve(first, "", 60, 0, 0.0)
    assert isinstance(keys.reserve(second, "", 1, 0, 0.0), Limited)
    keys.settle(second, 0, 0, 0.0)
    keys.settle(first, 0, 60, 0.0)
    found = account(keys)
    assert (found.admitted, found.limited, found.tokens) == (1, 1, 60)
    assert (found.requests_left, found.tokens_left, found.reserved, found.in_flight) == (4, 0, 0, 0)


@pytest.mark.parametrize(
    ("max_tokens", "reserved"),
    [(None, 256), (-1, 256), (10, 10), (0, 0), (10**12, 256)],
    ids=["not said", "no limit", "less than expected", "prompt only", "more than expected"],
)
def test_the_lesser_of_max_tokens_and_the_expected_length_is_reserved(
    max_tokens: int | None, reserved: int
) -> None:
    keys = store(tokens_per_minute=10_000)
    admission = enter(keys)
    keys.reserve(admission, "", 7, max_tokens, 0.0)
    assert admission.reserved == 7 + reserved


def settled(keys: ApiKeyStore, *generated: int) -> None:
    for tokens in generated:
        admission = enter(keys)
        keys.reserve(admission, "", 100, None, 0.0)
        keys.settle(admission, 0, 100 + tokens, 0.0, tokens)


def reserved(keys: ApiKeyStore, **more: int) -> int:
    admission = enter(keys)
    keys.reserve(admission, "", 0, None, 0.0, **more)
    keys.settle(admission, 0, 0, 0.0)
    return admission.reserved


def test_what_nine_of_ten_responses_have_is_reserved() -> None:
    keys = store(tokens_per_minute=1e9)
    settled(keys, *[2000] * 50)
    assert reserved(keys) == 2000
    settled(keys, *[300] * 54, *[2000] * 10)
    assert reserved(keys) == 2000  # they are not few enough
    settled(keys, *[300] * 64)
    assert reserved(keys) == 300
    assert reserved(keys, choices=5) == 1500


def test_short_requests_do_not_make_the_next_one_cheap() -> None:
    keys = store(tokens_per_minute=1e9)
    settled(keys, *[1] * 200)
    assert reserved(keys) == LEAST_EXPECTED


def test_a_client_that_leaves_teaches_nothing() -> None:
    keys = store(tokens_per_minute=1e9)
    settled(keys, *[2000] * 50)
    for _ in range(100):
        admission = enter(keys)
        keys.reserve(admission, "", 100, None, 0.0)
        keys.settle(admission, 0, 101, 0.0)
    assert reserved(keys) == 2000


# --- requests under way


def test_as_many_at_once_as_the_key_may_have() -> None:
    keys = store(max_concurrent=2)
    first, _ = enter(keys), enter(keys)
    refused = keys.admit_head(BEARER, 0.0)
    assert refused == Limited("alice", "concurrent requests", 2, 1.0)
    assert isinstance(refused, Limited)
    assert refused.message == "The key 'alice' is limited to 2 concurrent requests."
    keys.settle(first, 0, 0, 0.0)
    enter(keys)
    assert account(keys).in_flight == 2


def test_one_refused_for_too_many_at_once_costs_no_request() -> None:
    keys = store(max_concurrent=1, requests_per_minute=10)
    enter(keys)
    for _ in range(20):
        assert isinstance(keys.admit_head(BEARER, 0.0), Limited)
    assert account(keys).requests_left == 9


def test_settling_twice_raises_and_changes_nothing() -> None:
    keys = store(tokens_per_minute=1000, max_concurrent=5)
    admission = enter(keys)
    keys.settle(admission, 0, 10, 0.0)
    before = account(keys)
    with pytest.raises(AlreadySettledError):
        keys.settle(admission, 0, 10, 0.0)
    with pytest.raises(AlreadySettledError):
        keys.reserve(admission, "", 10, 10, 0.0)
    assert account(keys) == before


def test_a_request_outlives_the_key_it_came_with() -> None:
    keys = store(tokens_per_minute=1000, max_concurrent=1)
    admission = enter(keys)
    keys.reserve(admission, "", 100, 0, 0.0)
    keys.apply(Access(()), 0.0)
    keys.apply(Access((key(tokens_per_minute=1000, max_concurrent=1),)), 0.0)
    assert isinstance(keys.admit_head(BEARER, 0.0), Limited)  # it is still under way
    keys.settle(admission, 0, 300, 0.0)
    assert (account(keys).tokens_left, account(keys).in_flight, account(keys).reserved) == (700, 0, 0)


def test_a_limit_that_comes_and_goes_with_requests_under_way_leaves_nothing_reserved() -> None:
    keys = store(tokens_per_minute=1000)
    before = enter(keys)
    keys.reserve(before, "", 500, 0, 0.0)
    keys.apply(Access((key(),)), 0.0)
    between = enter(keys)
    keys.reserve(between, "", 500, 0, 0.0)
    keys.apply(Access((key(tokens_per_minute=1000),)), 0.0)
    for one in (before, between):
        keys.settle(one, 0, 400, 0.0)
    assert (account(keys).reserved, account(keys).in_flight) == (0, 0)
    assert 200 <= (account(keys).tokens_left or 0) <= 1000


# --- whatever the ending


@dataclass
class Open:
    admission: Admission
    expected: int = 0


class Accounts(RuleBasedStateMachine):
    """Requests of one tenant come, reserve, end in any way and at any time."""

    PER_MINUTE = 600.0
    LARGEST = 300  # tokens of one request

    def __init__(self) -> None:
        super().__init__()
        self.keys = store(tokens_per_minute=self.PER_MINUTE, requests_per_minute=120, max_concurrent=8)
        self.now = 0.0
        self.open: list[Open] = []
        self.generated = 0
        self.beyond = 0  # used by requests that never reserved

    @rule(seconds=st.floats(0.0, 30.0))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def a_head_arrives(self) -> None:
        verdict = self.keys.admit_head(BEARER, self.now)
        if isinstance(verdict, Admission):
            self.open.append(Open(verdict))

    @precondition(lambda self: any(not one.expected for one in self.open))
    @rule(prompt=st.integers(1, 100), max_tokens=st.integers(0, 200))
    def a_body_arrives(self, prompt: int, max_tokens: int) -> None:
        one = next(one for one in self.open if not one.expected)
        refused = self.keys.reserve(one.admission, "", prompt, max_tokens, self.now)
        if refused is None:
            one.expected = one.admission.reserved
        else:
            self.open.remove(one)
            self.keys.settle(one.admission, 0, 0, self.now)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100), share=st.floats(0.0, 1.0))
    def one_ends(self, which: int, share: float) -> None:
        """Whole, cut in the middle, or refused: what it used is what it is charged."""
        one = self.open.pop(which % len(self.open))
        used = round(one.expected * share)
        self.generated += used
        self.keys.settle(one.admission, 0, used, self.now)

    @precondition(lambda self: self.open)
    @rule(used=st.integers(0, 100))
    def one_ends_before_its_body_is_whole(self, used: int) -> None:
        for one in self.open:
            if not one.expected:
                self.open.remove(one)
                self.generated += used
                self.beyond += used
                self.keys.settle(one.admission, 0, used, self.now)
                return

    @invariant()
    def the_account_is_right(self) -> None:
        usage = account(self.keys, self.now)
        assert usage.tokens == self.generated
        assert usage.in_flight == len(self.open) <= 8
        assert usage.reserved == sum(one.expected for one in self.open)
        assert usage.tokens_left is not None
        assert usage.tokens_left > -self.LARGEST - self.beyond
        assert usage.tokens_left <= self.PER_MINUTE

    def teardown(self) -> None:
        for one in self.open:
            self.keys.settle(one.admission, 0, 0, self.now)
        usage = account(self.keys, self.now)
        assert (usage.in_flight, usage.reserved, usage.tokens) == (0, 0, self.generated)
        full = account(self.keys, self.now + 3600.0)
        assert full.tokens_left == self.PER_MINUTE


TestAccounts = Accounts.TestCase


@given(
    per_minute=st.floats(1.0, 10_000.0),
    requests=st.lists(st.tuples(st.floats(0.0, 60.0), st.integers(1, 5000)), min_size=1, max_size=60),
)
def test_over_any_time_a_tenant_uses_the_rate_one_minutes_worth_and_one_request(
    per_minute: float, requests: list[tuple[float, int]]
) -> None:
    keys = store(tokens_per_minute=per_minute)
    now, used = 0.0, 0
    for gap_s, tokens in requests:
        now += gap_s
        admission = keys.admit_head(BEARER, now)
        if isinstance(admission, Admission):
            assert keys.reserve(admission, "", tokens, 0, now) is None
            keys.settle(admission, 0, tokens, now)
            used += tokens
        assert used <= per_minute * (1 + now / 60.0) + 5000 + 1e-6
