"""The engine in virtual time: its seconds, its queue, its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyserve_cli.engine.kv import BLOCK_TOKENS, blocks_for
from skyserve_cli.engine.model import EngineModel, FinishReason, Request, RequestRefused, TokenOutput
from skyserve_cli.engine.profiles import A100_7B, L4_8B, PROFILES, Profile, assumed
from skyserve_cli.engine.text import EOS, Language
from tests.clouds.schedules import examples

TINY = replace(
    L4_8B,
    name="tiny",
    kv_capacity=assumed(256, "tokens", "test"),  # 16 blocks
    max_num_seqs=assumed(4, "sequences", "test"),
    max_batched_tokens=assumed(32, "tokens", "test"),
    max_model_len=assumed(128, "tokens", "test"),
)


def engine(profile: Profile = TINY, mean_output_tokens: float = 200) -> EngineModel:
    return EngineModel(profile, Language(0, mean_output_tokens))


def request(name: str, prompt: Sequence[int] | int = 20, max_tokens: int = 10, **more: Any) -> Request:
    """A prompt given as a number is that many tokens that no other name shares."""
    if isinstance(prompt, int):
        unique = sum(letter * 31**place for place, letter in enumerate(name.encode()))
        prompt = [1_000 + unique + position for position in range(prompt)]
    return Request(name, tuple(prompt), max_tokens, **({"ignore_eos": True} | more))


def run(model: EngineModel, now: float = 0.0) -> list[tuple[float, TokenOutput]]:
    """Until there is no work: every token with the moment it existed."""
    outputs = []
    while (begins_at := model.wakes_at(now)) is not None:
        step = model.step(begins_at)
        now = begins_at + step.duration_s
        outputs += [(now, output) for output in step.outputs]
    return outputs


def tokens_of(outputs: list[tuple[float, TokenOutput]], name: str) -> list[int]:
    return [output.token for _, output in outputs if output.request_id == name]


def first_token_s(outputs: list[tuple[float, TokenOutput]], name: str) -> float:
    return next(moment for moment, output in outputs if output.request_id == name)


def audit(model: EngineModel) -> None:
    """Blocks and references as the running sequences say they must be."""
    cache = model.cache
    leases = [sequence.lease for sequence in model._running]
    assert all(lease is not None for lease in leases)
    references = Counter(id(node) for lease in leases if lease is not None for node in lease.path)
    nodes = list(cache.nodes())
    assert all(node.references == references[id(node)] for node in nodes)
    assert all(node.references >= sum(c.references for c in node.children.values()) for node in nodes)
    private = sum(lease.private for lease in leases if lease is not None)
    used = sum(1 for node in nodes if node.references) + private
    assert cache.in_use == used
    assert cache.cached == sum(1 for node in nodes if not node.references)
    assert cache.free + cache.cached + cache.in_use == cache.capacity
    assert min(cache.free, cache.cached, cache.in_use) >= 0
    assert model.running <= TINY.max_num_seqs.value
    for sequence, lease in zip(model._running, leases, strict=True):
        assert lease is not None
        assert (
            sequence.computed
            <= lease.blocks * BLOCK_TOKENS
            <= blocks_for(len(sequence.tokens)) * BLOCK_TOKENS
        )


# Time


@pytest.mark.parametrize(
    ("profile", "prompt_tokens", "first_token_after_ms"),
    [
        # base + t0 + a * tokens + b + c * tokens / 1000
        pytest.param("l4-8b", 512, 20 + 67 + 0.55 * 512 + 0.25 + 0.58 * 0.512, id="l4-8b, one chunk"),
        pytest.param("a100-7b", 1000, 150.7 + 12 + 94 + 0.05 + 0.086, id="a100-7b, one chunk"),
        # chunks of 2048 and 952 tokens: t0 and b twice, and the second reads what the first has computed
        pytest.param(
            "h100-70b",
            3000,
            40 + 2 * 29.3 + 0.118 * 3000 + 2 * 0.35 + 0.033 * (2.048 + 3.0),
            id="h100-70b, two chunks",
        ),
    ],
)
def test_a_lone_request_takes_the_time_of_the_formula(
    profile: str, prompt_tokens: int, first_token_after_ms: float
) -> None:
    model = engine(PROFILES[profile])
    model.submit(request("a", prompt_tokens, max_tokens=2), now=5.0)
    (first, _), (second, _) = run(model, now=5.0)
    assert first - 5.0 == pytest.approx(first_token_after_ms / 1000)
    chosen = PROFILES[profile]
    decode_ms = (
        chosen.weights.value
        + chosen.per_sequence.value
        + chosen.per_context.value * (prompt_tokens + 1) / 1000
    )
    assert second - first == pytest.approx(decode_ms / 1000)


def test_a_batch_decodes_many_sequences_in_little_more_time_than_one() -> None:
    model = engine(A100_7B)
    for name in range(64):
        model.submit(request(f"r{name}", prompt=16, max_tokens=200), now=0.0)
    outputs = run(model)
    assert len(outputs) == 64 * 200
    seconds = outputs[-1][0]
    # 64 sequences of at most 216 context tokens: no step of the batch is slower than this one.
    slowest_step_ms = 12 + 0.05 * 64 + 0.086 * 64 * 0.216
    assert 64 * 200 / seconds > 64 / (slowest_step_ms / 1000) * 0.9
    assert 64 * 200 / seconds < 64 / 0.012


def test_a_long_prompt_does_not_stall_those_who_decode() -> None:
    model = engine(L4_8B)
    model.submit(request("talker", prompt=16, max_tokens=40), now=0.0)
    now = 0.0
    for _ in range(3):
        now = model.wakes_at(now) or now
        now += model.step(now).duration_s
    model.submit(request("reader", prompt=6_000, max_tokens=1), now=now)
    outputs = run(model, now)
    reader_ready = first_token_s(outputs, "reader")
    meanwhile = [output for moment, output in outputs if moment < reader_ready]
    # Three chunks of prompt, a token of the talker in each iteration (the last one ends with the reader's).
    assert len(meanwhile) >= 3
    assert {output.request_id for output in meanwhile} == {"talker"}


def test_a_cached_prefix_shortens_prefill_by_exactly_its_tokens() -> None:
    model = engine(L4_8B)
    prompt = list(range(1_000, 2_000))
    model.submit(request("cold", prompt, max_tokens=1), now=0.0)
    cold = first_token_s(run(model), "cold")
    model.submit(request("warm", prompt, max_tokens=1), now=100.0)
    outputs = run(model, 100.0)
    warm = first_token_s(outputs, "warm") - 100.0
    # 999 // 16 blocks: the last token is always computed.
    assert outputs[0][1].cached_tokens == 992
    assert cold - warm == pytest.approx(992 * 0.55 / 1000)
    assert (model.counters.prefix_queries, model.counters.prefix_hits) == (2000, 992)


@pytest.mark.parametrize(("prompt_tokens", "cached"), [(15, 0), (16, 0), (17, 16), (64, 48), (65, 64)])
def test_the_last_token_of_a_prompt_is_always_computed(prompt_tokens: int, cached: int) -> None:
    model = engine()
    prompt = list(range(1_000, 1_000 + prompt_tokens))
    for name in ("cold", "warm"):
        model.submit(request(name, prompt, max_tokens=1), now=0.0)
        outputs = run(model)
    assert outputs[0][1].cached_tokens == cached


def test_the_next_turn_finds_the_previous_answer_too() -> None:
    model = engine()
    model.submit(request("turn-1", prompt=30, max_tokens=20), now=0.0)
    said = tokens_of(run(model), "turn-1")
    history = [*request("turn-1", prompt=30).prompt, *said]
    model.submit(request("turn-2", [*history, 5, 6, 7], max_tokens=1), now=50.0)
    # The last token said was never fed back, so its block (tokens 48-49) is incomplete: 48 are found.
    assert run(model, 50.0)[0][1].cached_tokens == 48


# Order and room


def test_first_come_first_served_and_nobody_overtakes() -> None:
    model = engine()
    model.submit(request("big-1", prompt=100, max_tokens=20), now=0.0)
    model.submit(request("big-2", prompt=100, max_tokens=20), now=0.0)
    model.submit(request("big-3", prompt=100, max_tokens=20), now=0.0)  # 7 + 7 + 7 blocks > 16
    model.submit(request("small", prompt=16, max_tokens=1), now=0.0)  # would fit
    outputs = run(model)
    firsts = [first_token_s(outputs, name) for name in ("big-1", "big-2", "big-3", "small")]
    assert firsts == sorted(firsts)
    assert firsts[2] > max(moment for moment, output in outputs if output.request_id == "big-1")


def test_without_room_a_request_is_pending() -> None:
    model = engine()
    for name in ("a", "b", "c"):
        model.submit(request(name, prompt=100, max_tokens=20), now=0.0)
    assert (model.waiting, model.running) == (0, 0)
    now = model.wakes_at(0.0)
    assert now == pytest.approx(0.020)
    for _ in range(8):
        assert now is not None
        now += model.step(now).duration_s
    assert (model.waiting, model.running) == (1, 2)
    assert model.kv_usage == pytest.approx(14 / 16)


def test_the_batch_holds_max_num_seqs_and_not_one_more() -> None:
    model = engine()
    for name in "abcdef":
        model.submit(request(name, prompt=2, max_tokens=5), now=0.0)
    model.step(0.020)
    assert (model.running, model.waiting) == (4, 2)
    assert len(run(model, 0.1)) == 6 * 5 - 4


def test_a_full_cache_preempts_the_youngest_which_says_the_same_as_undisturbed() -> None:
    crowded = engine()
    for name in ("old", "middle", "young"):
        crowded.submit(request(name, prompt=60, max_tokens=60), now=0.0)
    outputs = run(crowded)
    assert crowded.counters.preemptions > 0
    for name in ("old", "middle", "young"):
        alone = engine()
        alone.submit(request(name, prompt=60, max_tokens=60), now=0.0)
        assert tokens_of(outputs, name) == tokens_of(run(alone), name)
    ends = [max(m for m, o in outputs if o.request_id == name) for name in ("old", "middle", "young")]
    assert ends == sorted(ends)


def test_a_preempted_request_comes_back_before_those_who_came_later() -> None:
    model = engine()
    for name in ("old", "middle", "young"):
        model.submit(request(name, prompt=60, max_tokens=60), now=0.0)
    model.submit(request("late", prompt=100, max_tokens=1), now=0.0)
    now = 0.020
    while not model.counters.preemptions:
        now += model.step(now).duration_s
    assert (model.running, model.waiting) == (2, 2)
    outputs = run(model, now)
    assert first_token_s(outputs, "young") < first_token_s(outputs, "late")


@pytest.mark.parametrize(
    ("prompt", "admitted"),
    [pytest.param(112, True, id="a block is left"), pytest.param(113, False, id="no block would be left")],
)
def test_a_prompt_is_admitted_with_a_block_to_spare(prompt: int, admitted: bool) -> None:
    model = engine()
    model.submit(request("first", prompt=120, max_tokens=1), now=0.0)  # 8 of 16 blocks
    model.submit(request("second", prompt=prompt, max_tokens=1), now=0.0)
    now = 0.020
    for _ in range(3):
        now += model.step(now).duration_s
    model.begin(now)  # 32 of 120 tokens per iteration: the first prompt has just left budget for another
    assert (model.running, model.waiting) == ((2, 0) if admitted else (1, 1))


# Ends


@pytest.mark.parametrize(
    ("asked", "reason", "least", "most"),
    [
        pytest.param({"max_tokens": 7, "ignore_eos": True}, FinishReason.LENGTH, 7, 7, id="ignore_eos"),
        pytest.param({"max_tokens": 100, "ignore_eos": False}, FinishReason.STOP, 1, 99, id="end token"),
        pytest.param(
            {"max_tokens": 100, "ignore_eos": False, "min_tokens": 60},
            FinishReason.STOP,
            61,
            99,
            id="min_tokens",
        ),
    ],
)
def test_how_an_answer_ends(asked: dict[str, Any], reason: FinishReason, least: int, most: int) -> None:
    model = engine(mean_output_tokens=5)
    model.submit(request("a", prompt=20, **asked), now=0.0)
    outputs = [output for _, output in run(model)]
    assert least <= len(outputs) <= most
    assert [output.finish for output in outputs if output.finish] == [reason] == [outputs[-1].finish]
    assert (outputs[-1].token == EOS) is (reason is FinishReason.STOP)
    assert model.counters.finished[reason] == 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        pytest.param(request("a", prompt=[]), "empty", id="an empty prompt"),
        pytest.param(request("a", max_tokens=0), "at least 1", id="no output"),
        pytest.param(request("a", prompt=100, max_tokens=29), "context of 128", id="more than the context"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(wrong: Request, sentence: str) -> None:
    model = engine()
    with pytest.raises(RequestRefused, match=sentence):
        model.submit(wrong, now=0.0)
    assert model.wakes_at(0.0) is None


def test_an_id_is_served_once_at_a_time() -> None:
    model = engine()
    model.submit(request("a"), now=0.0)
    with pytest.raises(RequestRefused, match="already"):
        model.submit(request("a"), now=0.0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"kv_capacity": assumed(128, "tokens", "test")}, id="a cache smaller than a request"),
        pytest.param({"max_batched_tokens": assumed(4, "tokens", "test")}, id="no room for prompts"),
    ],
)
def test_a_profile_that_could_hang_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tiny"):
        engine(replace(TINY, **change))


@pytest.mark.parametrize("steps", [0, 1, 3, 6, 12], ids=lambda n: f"after {n} iterations")
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_an_abort_frees_everything_wherever_the_request_is(steps: int, name: str) -> None:
    model = engine()
    for other in ("a", "b", "c"):
        model.submit(request(other, prompt=100, max_tokens=20), now=0.0)
    now = 0.020
    for _ in range(steps):
        now += model.step(now).duration_s
    assert model.abort(name)
    assert not model.abort(name)
    audit(model)
    outputs = run(model, now)
    assert tokens_of(outputs, name) == []
    assert model.counters.finished == {FinishReason.ABORT: 1, FinishReason.LENGTH: 2, FinishReason.STOP: 0}
    assert (model.cache.in_use, model.running, model.waiting) == (0, 0, 0)


def test_an_abort_during_an_iteration_takes_its_token_back() -> None:
    model = engine()
    model.submit(request("a"), now=0.0)
    model.submit(request("b"), now=0.0)
    model.begin(0.020)
    model.abort("a")
    assert model.cache.in_use == blocks_for(20)
    # The budget of 32 tokens was spent on the 20 of the aborted prompt and 12 of the other.
    assert model.finish() == ()
    outputs = run(model, 1.0)
    assert (len(tokens_of(outputs, "a")), len(tokens_of(outputs, "b"))) == (0, 10)


def test_iterations_do_not_overlap() -> None:
    model = engine()
    with pytest.raises(RuntimeError, match="no iteration"):
        model.finish()
    model.begin(0.0)
    with pytest.raises(RuntimeError, match="under way"):
        model.begin(0.0)


def test_an_idle_engine_asks_for_nothing() -> None:
    model = engine()
    assert model.wakes_at(3.0) is None
    assert model.step(3.0) == (0.0, ())


def test_the_end_token_may_follow_min_tokens_at_once() -> None:
    model = engine(mean_output_tokens=1)
    model.submit(request("a", max_tokens=20, min_tokens=6, ignore_eos=False), now=0.0)
    tokens = tokens_of(run(model), "a")
    assert (len(tokens), tokens.index(EOS)) == (7, 6)


# Everything at once

ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 100), st.integers(1, 28), st.integers(0, 3)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort in step"), st.integers(0, 30)),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_nothing_is_lost_nothing_ends_twice_and_blocks_add_up(actions: list[tuple[Any, ...]]) -> None:
    model = engine(mean_output_tokens=30)
    twin = engine(mean_output_tokens=30)
    now, submitted = 0.0, 0
    ends: Counter[str] = Counter()
    emitted: list[list[TokenOutput]] = [[], []]

    def step(cancel: str | None = None) -> None:
        nonlocal now
        begins_at = model.wakes_at(now)
        assert begins_at == twin.wakes_at(now)
        if begins_at is None:
            return
        durations = [one.begin(begins_at) for one in (model, twin)]
        assert durations[0] == durations[1] >= 0
        if cancel is not None:
            abort(cancel)
        for one, log in zip((model, twin), emitted, strict=True):
            log += (outputs := one.finish())
            if one is model:
                ends.update(output.request_id for output in outputs if output.finish)
        now = begins_at + durations[0]
        audit(model)

    def abort(name: str) -> None:
        known = model.abort(name)
        assert twin.abort(name) is known
        if known:
            ends[name] += 1

    for action, *values in actions:
        if action == "submit":
            length, max_tokens, family = values
            prompt = [family, *range(length - 1)]  # families share prefixes
            for one in (model, twin):
                one.submit(Request(f"r{submitted}", tuple(prompt), max_tokens), now)
            submitted += 1
        elif action == "step":
            for _ in range(values[0]):
                step()
        elif action == "abort":
            abort(f"r{values[0]}")
            audit(model)
        else:
            step(cancel=f"r{values[0]}")
    bound = 100 + 200 * submitted
    while model.wakes_at(now) is not None and bound:
        step()
        bound -= 1
    assert dict(ends) == {f"r{number}": 1 for number in range(submitted)}
    assert sum(model.counters.finished.values()) == submitted
    assert model.cache.in_use == 0
    assert list(model.live()) == []
    assert emitted[0] == emitted[1]
