"""GORGO's cost, term by term; the bookings and when they end; learning from responses."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from policies.routing.base import Choice, RequestView, TargetView
from policies.routing.gorgo import DEFAULT_S_PER_BYTE, MOST_STAYS, Gorgo, Stays, put_off_s
from policies.routing.response_length import Constant
from tests.kit.request_views import changed

PROMPT = b"0123456789abcdef" * 500  # 8000 bytes: 188 ms at the paper's rate
OTHER = b"fedcba9876543210" * 500
LONG = b"0123456789abcdef" * 9500  # 152 kB: 3.6 s at the paper's rate
A, B = TargetView("a"), TargetView("b")


def asked(request_id: str, prompt: bytes = PROMPT) -> RequestView:
    return RequestView(request_id, "POST", "/v1/chat/completions", prompt=prompt, scope="m")


def gorgo() -> Gorgo:
    return Gorgo(Constant(200))


def chosen(policy: Gorgo, request: RequestView, targets: list[TargetView], now: float = 0.0) -> Choice:
    choice = policy.choose(request, targets, now)
    assert choice is not None
    return choice


def terms(choice: Choice, target_id: str) -> dict[str, float]:
    row = next(row for row in choice.scored if row[0] == target_id)
    return {
        "cost": float(row[1]),
        **{name: float(value) for name, value in zip(choice.terms, row[2:], strict=True)},
    }


def serve(
    policy: Gorgo, request: RequestView, target_id: str, start: float, first: float, end: float
) -> None:
    policy.record(request, target_id, start)
    policy.responded(request, target_id, first)
    policy.ended(request, target_id, end, 100)


@pytest.mark.parametrize(
    ("a", "b", "winner"),
    [
        pytest.param(A, B, "a", id="the cached prompt wins"),
        pytest.param(A, replace(B, rtt_s=0.05), "a", id="and more so against a far one"),
        pytest.param(
            replace(A, rtt_s=1.1), B, "a", id="188 ms of prefill and a copy weigh six times as much"
        ),
        pytest.param(replace(A, rtt_s=1.14), B, "b", id="and are not worth 1,140 ms of way"),
        pytest.param(replace(A, in_flight=48), B, "a", id="48 streams: 1,107 ms of decode pressure"),
        pytest.param(replace(A, in_flight=49), B, "b", id="49 streams: 1,130 ms"),
        pytest.param(
            replace(A, running=8, pending=19), B, "b", id="streams and waiting requests of others count"
        ),
        pytest.param(
            replace(A, trouble=1.0), B, "b", id="a failing target pays a second, and its cache is not counted"
        ),
        pytest.param(replace(A, trouble=0.4), B, "a", id="a faded failure is forgiven"),
        pytest.param(replace(A, kv_usage=0.94), B, "a", id="memory nearly full"),
        pytest.param(replace(A, kv_usage=0.95), B, "b", id="memory full: as if failing"),
    ],
)
def test_what_a_cached_prompt_is_worth(a: TargetView, b: TargetView, winner: str) -> None:
    policy = gorgo()
    serve(policy, asked("earlier"), "a", 0.0, 0.2, 1.0)
    for order in ([a, b], [b, a]):
        assert chosen(policy, asked("r"), order, 1.0).target_id == winner


def test_the_cost_is_the_sum_of_its_terms() -> None:
    policy = gorgo()
    serve(policy, asked("earlier"), "a", 0.0, 0.2, 1.0)
    policy.record(asked("queued", OTHER), "a", 1.0)
    a = replace(A, rtt_s=0.01, in_flight=2, waiting=1, trouble=1.0, kv_usage=0.99)
    choice = chosen(policy, asked("r", PROMPT + b"x" * 1600), [a], 1.0)
    explained = terms(choice, "a")
    assert choice.matched_bytes == explained["matched_bytes"] == 8000
    assert explained["prefill_s"] == pytest.approx(1600 * DEFAULT_S_PER_BYTE)
    assert explained["burden_s"] == pytest.approx(
        1.2 * explained["prefill_s"]
    )  # one waits, two are written to
    assert explained["copy_s"] == 0.0
    assert explained["wait_s"] == pytest.approx(8000 * DEFAULT_S_PER_BYTE)
    assert explained["decode_s"] == pytest.approx(2.0 * 0.3 * 2 * 200 * 4 * DEFAULT_S_PER_BYTE)
    assert (explained["rtt_s"], explained["trouble_s"], explained["full_s"]) == (0.01, 1.0, 1.0)
    summands = ("rtt_s", "prefill_s", "burden_s", "copy_s", "wait_s", "decode_s", "trouble_s", "full_s")
    assert explained["cost"] == pytest.approx(sum(explained[name] for name in summands), abs=0.0005)


def test_weight_zero_is_the_papers_objective() -> None:
    policy = Gorgo(Constant(200), decode_weight=0.0, prefill_weight=1.0, copy_weight=0.0)
    serve(policy, asked("earlier"), "a", 0.0, 0.2, 1.0)
    assert chosen(policy, asked("r"), [replace(A, in_flight=500), B], 1.0).target_id == "a"


@pytest.mark.parametrize(
    ("prompt", "copied"),
    [
        pytest.param(PROMPT, 8000, id="all of it"),
        pytest.param(PROMPT[:4000] + b"x" * 4000, 4000, id="only what the other has"),
        pytest.param(OTHER, 0, id="nobody has it"),
    ],
)
def test_a_second_copy_costs_what_another_target_has_four_times_more(prompt: bytes, copied: int) -> None:
    policy = gorgo()
    serve(policy, asked("earlier"), "a", 0.0, 0.2, 1.0)
    choice = chosen(policy, asked("r", prompt), [A, B], 1.0)
    s_per_byte = terms(choice, "b")["prefill_s"] / len(prompt)
    assert terms(choice, "a")["copy_s"] == 0.0
    assert terms(choice, "b")["copy_s"] == pytest.approx(4 * copied * s_per_byte)


@pytest.mark.parametrize(
    ("a", "copy_s"),
    [
        pytest.param(A, 4 * 8000 * DEFAULT_S_PER_BYTE, id="well"),
        pytest.param(replace(A, trouble=1.0), 0.0, id="failing"),
        pytest.param(replace(A, kv_usage=0.95), 0.0, id="memory full"),
    ],
)
def test_only_the_cache_of_a_target_that_is_well_is_a_reason_to_stay(a: TargetView, copy_s: float) -> None:
    policy = gorgo()
    serve(policy, asked("earlier"), "a", 0.0, 0.2, 1.0)
    choice = chosen(policy, asked("r"), [a, B], 1.0)
    assert terms(choice, "b")["copy_s"] == pytest.approx(copy_s, rel=0.05)
    assert terms(choice, "a")["copy_s"] == 0.0


@pytest.mark.parametrize(
    ("in_flight", "counted"),
    [
        pytest.param((10, 10), (3.0, 3.0), id="alike"),
        pytest.param((10, 11), (3.0, 3.3), id="within a tenth of the mean: three tenths each"),
        pytest.param((0, 20), (0.0, 20 - 0.7 * 11), id="beyond that in full"),
    ],
)
def test_differences_that_even_out_by_themselves_count_less(
    in_flight: tuple[int, int], counted: tuple[float, float]
) -> None:
    targets = [replace(A, in_flight=in_flight[0]), replace(B, in_flight=in_flight[1])]
    choice = chosen(gorgo(), asked("r"), targets)
    each = 2.0 * 200 * 4 * DEFAULT_S_PER_BYTE
    assert [terms(choice, one.id)["decode_s"] / each for one in targets] == pytest.approx(counted)


@pytest.mark.parametrize(
    ("sent", "target", "others"),
    [
        pytest.param(0, A, 1.0, id="nobody else: those who come next"),
        pytest.param(1, A, 1.0, id="one that waits"),
        pytest.param(3, A, 3.0, id="three that wait"),
        pytest.param(
            0, replace(A, pending=4), 4.4, id="four of other load balancers wait, and will be written to"
        ),
        pytest.param(0, replace(A, in_flight=8), 1.0, id="eight streams are less than one that waits"),
        pytest.param(0, replace(A, in_flight=40), 4.0, id="forty streams are as four"),
        pytest.param(2, replace(A, in_flight=40), 6.0, id="both"),
    ],
)
def test_the_burden_is_the_prefill_for_each_request_that_it_holds_up(
    sent: int, target: TargetView, others: float
) -> None:
    policy = gorgo()
    for number in range(sent):
        policy.record(asked(f"sent-{number}", bytes([65 + number]) * 400), "a", 0.0)
    explained = terms(chosen(policy, asked("r"), [target]), "a")
    assert explained["burden_s"] == pytest.approx(others * explained["prefill_s"])


def test_a_deeper_queue_of_others_ties_a_request_to_the_holder_of_its_prompt() -> None:
    """With as much to do everywhere, and the more of it, a miss is dearer."""
    policy = gorgo()
    serve(policy, asked("earlier"), "a", 0.0, 0.2, 1.0)
    for number in range(8):
        policy.record(asked(f"a-{number}", bytes([65 + number]) * 8000), "a", 1.0)
    assert chosen(policy, asked("r"), [A, B], 1.0).target_id == "b"  # 1.50 s of waiting against 1.13 s
    for number in range(4):
        policy.record(asked(f"b-{number}", bytes([75 + number]) * 6000), "b", 1.0)
    # 1.50 s of waiting against 0.56 s of it, 0.19 s for each of the four that wait and 0.94 s of prefill and copy
    assert chosen(policy, asked("r"), [A, B], 1.0).target_id == "a"


def wait_s(policy: Gorgo, target: TargetView, now: float) -> float:
    return terms(chosen(policy, asked("probe", b""), [target], now), target.id)["wait_s"]


def test_work_stands_in_the_queue_until_the_first_byte() -> None:
    policy, whole = gorgo(), 8000 * DEFAULT_S_PER_BYTE
    policy.record(asked("one"), "a", 0.0)
    policy.record(asked("two", OTHER), "a", 0.0)
    assert wait_s(policy, A, 0.0) == pytest.approx(2 * whole)
    policy.responded(asked("one"), "a", 0.3)
    assert wait_s(policy, A, 0.3) == pytest.approx(whole)
    policy.responded(asked("two", OTHER), "a", 0.5)
    assert wait_s(policy, A, 0.5) == 0.0
    policy.ended(asked("one"), "a", 2.0, 100)
    policy.ended(asked("two", OTHER), "a", 2.0, None)
    assert wait_s(policy, A, 2.0) == 0.0


def test_the_head_of_the_queue_makes_progress_and_only_the_head() -> None:
    policy, whole = gorgo(), 8000 * DEFAULT_S_PER_BYTE
    policy.record(asked("one"), "a", 0.0)
    policy.record(asked("two", OTHER), "a", 0.0)
    assert wait_s(policy, A, 0.1) == pytest.approx(2 * whole - 0.1)
    assert wait_s(policy, A, 60.0) == pytest.approx(whole)  # late, but it cannot be more than done
    policy.responded(asked("one"), "a", 60.0)
    assert wait_s(policy, A, 60.1) == pytest.approx(whole - 0.1)


def test_what_is_cached_is_no_work() -> None:
    policy = gorgo()
    serve(policy, asked("earlier"), "a", 0.0, 0.2, 1.0)
    policy.record(asked("again"), "a", 1.0)
    assert wait_s(policy, A, 1.0) == 0.0
    policy.record(asked("elsewhere"), "b", 1.0)
    assert wait_s(policy, B, 1.0) == pytest.approx(8000 * DEFAULT_S_PER_BYTE)


@pytest.mark.parametrize("tokens", [None, 0, 100])
def test_an_attempt_without_a_first_byte_leaves_at_its_end(tokens: int | None) -> None:
    policy = gorgo()
    policy.record(asked("r"), "a", 0.0)
    policy.ended(asked("r"), "a", 1.0, tokens)
    assert wait_s(policy, A, 1.0) == 0.0


def test_a_request_that_moves_on_leaves_the_first_target() -> None:
    policy = gorgo()
    policy.record(asked("r"), "a", 0.0)
    policy.ended(asked("r"), "a", 1.0, None)
    policy.record(asked("r"), "b", 1.0)
    assert (wait_s(policy, A, 1.0), wait_s(policy, B, 1.0)) == (0.0, pytest.approx(8000 * DEFAULT_S_PER_BYTE))


def test_late_news_of_a_generation_that_left_does_not_touch_the_next() -> None:
    policy = gorgo()
    policy.record(asked("old"), "a", 0.0)
    policy.forget("a")
    policy.record(asked("new", OTHER), "a", 1.0)
    policy.responded(asked("old"), "a", 1.0)
    policy.ended(asked("old"), "a", 1.0, None)
    assert wait_s(policy, A, 1.0) == pytest.approx(8000 * DEFAULT_S_PER_BYTE)
    assert chosen(policy, asked("r"), [A], 1.0).matched_bytes == 0


def test_requests_that_others_queued_count_as_usual_ones() -> None:
    policy = gorgo()
    assert wait_s(policy, replace(A, running=3, pending=2), 0.0) == pytest.approx(
        2 * 2000 * DEFAULT_S_PER_BYTE
    )
    policy.record(asked("r", b"x" * 2000), "a", 0.0)
    policy.record(asked("s", b"y" * 2000), "a", 0.0)
    ours_only = wait_s(policy, replace(A, pending=2), 0.0)
    assert ours_only == pytest.approx(4000 * DEFAULT_S_PER_BYTE)


@pytest.mark.parametrize(
    ("target", "expected_s", "ready"),
    [
        pytest.param(replace(A, running=10), 0.0, True, id="nothing pending"),
        pytest.param(replace(A, running=10, pending=9), 0.0, True, id="nine sent since the last report"),
        pytest.param(
            replace(A, running=10, pending=1, queued=1), 2.0, False, id="ten streams of 10 s, one pending"
        ),
        pytest.param(replace(A, running=10, pending=3, queued=1), 4.0, False, id="and two sent since"),
        pytest.param(
            replace(A, running=100, pending=3, queued=3), 0.4, True, id="of a hundred streams one ends sooner"
        ),
        pytest.param(
            replace(A, in_flight=43, waiting=3, pending=3, queued=3), 0.75, False, id="as we count them"
        ),
        pytest.param(
            replace(A, pending=1, queued=1), 10.0, False, id="of no stream it is known when it ends"
        ),
        pytest.param(
            replace(A, running=10, pending=1, queued=1, kv_usage=0.96), 2.0, False, id="the memory is full"
        ),
    ],
)
def test_an_engine_whose_batch_is_full_makes_a_request_wait_for_the_end_of_streams(
    target: TargetView, expected_s: float, ready: bool
) -> None:
    """However little prefill is ahead: the seats count."""
    policy = gorgo()
    serve(policy, asked("earlier", b""), "a", 0.0, 0.1, 10.1)
    for number in range(target.pending or 0):
        policy.record(asked(f"sent-{number}", b""), "a", 11.0)
    assert wait_s(policy, target, 11.2) == pytest.approx(expected_s)
    assert policy.ready(target, 11.2) is ready


def test_requests_that_are_not_late_wait_for_their_prefill_and_not_for_a_seat() -> None:
    """An engine that computes long prompts has some pending beside half a batch."""
    policy = gorgo()
    serve(policy, asked("earlier", b""), "a", 0.0, 0.1, 10.1)
    for number in range(3):
        policy.record(asked(f"sent-{number}", b"%d" % number * 20_000), "a", 11.0)
    target, prefill_s = replace(A, running=10, pending=3, queued=3), 20_000 * DEFAULT_S_PER_BYTE
    assert wait_s(policy, target, 11.2) == pytest.approx(3 * prefill_s - 0.2)
    late_s = prefill_s + 0.2
    assert wait_s(policy, target, 11.0 + late_s) == pytest.approx(4 * 10 / 10)


FULL = replace(A, running=40, pending=2, queued=2)


@pytest.mark.parametrize(
    ("target", "after_s", "expected_s"),
    [
        pytest.param(replace(A, running=40), 1.0, 0.25, id="full: one stream must end"),
        pytest.param(replace(A, running=39), 1.0, 0.0, id="the last seat is free"),
        pytest.param(replace(A, running=39, pending=1), 1.0, 10 / 39, id="and taken by one on its way"),
        pytest.param(replace(A, running=30, pending=3), 1.0, 0.0, id="three on their way to ten seats"),
        pytest.param(
            replace(A, running=30, pending=3, queued=3), 1.0, 0.0, id="those pending wait for prefill"
        ),
        pytest.param(
            replace(A, running=30, pending=3, queued=3), 18.0, 4 / 3, id="for long: the batch is smaller now"
        ),
        pytest.param(
            replace(A, running=30, pending=3, queued=3, kv_usage=0.97), 1.0, 4 / 3, id="or for memory"
        ),
        pytest.param(replace(A, running=60), 1.0, 10 / 60, id="more run than were seen before"),
    ],
)
def test_the_most_that_ran_while_some_were_pending_are_all_seats(
    target: TargetView, after_s: float, expected_s: float
) -> None:
    policy = gorgo()
    serve(policy, asked("earlier", b""), "a", 0.0, 0.1, 10.1)
    wait_s(policy, FULL, 11.0)
    for number in range(target.pending or 0):
        policy.record(asked(f"sent-{number}", b""), "a", 11.0)
    assert wait_s(policy, target, 11.0 + after_s) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("target", "cost_s", "ready"),
    [
        pytest.param(replace(A, running=38, pending=4), 3 * 10 / 38, False, id="two seats for four"),
        pytest.param(
            replace(A, running=36, pending=6), 0.0, False, id="four seats for six: it is held, and stays"
        ),
        pytest.param(
            replace(A, running=34, pending=12), 0.0, True, id="those pending are late to take their seats"
        ),
        pytest.param(replace(A, running=36, pending=3), 0.0, True, id="a seat for each"),
    ],
)
def test_where_to_wait_is_chosen_by_fewer_free_seats_than_whom_to_leave(
    target: TargetView, cost_s: float, ready: bool
) -> None:
    """Reports are late. A request that leaves the holder of its prompt for a seat that was free costs a prefill."""
    policy = gorgo()
    serve(policy, asked("earlier", b""), "a", 0.0, 0.1, 10.1)
    wait_s(policy, FULL, 11.0)
    for number in range(target.pending or 0):
        policy.record(asked(f"sent-{number}", b""), "a", 11.0)
    assert wait_s(policy, target, 11.1) == pytest.approx(cost_s)
    assert policy.ready(target, 11.1) is ready


def test_a_few_sequences_beside_pending_requests_are_no_full_batch() -> None:
    """An engine that computes long prompts runs two sequences while five wait for their prefill."""
    policy = gorgo()
    serve(policy, asked("earlier", b""), "a", 0.0, 0.1, 10.1)
    target = replace(A, running=2, pending=5, queued=5)
    for number in range(5):
        policy.record(asked(f"sent-{number}", b""), "a", 11.0)
    for now in (11.0, 11.1):
        assert wait_s(policy, target, now) == 0.0
        assert policy.ready(target, now)


def test_first_bytes_that_waited_for_a_seat_say_nothing_of_the_speed() -> None:
    """Else a second's wait of a request with nothing to compute looks like a slow target, and all its streams cost more."""
    full = replace(A, running=40, pending=3, queued=2)
    policies = (gorgo(), gorgo())
    for policy, view in zip(policies, (full, replace(A, running=3)), strict=True):
        for number in range(60):
            now = 10.0 * number
            request = asked(f"r-{number}", b"%05d" % number * (10 + number))
            chosen(policy, request, [view], now)
            serve(policy, request, "a", now, now + 1.0 + 0.01 * number, now + 9.0)
    waited, computed = (
        terms(chosen(policy, asked("next", b"?" * 8000), [A], 600.0), "a")["prefill_s"] for policy in policies
    )
    assert waited == pytest.approx(8000 * DEFAULT_S_PER_BYTE)
    assert computed > 1.5 * waited


def test_the_longer_of_the_two_waits_counts() -> None:
    policy = gorgo()
    serve(policy, asked("earlier", b""), "a", 0.0, 0.1, 10.1)
    policy.record(asked("long", LONG), "a", 11.0)
    target = replace(A, running=10, pending=1, queued=1)
    assert wait_s(policy, target, 11.0) == pytest.approx(len(LONG) * DEFAULT_S_PER_BYTE)


class _Engine:
    """Computes one prompt after the other, then writes 50 tokens in a second."""

    def __init__(self, name: str, s_per_byte: float) -> None:
        self.view = TargetView(name)
        self.s_per_byte = s_per_byte
        self.free_at = 0.0

    def first_byte_at(self, now: float, work_bytes: int) -> float:
        self.free_at = max(self.free_at, now + 0.02) + work_bytes * self.s_per_byte
        return self.free_at


def _run(
    policy: Gorgo, engines: list[_Engine], requests: int, gap_s: float, in_one_piece: bool = False
) -> list[str]:
    """Prompts that have nothing in common, in virtual time. Where they went."""
    rng, went = Random(11), []
    news: list[tuple[float, int, bool, RequestView, str]] = []
    by_name = {engine.view.id: engine for engine in engines}
    for index in range(requests):
        now = index * gap_s
        for at, _, ends, request, target_id in sorted(one for one in news if one[0] <= now):
            if ends:
                policy.ended(request, target_id, at, 50)
            else:
                policy.responded(request, target_id, at)
        news = [one for one in news if one[0] > now]
        prompt = rng.randbytes(rng.randrange(500, 12_000))
        request = asked(f"r{index}", prompt)
        target_id = chosen(policy, request, [engine.view for engine in engines], now).target_id
        policy.record(request, target_id, now)
        first = by_name[target_id].first_byte_at(now, len(prompt))
        news.append((first + in_one_piece * 1.0, 2 * index, False, request, target_id))
        news.append((first + 1.0, 2 * index + 1, True, request, target_id))
        went.append(target_id)
    return went


def rates(policy: Gorgo, engines: list[_Engine], now: float) -> list[float]:
    choice = chosen(policy, asked("probe", b"?" * 1000), [engine.view for engine in engines], now)
    return [terms(choice, engine.view.id)["prefill_s"] / 1000 for engine in engines]


def test_speeds_are_learned_and_the_work_follows_them() -> None:
    """One engine is four times faster than the other, and both are slower than assumed."""
    policy, engines = gorgo(), [_Engine("fast", 5e-5), _Engine("slow", 2e-4)]
    went = _run(policy, engines, 400, gap_s=0.3)
    fast, slow = rates(policy, engines, 400 * 0.3)
    assert fast == pytest.approx(5e-5, rel=0.2)
    assert slow == pytest.approx(2e-4, rel=0.25)  # it has few responses to be learned from
    share = went[200:].count("fast") / 200
    assert 0.7 < share < 0.95


def test_a_newcomer_is_thought_to_be_like_the_fleet() -> None:
    policy, engines = gorgo(), [_Engine("a", 1e-4), _Engine("b", 1e-4)]
    _run(policy, engines, 200, gap_s=0.5)
    assert rates(policy, [_Engine("new", 1.0)], 100.0)[0] == pytest.approx(1e-4, rel=0.15)


def test_answers_in_one_piece_do_not_teach() -> None:
    """Their first byte comes when everything is written: it is no measure of the prompt."""
    policy, engines = gorgo(), [_Engine("a", 1e-4)]
    _run(policy, engines, 100, gap_s=1.0, in_one_piece=True)
    assert rates(policy, engines, 100.0) == [pytest.approx(DEFAULT_S_PER_BYTE)]


def test_a_common_beginning_does_not_collapse_onto_one_target() -> None:
    """All prompts share 2000 bytes and none ends: four targets still share the work."""
    policy, rng = gorgo(), Random(5)
    targets = [TargetView(name) for name in "abcd"]
    for index in range(200):
        request = asked(f"r{index}", PROMPT[:2000] + rng.randbytes(1000))
        target = next(
            one for one in targets if one.id == chosen(policy, request, targets, index * 0.05).target_id
        )
        policy.record(request, target.id, index * 0.05)
        policy.responded(request, target.id, index * 0.05 + 0.04)
        target.in_flight += 1
    assert min(target.in_flight for target in targets) >= 40


# --- waiting for a target that has enough to do


@pytest.mark.parametrize(
    ("sent", "now", "waits"),
    [
        pytest.param([], 0.0, False, id="an idle target"),
        pytest.param([OTHER], 0.0, False, id="188 ms before it"),
        pytest.param([LONG], 0.0, True, id="3.6 s before it"),
        pytest.param([LONG], 0.7, False, id="of which the first 0.7 s are done"),
        pytest.param([OTHER] * 7, 0.0, False, id="the same short prompt again and again is computed once"),
        pytest.param([bytes([48 + n]) * 8000 for n in range(17)], 0.0, True, id="seventeen short prompts"),
    ],
)
def test_it_waits_while_its_target_has_three_seconds_of_prefill_before_it(
    sent: list[bytes], now: float, waits: bool
) -> None:
    policy = gorgo()
    for number, prompt in enumerate(sent):
        policy.record(asked(f"sent-{number}", prompt), "a", 0.0)
    assert chosen(policy, asked("r"), [A], now).wait is waits
    assert policy.ready(A, now) is not waits


def holding(prompt: bytes) -> Gorgo:
    """`a` has computed `prompt`, and is busy for three seconds with prompts that no other target has."""
    policy = gorgo()
    serve(policy, asked("earlier", prompt), "a", 0.0, 0.2, 1.0)
    for number in range(2):
        policy.record(asked(f"busy-{number}", bytes([65 + number]) * 64_000), "a", 1.0)
    return policy


@pytest.mark.parametrize(
    ("prompt", "target", "wait"),
    [
        pytest.param(LONG, "a", True, id="3 s of waiting spare 2.6 s of prefill, which weigh twice as much"),
        pytest.param(PROMPT, "b", False, id="they are too many for 0.2 s of prefill"),
    ],
)
def test_a_holder_is_worth_a_wait_that_the_prefill_outweighs(prompt: bytes, target: str, wait: bool) -> None:
    choice = chosen(holding(prompt), asked("r", prompt), [A, B], 1.0)
    assert (choice.target_id, choice.wait) == (target, wait)
    assert choice.put_off_s == 0.0  # the hit loses much by waiting, the miss need not wait


@pytest.mark.parametrize(
    ("prefill_s", "spared_s", "expected_s"),
    [
        pytest.param(0.0, 0.0, 22.5, id="nothing to compute, and nothing to lose"),
        pytest.param(0.0, 0.05, 12.5, id="a twentieth of a second to lose: 10 s sooner"),
        pytest.param(0.0, 0.5, 0.0, id="much to lose"),
        pytest.param(0.5, 0.5, 5.0, id="and half a second to compute: 5 s later"),
        pytest.param(0.5, 0.0, 27.5, id="a miss"),
        pytest.param(9.0, 9.0, 7.5, id="what will hold up others long, by 7.5 s at most"),
        pytest.param(9.0, 0.0, 30.0, id="the longest"),
    ],
)
def test_what_has_least_to_lose_by_waiting_waits(
    prefill_s: float, spared_s: float, expected_s: float
) -> None:
    assert put_off_s(prefill_s, spared_s) == pytest.approx(expected_s)


def test_what_all_have_is_not_lost_by_waiting() -> None:
    """A new conversation finds the instructions everywhere; the turn of an old one finds it at one target alone."""
    policy = gorgo()
    instructions, turns = PROMPT[:3200], PROMPT[:3200] + OTHER[:6400]
    for name in "ab":
        serve(policy, asked(f"first-{name}", instructions), name, 0.0, 0.2, 1.0)
    serve(policy, asked("turn", turns), "a", 0.0, 0.2, 1.0)
    full = [replace(target, running=8, pending=9, queued=9) for target in (A, B)]
    new, old = (
        chosen(policy, asked(f"r{len(prompt)}", prompt), full, 1.0)
        for prompt in (instructions + b"n" * 1600, turns + b"o" * 1600)
    )
    assert new.wait
    assert old.wait
    assert new.put_off_s - old.put_off_s == 22.5  # which loses 0.15 s


def hold(policy: Gorgo, request: RequestView, target: TargetView) -> None:
    choice = chosen(policy, request, [target])
    choice.put_off_s = put_off_s(terms(choice, target.id)["prefill_s"], 0.0)
    policy.queued(request, choice, 0.0)


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        pytest.param(OTHER, 1, id="one of the same size goes before"),
        pytest.param(b"x" * 100_000, 1, id="and before a larger one"),
        pytest.param(b"x" * 500, 0, id="but not before a much smaller one"),
    ],
)
def test_what_is_held_counts_for_those_that_go_later(prompt: bytes, before: int) -> None:
    policy = gorgo()
    held = asked("held")
    hold(policy, held, A)
    whole = 8000 * DEFAULT_S_PER_BYTE
    choice = chosen(policy, asked("r", prompt), [A])
    assert terms(choice, "a")["wait_s"] == pytest.approx(before * whole)
    assert terms(chosen(policy, held, [A]), "a")["wait_s"] == 0.0  # no request waits for itself
    policy.dequeued(held)
    assert terms(chosen(policy, asked("r", prompt), [A]), "a")["wait_s"] == 0.0
    policy.dequeued(held)  # a second time is fine


def test_a_request_held_for_another_target_leaves_the_first() -> None:
    policy = gorgo()
    held = asked("held")
    for target in (A, B):
        hold(policy, held, target)
    assert wait_s(policy, A, 0.0) == 0.0
    assert terms(chosen(policy, asked("r", OTHER), [B]), "b")["wait_s"] > 0.0


# --- sessions


SESSIONS = [f"session {number}" for number in range(40)]


def in_session(session: str, prompt: bytes = PROMPT) -> RequestView:
    return changed(asked("r", prompt), session=session)


def homes(targets: list[TargetView]) -> dict[str, str]:
    return {one: chosen(gorgo(), in_session(one), targets).target_id for one in SESSIONS}


def test_all_load_balancers_take_a_session_to_the_same_target() -> None:
    places = homes([A, B])
    assert set(places.values()) == {"a", "b"}
    policy = gorgo()
    serve(policy, asked("other", OTHER), "a", 0.0, 0.2, 1.0)  # another history
    assert {one: chosen(policy, in_session(one), [B, A], 1.0).target_id for one in SESSIONS} == places


@pytest.mark.parametrize(
    ("prompt", "taken_for_cached"),
    [
        pytest.param(PROMPT, len(PROMPT), id="all of a prompt that no target is known to have"),
        pytest.param(b"short", 1024, id="a kibibyte at least"),
    ],
)
def test_elsewhere_a_session_pays_for_what_its_own_target_may_have(
    prompt: bytes, taken_for_cached: int
) -> None:
    session = next(one for one, home in homes([A, B]).items() if home == "a")
    choice = chosen(gorgo(), in_session(session, prompt), [A, B])
    assert terms(choice, "a")["session_s"] == 0.0
    assert terms(choice, "b")["session_s"] == pytest.approx(taken_for_cached * DEFAULT_S_PER_BYTE)


@pytest.mark.parametrize(
    ("home", "winner"),
    [
        pytest.param(A, "a", id="its own"),
        pytest.param(replace(A, rtt_s=0.18), "a", id="188 ms of prefill are worth 180 ms of way"),
        pytest.param(replace(A, rtt_s=0.2), "b", id="and no 200 ms"),
        pytest.param(replace(A, trouble=1.0), "b", id="no session stays with a target that fails"),
    ],
)
def test_a_session_is_a_term_among_others(home: TargetView, winner: str) -> None:
    session = next(one for one, place in homes([A, B]).items() if place == "a")
    assert chosen(gorgo(), in_session(session), [home, B]).target_id == winner


def test_a_session_goes_where_its_prompt_is() -> None:
    """It has left its own target once; its cache is elsewhere now."""
    policy = gorgo()
    session = next(one for one, home in homes([A, B]).items() if home == "a")
    serve(policy, in_session(session), "b", 0.0, 0.2, 1.0)
    assert chosen(policy, in_session(session, PROMPT + b"and then?"), [A, B], 1.0).target_id == "b"


@pytest.mark.parametrize(
    ("idle_s", "share"),
    [
        pytest.param(0.0, 1.0, id="all of what the tree does not know"),
        pytest.param(600.0, 0.3679, id="a third after ten minutes"),
        pytest.param(3600.0, 0.0, id="then a kibibyte"),
    ],
)
def test_a_session_is_worth_less_the_longer_it_has_been_away(idle_s: float, share: float) -> None:
    """It has left the target of its hash: what it had computed is where it was served last."""
    policy = gorgo()
    session = next(one for one, home in homes([A, B]).items() if home == "a")
    policy.record(in_session(session), "b", 0.0)
    policy.responded(in_session(session), "b", 0.0)
    policy.ended(in_session(session), "b", 0.0, None)
    choice = chosen(policy, in_session(session, OTHER), [A, B], idle_s)
    worth = max(share * len(OTHER), 1024)
    assert terms(choice, "b")["session_s"] == 0.0
    assert terms(choice, "a")["session_s"] == pytest.approx(worth * DEFAULT_S_PER_BYTE, rel=1e-3)
    alone = chosen(policy, in_session(session, OTHER), [A], idle_s)
    assert terms(alone, "a")["session_s"] == 0.0, "its last target is not offered"


def test_of_too_many_sessions_those_are_forgotten_that_came_longest_ago() -> None:
    stays = Stays()
    for number in range(MOST_STAYS + 2):
        stays.served(in_session(str(number)), "a", float(number))
        stays.served(in_session("0"), "b", float(number))
    assert stays.of(in_session("1")) is None
    assert stays.of(in_session("2")) is None
    assert stays.of(in_session("3")) == ("a", 3.0)
    assert stays.of(in_session("0")) == ("b", MOST_STAYS + 1.0)


def test_a_session_whose_target_is_not_offered_has_another() -> None:
    session = next(one for one, home in homes([A, B]).items() if home == "a")
    assert chosen(gorgo(), in_session(session), [B]).target_id == "b"


def test_without_a_session_nothing_is_paid() -> None:
    choice = chosen(gorgo(), asked("r"), [A, B])
    assert {terms(choice, name)["session_s"] for name in "ab"} == {0.0}
