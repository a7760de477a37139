"""Limits per minute, day and month, of keys and of their models, in time that is an argument."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.config.key_limits import KeyLimits, Price
from lb.config.options import Access, ApiKey
from lb.config.usage import KeyTotal, UsageTotals
from lb.core.api_keys import Admission, ApiKeyStore, Usage
from lb.core.calendar import calendar_of
from lb.core.quota import Amount, Limited
from lb.core.shared_quota import Charge
from tests.kit.api_keys import api_key

BEARER = ((b"authorization", b"Bearer sk-alice"),)
NOON = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()  # of the last but one day of its month
DAY_S = 86_400.0


def keys(**options: object) -> ApiKeyStore:
    prices = options.pop("prices", ())
    return store_of(api_key("alice", "sk-alice", **options), prices)


def store_of(key: ApiKey, prices: object = ()) -> ApiKeyStore:
    store = ApiKeyStore(Access((key,), prices=prices), 0.0)  # type: ignore[arg-type]
    return at(store, 0.0)


def at(store: ApiKeyStore, now: float) -> ApiKeyStore:
    """It is `now` seconds after NOON."""
    store.today = calendar_of(NOON + now, now)
    return store


def send(
    store: ApiKeyStore, now: float = 0.0, model: str = "", tokens: tuple[int, int] = (10, 5)
) -> Limited | None:
    """A request that is over at once, and used what it had reserved; or why it was refused."""
    admission = store.admit_head(BEARER, now)
    if isinstance(admission, Limited):
        return admission
    assert isinstance(admission, Admission)
    refused = store.reserve(admission, model, *tokens, now)
    used = (0, 0) if refused is not None else tokens
    store.settle(admission, *used, now)
    return refused


def let_in(store: ApiKeyStore, now: float = 0.0, most: int = 100, **request: object) -> int:
    for count in range(most):
        if send(store, now, **request) is not None:  # type: ignore[arg-type]
            return count
    return most


def usages(store: ApiKeyStore, now: float = 0.0) -> dict[str, Usage]:
    return {usage.model: usage for usage in store.usage(now)}


# Each request has 10 input and 5 output tokens. How many pass at once, and what the next one gets.
LIMITS = {
    "requests_per_minute": (7, 7, "7 requests per minute", 60 / 7),
    "tokens_per_minute": (60, 4, "60 tokens per minute", 1.0),
    "input_tokens_per_minute": (60, 6, "60 input tokens per minute", 1.0),
    "output_tokens_per_minute": (60, 12, "60 output tokens per minute", 1.0),
    "requests_per_day": (7, 7, "7 requests per day", DAY_S / 2),
    "tokens_per_day": (60, 4, "60 tokens per day", DAY_S / 2),
    "input_tokens_per_day": (60, 6, "60 input tokens per day", DAY_S / 2),
    "output_tokens_per_day": (60, 12, "60 output tokens per day", DAY_S / 2),
    "tokens_per_month": (60, 4, "60 tokens per month", 1.5 * DAY_S),
    "usd_per_month": (0.002, 10, "0.002 USD per month", 1.5 * DAY_S),
}
PRICES = (("*", Price(10.0, 20.0)),)  # a request costs 0.0002 USD


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("of", ["the key", "its model", "other models"])
def test_each_limit_lets_in_what_it_says_and_tells_when_to_come_back(name: str, of: str) -> None:
    most, passes, said, wait_s = LIMITS[name]
    limits: dict[str, object] = {name: most}
    if of != "the key":
        limits = {"models": (("m" if of == "its model" else "*", KeyLimits(**{name: most})),)}  # type: ignore[arg-type]
    store = keys(prices=PRICES, **limits)
    assert let_in(store, model="m") == passes
    refusal = send(store, model="m")
    assert refusal is not None
    of_model = "" if of == "the key" else f" of the model {'m' if of == 'its model' else '*'!r}"
    assert refusal.message == f"The key 'alice' is limited to {said}{of_model}."
    assert refusal.reason == name
    assert refusal.retry_after_s == pytest.approx(wait_s)
    assert refusal.is_budget is (name.endswith("month"))
    wait_s = refusal.retry_after_s
    assert send(at(store, wait_s * 0.999), wait_s * 0.999, "m") is not None
    assert send(at(store, wait_s * 1.001), wait_s * 1.001, "m") is None


def test_a_limit_of_a_model_is_not_one_of_others() -> None:
    store = keys(models=(("small", KeyLimits(requests_per_day=2)), ("*", KeyLimits(requests_per_day=3))))
    assert let_in(store, model="small") == 2
    assert let_in(store, model="large") == 3
    assert let_in(store, model="") == 0, "all other names share one limit"
    assert let_in(keys(models=(("small", KeyLimits(requests_per_day=2)),)), model="large") == 100


def test_a_request_that_its_model_refuses_is_none_of_the_key() -> None:
    store = keys(requests_per_day=5, tokens_per_minute=1000, models=(("m", KeyLimits(tokens_per_minute=20)),))
    assert let_in(store, model="m") == 2
    assert usages(store)[""].requests_today == 2
    assert usages(store)[""].tokens_left == 1000 - 30
    assert let_in(store, model="n") == 3


def test_the_concurrent_requests_of_a_model() -> None:
    store = keys(models=(("m", KeyLimits(max_concurrent=1)),))
    first, second = (store.admit_head(BEARER, 0.0) for _ in range(2))
    assert isinstance(first, Admission)
    assert isinstance(second, Admission)
    assert store.reserve(first, "m", 1, 1, 0.0) is None
    refusal = store.reserve(second, "m", 1, 1, 0.0)
    assert refusal == Limited("alice", "concurrent requests", 1, 1.0, model="m")
    store.settle(second, 0, 0, 0.0)
    store.settle(first, 1, 1, 0.0)
    assert send(store, model="m") is None
    assert usages(store)["m"].in_flight == 0


def test_what_is_reserved_counts_as_used() -> None:
    """Requests in parallel get the limit and one request, not the limit each."""
    store = keys(tokens_per_day=100, prices=PRICES, usd_per_month=1.0)
    running = [store.admit_head(BEARER, 0.0) for _ in range(30)]
    assert all(isinstance(one, Admission) for one in running)
    verdicts = [store.reserve(one, "", 10, 5, 0.0) for one in running if isinstance(one, Admission)]
    assert verdicts.count(None) == 7
    store = keys(usd_per_month=0.002, prices=PRICES)
    running = [store.admit_head(BEARER, 0.0) for _ in range(30)]
    verdicts = [store.reserve(one, "", 10, 5, 0.0) for one in running if isinstance(one, Admission)]
    assert verdicts.count(None) == 10


def test_a_budget_has_what_was_charged_and_not_what_was_reserved() -> None:
    store = keys(tokens_per_month=1000, usd_per_month=5.0, prices=(("m", Price(1.0, 1000.0)),))
    admission = store.admit_head(BEARER, 0.0)
    assert isinstance(admission, Admission)
    store.reserve(admission, "m", 100, 400, 0.0)
    store.settle(admission, 120, 30, 0.0)
    found = usages(store)[""]
    assert (found.requests_today, found.tokens_today, found.tokens_this_month) == (1, 150, 150)
    assert found.usd_this_month == pytest.approx(0.03012)
    assert found.reserved == 0


def test_tokens_of_a_path_that_was_not_counted_before_cost_the_price_of_other_models() -> None:
    store = keys(usd_per_month=5.0, prices=(("m", Price(1.0, 1.0)), ("*", Price(10.0, 20.0))))
    admission = store.admit_head(BEARER, 0.0)
    assert isinstance(admission, Admission)
    store.settle(admission, 100, 50, 0.0)
    assert usages(store)[""].usd_this_month == pytest.approx(0.002)


def test_a_request_that_an_engine_refused_uses_no_budget() -> None:
    store = keys(tokens_per_month=100)
    for _ in range(20):
        admission = store.admit_head(BEARER, 0.0)
        assert isinstance(admission, Admission)
        assert store.reserve(admission, "", 90, 5, 0.0) is None
        store.settle(admission, 0, 0, 0.0)
    assert usages(store)[""].tokens_this_month == 0


def test_days_and_months_begin_at_midnight_of_utc() -> None:
    store = keys(tokens_per_day=60, tokens_per_month=90)
    assert let_in(store) == 4
    later = DAY_S / 2 + 1
    assert let_in(at(store, later), later) == 2
    assert send(store, later) == Limited(
        "alice", "tokens", 90, pytest.approx(DAY_S - 1), span="month"
    )  # until December
    december = 1.5 * DAY_S + 1
    assert let_in(at(store, december), december) == 4


def test_clocks_of_processes_that_differ_by_a_moment_begin_no_day_again() -> None:
    store = keys(requests_per_day=3)
    midnight = DAY_S / 2
    assert let_in(at(store, midnight + 0.1), midnight + 0.1) == 3
    assert let_in(at(store, midnight - 0.1), midnight + 0.2) == 0, "a process that is behind"
    assert let_in(at(store, midnight + 0.3), midnight + 0.3) == 0


def test_a_clock_that_was_wrong_by_days_locks_nobody_out() -> None:
    store = keys(requests_per_day=3)
    wrong = 40 * DAY_S
    store.today = calendar_of(NOON + wrong, 0.0)
    assert let_in(store) == 3
    assert let_in(at(store, 1.0), 1.0) == 3


# --- what others have counted


def test_what_peers_charge_is_used_on_the_day_too() -> None:
    store = keys(requests_per_day=10, tokens_per_day=100, usd_per_month=1.0, prices=PRICES)
    store.charge([Charge("alice", Amount(4, 30, 20), 7_000, False, True)], 0.0)
    found = usages(store)[""]
    assert (found.requests_today, found.tokens_today, found.tokens_this_month) == (4, 50, 50)
    assert found.usd_this_month == pytest.approx(0.007)
    store.charge([Charge("alice", Amount(4, 30, 20), 0, False, False)], 0.0)  # maybe of another day
    store.charge([Charge("alice", Amount(-1, -300, -5), 0, False, True)], 0.0)  # given back after midnight
    found = usages(store)[""]
    assert (found.requests_today, found.tokens_today) == (3, 15)


def test_charges_of_a_model_are_those_of_its_limits() -> None:
    store = keys(models=(("m", KeyLimits(tokens_per_minute=100, tokens_per_day=1000)),))
    store.charge([Charge("alice\nm", Amount(1, 60, 30), 0, False, True)], 0.0)
    store.charge([Charge("alice\nother", Amount(1, 60, 30), 0, False, True)], 0.0)
    store.charge([Charge("mallory", Amount(1, 60, 30), 0, False, True)], 0.0)
    found = usages(store)["m"]
    assert (found.tokens_left, found.tokens_today) == (10, 90)


def totals(*rows: KeyTotal, day: int = int(NOON // DAY_S)) -> UsageTotals:
    return UsageTotals(day, rows)


def test_what_all_agents_have_counted_is_what_counts_if_it_is_more() -> None:
    store = keys(
        tokens_per_day=1000,
        usd_per_month=1.0,
        models=(("m", KeyLimits(tokens_per_month=500)), ("*", KeyLimits(requests_per_day=9))),
        prices=PRICES,
    )
    assert send(store, model="m", tokens=(100, 40)) is None
    sums = totals(
        KeyTotal("alice", "", 2, 20, 2, 20, 2),
        KeyTotal("alice", "m", 3, 50, 5, 400, 90),
        KeyTotal("alice", "n", 4, 10, 1, 100, 10),
        KeyTotal("bob", "m", 99, 99, 99, 99, 99),
    )
    for _ in range(2):  # it may come twice
        store.counted(sums, 0.0)
        found = usages(store)
        assert found[""].requests_today == 9
        assert found[""].tokens_today == 100 + 40  # more than 80 + 8
        assert found[""].usd_this_month == pytest.approx((520 * 10 + 102 * 20) / 1e6)
        assert found["m"].tokens_this_month == 490
        assert found["*"].requests_today == 6
    store.counted(totals(KeyTotal("alice", "m", 9999, 9999, 0, 9999, 0), day=int(NOON // DAY_S) - 1), 0.0)
    assert usages(store)[""].requests_today == 9, "of yesterday"


def test_only_limits_of_days_and_months_need_what_others_have_counted() -> None:
    assert not keys(tokens_per_minute=5, max_concurrent=3).of_calendar
    assert keys(requests_per_day=5).of_calendar
    assert keys(models=(("m", KeyLimits(tokens_per_month=5)),)).of_calendar


# --- changes


def test_other_limits_keep_what_was_used() -> None:
    store = keys(tokens_per_day=60, models=(("m", KeyLimits(requests_per_minute=4)),))
    assert let_in(store, model="m") == 4
    changed = api_key(
        "alice", "sk-alice", tokens_per_day=90, models=(("m", KeyLimits(requests_per_minute=6)),)
    )
    store.apply(Access((changed,)), 0.0)
    assert usages(store)[""].tokens_today == 60
    assert usages(store)["m"].requests_left == 0
    assert let_in(at(store, 30.0), 30.0, model="m") == 2, "tokens of the day"


def test_limits_that_end_while_a_request_runs_leave_nothing_reserved() -> None:
    store = keys(tokens_per_minute=1000, models=(("m", KeyLimits(tokens_per_minute=1000)),))
    admission = store.admit_head(BEARER, 0.0)
    assert isinstance(admission, Admission)
    assert store.reserve(admission, "m", 10, 5, 0.0) is None
    held = store._tenants["alice"].quotas()
    store.apply(Access((api_key("alice", "sk-alice"),)), 0.0)
    store.settle(admission, 10, 5, 0.0)
    assert [(quota.reserved(), quota.in_flight()) for quota in held] == [((0, 0), 0)] * 2
    store.apply(Access((api_key("alice", "sk-alice", tokens_per_minute=100),)), 0.0)
    assert usages(store)[""].tokens_left == 100, "a limit where none was starts full"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["m", "n", ""]), st.integers(0, 50), st.integers(0, 50), st.integers(0, 80)
        ),
        max_size=60,
    )
)
def test_the_sums_of_a_day_are_those_of_its_requests(requests: list[tuple[str, int, int, int]]) -> None:
    """Whatever was reserved: what was used counts, at the key, at its model, and in money."""
    store = keys(
        tokens_per_day=10**9,
        usd_per_month=10**9,
        prices=PRICES,
        models=(("m", KeyLimits(tokens_per_month=10**9)),),
    )
    running = []
    for model, tokens_in, most, _ in requests:
        admission = store.admit_head(BEARER, 0.0)
        assert isinstance(admission, Admission)
        assert store.reserve(admission, model, tokens_in, most, 0.0) is None
        running.append(admission)
    for admission, (_, tokens_in, _, tokens_out) in zip(running, requests, strict=True):
        store.settle(admission, tokens_in, tokens_out, 0.0)
    found = usages(store)
    assert found[""].tokens_today == sum(one[1] + one[3] for one in requests)
    assert found[""].usd_this_month == pytest.approx(sum(one[1] * 10 + one[3] * 20 for one in requests) / 1e6)
    if requests:
        assert found["m"].tokens_this_month == sum(one[1] + one[3] for one in requests if one[0] == "m")
    assert [usage.reserved for usage in found.values()] == [0] * len(found)
