"""PreServe's load, term by term, and the books it is read from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.preserve.router import PreServe
from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.response_length import Constant

A, B = TargetView("a"), TargetView("b")


def asked(request_id: str, prompt_tokens: int = 100, max_tokens: int = 0) -> RequestView:
    return RequestView(
        request_id, "POST", "/v1/completions", body_bytes=4 * prompt_tokens, max_tokens=max_tokens
    )


def preserve(kv_tokens: int = 100_000) -> PreServe:
    return PreServe(Constant(200), kv_tokens)


def chosen(policy: PreServe, request: RequestView, targets: list[TargetView], now: float = 0.0) -> Choice:
    choice = policy.choose(request, targets, now)
    assert choice is not None
    return choice


def terms(policy: PreServe, request: RequestView, target: TargetView, now: float = 0.0) -> dict[str, float]:
    choice = chosen(policy, request, [target], now)
    (row,) = choice.scored
    return {
        "cost": float(row[1]),
        **{name: float(value) for name, value in zip(choice.terms, row[2:], strict=True)},
    }


@pytest.mark.parametrize(
    ("on_a", "on_b", "winner"),
    [
        pytest.param([], [asked("x", 1, 1)], "a", id="nothing is less than something"),
        pytest.param([asked("x", 300)], [asked("y", 100)], "b", id="less to prefill"),
        pytest.param([asked("x", 100, 150)], [asked("y", 100, 50)], "b", id="less to write"),
        pytest.param([asked("x", 500, 10)], [asked("y", 100, 200)], "b", id="510 tokens against 300"),
        pytest.param(
            [asked("x"), asked("y")], [asked("z", 1000)], "a", id="two small ones against a large one"
        ),
    ],
)
def test_least_load_in_tokens(on_a: list[RequestView], on_b: list[RequestView], winner: str) -> None:
    policy = preserve()
    for request in on_a:
        policy.record(request, "a", 0.0)
    for request in on_b:
        policy.record(request, "b", 0.0)
    a, b = replace(A, in_flight=len(on_a)), replace(B, in_flight=len(on_b))
    for order in ([a, b], [b, a]):
        assert chosen(policy, asked("r"), order).target_id == winner


def test_the_prompt_leaves_at_the_first_byte_and_the_answer_as_it_is_written() -> None:
    policy = preserve()
    policy.record(asked("x", 500), "a", 0.0)
    a, probe = replace(A, in_flight=1), asked("r", 10, 1)
    sent = terms(policy, probe, a, 0.0)
    policy.responded(asked("x", 500), "a", 1.0)
    begun, later = terms(policy, probe, a, 1.0), terms(policy, probe, a, 4.0)
    assert (sent["prefill_tokens"], sent["decode_tokens"]) == (510, pytest.approx(201))
    assert (begun["prefill_tokens"], begun["decode_tokens"]) == (10, pytest.approx(201))
    assert later["decode_tokens"] == pytest.approx(101)  # 3 s at 30 ms a token
    policy.ended(asked("x", 500), "a", 5.0, None)
    assert terms(policy, probe, A, 5.0)["cost"] == 11


@pytest.mark.parametrize(
    ("a", "overflow"),
    [
        pytest.param(A, 0.0, id="a silent engine with an empty map"),
        pytest.param(replace(A, kv_usage=0.5), 0.0, id="half full"),
        pytest.param(replace(A, kv_usage=0.9), 1000.0 + 200.0, id="beyond 80 %: every token is too much"),
        pytest.param(replace(A, kv_usage=0.795), 200.0 - 55.9, id="the request itself passes 80 %"),
    ],
)
def test_memory_that_will_overflow_is_paid_for(a: TargetView, overflow: float) -> None:
    # An empty map: a tenth of 100,000 assumed tokens over (usage + 0.1) is the capacity.
    explained = terms(preserve(), asked("r", 100, 100), a, 0.0)
    assert explained["overflow_tokens"] == pytest.approx(overflow, abs=12)  # of the slots' rounding


def test_the_future_and_not_the_present_decides() -> None:
    """b holds less now, but what it holds is growing past what its cache can take; a's is about to leave."""
    policy = preserve(kv_tokens=10_000)
    for index in range(70):
        policy.record(asked(f"b{index}", 80, 400), "b", 0.0)
        policy.responded(asked(f"b{index}", 80, 400), "b", 0.0)
    policy.record(asked("a", 7000, 5), "a", 0.0)
    policy.responded(asked("a", 7000, 5), "a", 0.0)
    a, b = replace(A, in_flight=1), replace(B, in_flight=70)
    assert (
        terms(policy, asked("r"), b)["overflow_tokens"] > 0 == terms(policy, asked("r"), a)["overflow_tokens"]
    )


def test_the_engines_word_sets_the_capacity() -> None:
    """The same requests fill one cache to a fifth and the other to three quarters."""
    policy = preserve()
    for name in "ab":
        for index in range(20):
            policy.record(asked(f"{name}{index}", 2000), name, 0.0)
    a, b = replace(A, in_flight=20, kv_usage=0.75), replace(B, in_flight=20, kv_usage=0.2)
    newcomer = asked("r", 4000)
    assert chosen(policy, newcomer, [a, b]).target_id == "b"
    assert terms(policy, newcomer, a)["overflow_tokens"] > 0 == terms(policy, newcomer, b)["overflow_tokens"]


def test_failures_weigh_a_thousand_tokens() -> None:
    policy = preserve()
    assert terms(policy, asked("r"), replace(A, trouble=2.0))["trouble_tokens"] == 2000


def test_requests_of_others_weigh_like_ours() -> None:
    policy = preserve()
    policy.record(asked("x", 100), "a", 0.0)
    usual = 0.1 * 300  # a tenth of the first one's tokens: the average has just started
    strange = replace(B, running=2, pending=1)
    assert terms(policy, asked("r"), strange)["decode_tokens"] == pytest.approx(200 + 3 * usual)


def test_how_fast_a_target_writes_is_learned() -> None:
    """100 tokens a second: after two of them, a response of 200 is written."""
    policy = preserve()
    for index in range(60):
        request, start = asked(f"r{index}"), 10.0 * index
        policy.record(request, "a", start)
        policy.responded(request, "a", start + 1.0)
        policy.ended(request, "a", start + 3.0, 200)
    policy.record(asked("x"), "a", 1000.0)
    policy.responded(asked("x"), "a", 1000.0)
    a = replace(A, in_flight=1)
    assert terms(policy, asked("r", 100, 1), a, 1001.0)["decode_tokens"] == pytest.approx(101, abs=3)


def test_an_answer_in_one_piece_is_timed_from_its_start() -> None:
    policy = preserve()
    for index in range(60):
        request, start = asked(f"r{index}"), 10.0 * index
        policy.record(request, "a", start)
        policy.responded(request, "a", start + 2.0)
        policy.ended(request, "a", start + 2.0, 200)
    policy.record(asked("x"), "a", 1000.0)
    a = replace(A, in_flight=1)
    assert terms(policy, asked("r", 100, 1), a, 1001.0)["decode_tokens"] == pytest.approx(101, abs=3)


def test_late_news_of_a_generation_that_left_does_not_touch_the_next() -> None:
    policy = preserve()
    policy.record(asked("old", 500), "a", 0.0)
    policy.forget("a")
    policy.record(asked("new", 300), "a", 0.0)
    policy.responded(asked("old", 500), "a", 0.0)
    policy.ended(asked("old", 500), "a", 0.0, None)
    explained = terms(policy, asked("r", 10, 1), replace(A, in_flight=1))
    assert (explained["prefill_tokens"], explained["decode_tokens"]) == (310, pytest.approx(201))
