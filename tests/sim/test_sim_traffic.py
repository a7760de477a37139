"""The traffic simulator: the production balancer in virtual time. Books balance, seeds repeat, and what selective
pushing and prefix routing are for can be seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

import pytest

from benchmarks.traffic.burst import Burst, WithBurst
from benchmarks.traffic.chat import Chat
from benchmarks.traffic.documents import Documents, Library
from benchmarks.traffic.driver import Outcome, Setting, run
from benchmarks.traffic.measure import Served, ideal_hit_rate, measure, quantile, working_set_tokens
from benchmarks.traffic.mooncake import Mooncake, Recorded
from benchmarks.traffic.script import Script
from benchmarks.traffic.trees import Clients, TreesOfThought, made_up
from benchmarks.traffic.workloads import Arrival, Call, Passage, Spread, Workload, walk
from lb.config.options import Limits, Pushing, PushMode
from policies.routing.base import RoutingPolicy
from policies.routing.prefix_tree import PrefixTree
from policies.routing.registry import POLICIES
from skyserve_cli.engine.model import EngineModel, Request
from skyserve_cli.engine.profiles import A100_7B, L4_8B, Profile, assumed
from skyserve_cli.engine.text import EOS

PROBLEMS = made_up(3, 60)


def small(**values: int) -> Profile:
    """An L4 with other limits."""
    changed = {name: assumed(value, getattr(L4_8B, name).unit, "test") for name, value in values.items()}
    return replace(L4_8B, **changed)  # type: ignore[arg-type]


def trees(seed: int = 1, clients: int = 6) -> TreesOfThought:
    return TreesOfThought(PROBLEMS, [Clients(clients, 2, 2)], seed, musing_tokens=Spread(20, 60, 1, 100))


class Listed:
    """Calls at given instants, and nothing after them."""

    name = "listed"

    def __init__(self, arrivals: Iterable[tuple[float, Call]]) -> None:
        self._arrivals = [Arrival(at_s, call) for at_s, call in arrivals]
        self.over: list[tuple[str, float]] = []

    def opening(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def ended(self, call: Call, now: float) -> Iterable[Arrival]:
        self.over.append((call.id, now))
        return ()


def call(name: str, prompt_tokens: int = 40, response_tokens: int = 10, like: int = 0) -> Call:
    tokens = tuple([1000 + like] * prompt_tokens)
    return Call(
        name, Passage(bytes([65 + like]) * (4 * prompt_tokens), tokens), (7,) * (response_tokens - 1) + (EOS,)
    )


class TestBooks:
    @pytest.mark.parametrize("policy", sorted(POLICIES))
    @pytest.mark.parametrize("mode", list(PushMode), ids=lambda mode: mode.value)
    def test_every_call_is_served_once_in_every_mode(self, policy: str, mode: PushMode) -> None:
        outcome = run(
            trees(), Setting(policy=policy, profiles=(L4_8B,) * 3, pushing=Pushing(mode=mode, cap=4))
        )
        assert Counter(one.call_id for one in outcome.served) == Counter(one.id for one in walk(trees()))
        assert outcome.refused == 0

    def test_instants_are_in_order_and_engines_told_the_truth(self) -> None:
        outcome = run(trees(), Setting(profiles=(L4_8B,) * 2))
        by_id = {one.id: one for one in walk(trees())}
        for one in outcome.served:
            assert one.arrived_at <= one.pushed_at < one.first_at <= one.ended_at
            assert 0 <= one.cached_tokens < one.prompt_tokens == len(by_id[one.call_id].prompt.tokens)
            assert one.response_tokens == len(by_id[one.call_id].answer)

    def test_a_lone_call_takes_what_the_profile_says(self) -> None:
        one = run(Listed([(1.0, call("a", 512, 3))]), Setting(profiles=(L4_8B,), rtt_s=0.010)).served[0]
        prefill_s = L4_8B.iteration_s(512, 1, 512)
        decode_s = L4_8B.iteration_s(0, 1, 513) + L4_8B.iteration_s(0, 1, 514)
        assert one.first_at - one.arrived_at == pytest.approx(0.010 + L4_8B.base_s + prefill_s)
        assert one.ended_at - one.first_at == pytest.approx(decode_s)

    def test_a_full_queue_refuses_and_an_old_ticket_expires(self) -> None:
        setting = Setting(
            profiles=(small(max_num_seqs=1),),
            pushing=Pushing(mode=PushMode.FIXED_CAP, cap=1),
            limits=Limits(hold_s=5.0, max_held=2),
        )
        arrivals = [(0.1 * index, call(str(index), response_tokens=100)) for index in range(5)]
        workload = Listed(arrivals)
        outcome = run(workload, setting)
        assert [one.call_id for one in outcome.served] == ["0"]  # it takes 100 iterations of 67 ms
        assert outcome.refused == 4
        over = dict(workload.over)
        assert [over["3"], over["4"]] == pytest.approx([0.3, 0.4])  # the room was full
        assert [over["1"], over["2"]] == pytest.approx([5.1, 5.2])  # their time was over

    def test_held_calls_go_first_come_first_served(self) -> None:
        setting = Setting(profiles=(L4_8B,), pushing=Pushing(mode=PushMode.FIXED_CAP, cap=1))
        outcome = run(Listed([(0.01 * index, call(str(index))) for index in range(6)]), setting)
        assert [one.call_id for one in outcome.served] == list("012345")

    def test_an_engine_finds_the_answer_it_gave_in_the_next_prompt(self) -> None:
        workload = Chat(0.2, 60.0, 1)
        outcome = run(workload, Setting(policy="prefix_tree", profiles=(L4_8B,) * 2))
        by_id = {one.id: one for one in walk(Chat(0.2, 60.0, 1))}
        later = [one for one in outcome.served if not one.call_id.endswith(".0")]
        assert later
        whole = 0
        for one in later:
            user, turn = one.call_id.split(".")
            before = by_id[f"{user}.{int(turn) - 1}"]
            known = len(before.prompt.tokens) + len(before.answer)
            whole += one.cached_tokens >= known - 16
        assert whole > 0.9 * len(later)


class TestRepeatability:
    def test_same_seed_same_digest_and_another_seed_another(self) -> None:
        setting = Setting(policy="power_of_two", profiles=(L4_8B,) * 3)
        first, again, other = (run(trees(seed), setting).digest for seed in (1, 1, 2))
        assert first == again
        assert first != other

    def test_the_hash_seed_of_the_process_does_not_matter(self) -> None:
        program = (
            "from benchmarks.traffic.driver import Setting, run\n"
            "from benchmarks.traffic.chat import Chat\n"
            "from skyserve_cli.engine.profiles import L4_8B\n"
            "print(run(Chat(1.0, 20.0, 1), Setting('prefix_tree', (L4_8B,) * 3)).digest)"
        )
        digests = {
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
                capture_output=True,
                check=True,
                text=True,
            ).stdout
            for hash_seed in ("1", "2")
        }
        assert len(digests) == 1


class TestWhatItIsFor:
    """Each claim with room to spare: these are tests of the machinery, the numbers come from `benchmarks.routing`."""

    @pytest.mark.parametrize("policy", ["cache_aware", "prefix_tree", "consistent_hash"])
    def test_affinity_beats_chance_and_stays_below_the_ideal(self, policy: str) -> None:
        def workload() -> Workload:
            return TreesOfThought(PROBLEMS, [Clients(16, 2, 2)], 1)

        profiles = (L4_8B,) * 4
        blind = run(workload(), Setting("round_robin", profiles)).metrics().hit_rate
        aware = run(workload(), Setting(policy, profiles)).metrics().hit_rate
        assert (
            blind + 0.03 < aware <= ideal_hit_rate(walk(workload())) + 0.02
        )  # the first tenth is not counted

    def test_selective_pushing_keeps_the_line_out_of_the_engines(self) -> None:
        """A burst that two engines of four slots cannot take: pushed blindly, some waits behind a full engine while
        the other has room; held, it goes where room is."""
        lengths = [10 if index % 2 else 80 for index in range(24)]
        burst = [(0.0, call(str(index), 40, length, like=index % 20)) for index, length in enumerate(lengths)]

        def slowest(mode: PushMode) -> float:
            setting = Setting(
                "round_robin", (small(max_num_seqs=4),) * 2, pushing=Pushing(mode=mode, probe_s=0.05)
            )
            return max(one.ended_at for one in run(Listed(burst), setting).served)

        assert slowest(PushMode.SELECTIVE) < 0.9 * slowest(PushMode.BLIND)

    def test_while_engines_have_room_nobody_is_held_for_long(self) -> None:
        outcome = run(trees(clients=4), Setting("prefix_tree", (L4_8B,) * 4))
        assert max(one.pushed_at - one.arrived_at for one in outcome.served) < 0.5

    @pytest.mark.parametrize("policy", ["cache_aware", "prefix_tree", "gorgo"])
    def test_one_block_that_all_share_does_not_gather_them_on_one_engine(self, policy: str) -> None:
        setting = Setting(policy, (L4_8B,) * 4, pushing=Pushing(mode=PushMode.BLIND))
        assert run(one_common_block(), setting).metrics().imbalance < 1.5

    def test_following_the_longest_prefix_and_nothing_else_collapses(self) -> None:
        """So the workload of the test above is one that can go wrong."""

        def longest_prefix(_: str) -> RoutingPolicy:
            return PrefixTree(0.0, requests_per_byte=inf, gate_slack=inf, give_up=0.0, min_match_bytes=0)

        setting = Setting(
            PrefixTree.name,
            (L4_8B,) * 4,
            pushing=Pushing(mode=PushMode.BLIND),
            make_policy=longest_prefix,
        )
        assert run(one_common_block(), setting).metrics().imbalance > 3.5


def one_common_block() -> Mooncake:
    """Four blocks each, the first of them common to all."""
    recorded = [
        Recorded(0.2 * index, 512 * 4, 200, (0, *range(1 + 3 * index, 4 + 3 * index))) for index in range(300)
    ]
    return Mooncake(recorded, 1)


class TestScript:
    def test_an_engine_says_what_it_was_given_whatever_happens_to_it(self) -> None:
        """The cache holds one and a half of the requests, so one is preempted and computed again."""
        script = Script()
        engine = EngineModel(small(kv_capacity=400, max_model_len=300), script)
        answers = {"a": tuple(range(5000, 5150)), "b": tuple(range(6000, 6150))}
        for number, (name, answer) in enumerate(answers.items()):
            script.cast(number, answer)
            prompt = (number + 1,) * 100
            engine.submit(Request(name, prompt, len(answer), ignore_eos=True, seed=number), 0.0)
        said: dict[str, list[int]] = {"a": [], "b": []}
        now = 1.0
        while engine.wakes_at(now) is not None:
            step = engine.step(now)
            now += step.duration_s
            for output in step.outputs:
                said[output.request_id].append(output.token)
        assert engine.counters.preemptions > 0
        assert {name: tuple(tokens) for name, tokens in said.items()} == answers


def served(index: int, *, engine: int = 0, held_s: float = 0.0, cached: int = 0) -> Served:
    """One call a second, first token after half a second, over after two."""
    return Served(
        call_id=str(index),
        engine=engine,
        arrived_at=float(index),
        pushed_at=index + held_s,
        first_at=index + 0.5,
        ended_at=index + 2.0,
        prompt_tokens=100,
        cached_tokens=cached,
        response_tokens=20,
        prompt_bytes=400,
        matched_bytes=4 * cached,
    )


class TestMeasure:
    def test_a_steady_run(self) -> None:
        metrics = measure([served(index, engine=index % 2, held_s=0.2, cached=40) for index in range(100)], 2)
        assert metrics.calls == 100
        assert metrics.hit_rate == metrics.foreseen == 0.4
        assert (metrics.ttft_p50_s, metrics.e2e_p90_s, metrics.held_p90_s) == pytest.approx((0.5, 2.0, 0.2))
        assert (metrics.calls_per_s, metrics.tokens_per_s) == pytest.approx((1.0, 20.0))
        assert metrics.normalized_p99_s == pytest.approx(0.1)
        assert metrics.imbalance == 1.0

    @pytest.mark.parametrize(
        ("share_of_first", "imbalance"),
        [(0.5, 1.0), (0.75, 1.5), (1.0, 2.0)],
        ids=["even", "skewed", "all on one"],
    )
    def test_imbalance_is_the_busiest_over_the_mean(self, share_of_first: float, imbalance: float) -> None:
        calls = [
            served(index, engine=0 if index % 20 < 20 * share_of_first else 1) for index in range(1, 2001)
        ]
        assert measure(calls, 2).imbalance == pytest.approx(imbalance, abs=0.01)

    def test_the_first_tenth_fills_the_caches_and_is_not_counted(self) -> None:
        metrics = measure([served(index, cached=0 if index < 10 else 50) for index in range(100)], 1)
        assert metrics.hit_rate == 0.5

    def test_what_calls_share_is_in_the_working_set_once(self) -> None:
        calls = [call("a", 160, 17), call("b", 160, 1), call("c", 40, 1, like=1)]
        assert working_set_tokens(calls) == 160 + 16 + 32

    def test_too_little_cannot_be_measured(self) -> None:
        with pytest.raises(ValueError, match="too few"):
            measure([served(0)], 1)

    @pytest.mark.parametrize(
        ("share", "value"),
        [(0.0, 1.0), (0.5, 2.5), (1.0, 4.0), (0.9, 3.7)],
        ids=["least", "median", "most", "p90"],
    )
    def test_quantiles(self, share: float, value: float) -> None:
        assert quantile([1.0, 2.0, 3.0, 4.0], share) == pytest.approx(value)


def hit_rate(outcome: Outcome, since_s: float, until_s: float) -> float:
    """Of the calls that arrived in between."""
    calls = [one for one in outcome.served if since_s <= one.arrived_at < until_s]
    return sum(one.cached_tokens for one in calls) / sum(one.prompt_tokens for one in calls)


@pytest.mark.long
def test_a_burst_of_questions_about_shared_documents_keeps_its_hits() -> None:
    """The holders are the ones without room. Who is pushed to where there is room misses; who waits does not."""
    burst = Burst(at_s=40.0, length_s=10.0, times=3.0)

    def played(mode: PushMode) -> Outcome:
        questions = Documents(2.2, 90.0, 1, Library(documents=40))
        setting = Setting(policy="gorgo", profiles=(A100_7B,) * 4, pushing=Pushing(mode))
        return run(WithBurst(questions, burst), setting)

    by_work, selective = played(PushMode.WORK), played(PushMode.SELECTIVE)
    before = hit_rate(by_work, 20.0, burst.at_s)
    assert hit_rate(by_work, burst.at_s, burst.ends_at) >= before
    assert hit_rate(by_work, burst.ends_at, 90.0) >= before
    assert hit_rate(selective, burst.at_s, burst.ends_at) < before - 0.1
