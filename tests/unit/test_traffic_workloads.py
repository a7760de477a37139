"""The workloads of the traffic simulator: what they contain, what they share, and that a seed decides all of it."""

from __future__ import annotations

import gzip
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import orjson
import pytest

from benchmarks.traffic.burst import Burst, WithBurst
from benchmarks.traffic.chat import Chat, Habits
from benchmarks.traffic.documents import Documents, Library
from benchmarks.traffic.measure import ideal_hit_rate
from benchmarks.traffic.mooncake import Mooncake, Recorded, load_mooncake
from benchmarks.traffic.trees import Clients, Problem, TreesOfThought, load_gsm8k, made_up
from benchmarks.traffic.workloads import (
    Call,
    Prose,
    Spread,
    Workload,
    exponential,
    geometric,
    join,
    message,
    passage,
    walk,
)
from skyserve_cli.engine.chat import tokens as chat_tokens
from skyserve_cli.engine.text import EOS, decode, encode

DATA = Path(os.environ.get("SKYSERVE_TRACES", Path(__file__).parents[3] / "shared" / "traces")) / "workload"
GSM8K = DATA / "gsm8k_train.jsonl.gz"
MOONCAKE = DATA / "mooncake_conversation_trace.jsonl.gz"


def trees(seed: int = 1, **options: object) -> TreesOfThought:
    return TreesOfThought(made_up(7, 40), [Clients(3, 2, 2)], seed, **options)  # type: ignore[arg-type]


def chat(seed: int = 1) -> Chat:
    return Chat(2.0, 30.0, seed)


def recorded() -> list[Recorded]:
    """Four requests: all begin with block 0, two share the next as well."""
    return [
        Recorded(0.0, 1024, 80, (0, 1)),
        Recorded(0.0, 1500, 16, (0, 1, 2)),
        Recorded(3.0, 700, 8, (0, 3)),
        Recorded(6.0, 512 * 40, 8, (0, *range(4, 43))),
    ]


def mooncake(seed: int = 1) -> Mooncake:
    return Mooncake(recorded(), seed)


def documents(seed: int = 1) -> Documents:
    return Documents(2.0, 15.0, seed, Library(documents=8, document_tokens=Spread(600, 900, 500, 1000)))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How long they are equal from the start."""
    differ = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "trees": trees,
    "chat": chat,
    "mooncake": mooncake,
    "documents": documents,
}


@pytest.fixture(params=WORKLOADS, ids=str)
def make(request: pytest.FixtureRequest) -> Callable[[int], Workload]:
    return WORKLOADS[request.param]


class TestEveryWorkload:
    def test_a_seed_decides_everything(self, make: Callable[[int], Workload]) -> None:
        def told(seed: int) -> list[tuple[str, bytes, tuple[int, ...], tuple[int, ...], str, str]]:
            return [
                (call.id, call.prompt.text, call.prompt.tokens, call.answer, call.scope, call.session)
                for call in walk(make(seed))
            ]

        assert told(1) == told(1)

    def test_ids_are_unique_and_nothing_is_empty(self, make: Callable[[int], Workload]) -> None:
        calls = list(walk(make(1)))
        assert max(Counter(call.id for call in calls).values()) == 1
        assert all(call.prompt.text and call.prompt.tokens and call.answer and call.session for call in calls)

    def test_the_opening_is_in_order_of_time(self, make: Callable[[int], Workload]) -> None:
        instants = [arrival.at_s for arrival in make(1).opening()]
        assert instants == sorted(instants)

    def test_common_bytes_are_common_tokens(self, make: Callable[[int], Workload]) -> None:
        """The balancer and the engine must agree about what two prompts share, or no policy could be judged."""
        calls = list(walk(make(1)))[:30]
        for one in calls:
            for other in calls:
                in_bytes = common(one.prompt.text, other.prompt.text)
                in_tokens = common(one.prompt.tokens, other.prompt.tokens)
                share_bytes = in_bytes / len(one.prompt.text)
                share_tokens = in_tokens / len(one.prompt.tokens)
                assert share_bytes == pytest.approx(share_tokens, abs=0.06)


@pytest.mark.parametrize("make", [trees, chat, documents], ids=["trees", "chat", "documents"])
def test_other_seeds_are_other_words(make: Callable[[int], Workload]) -> None:
    assert next(walk(make(1))).prompt != next(walk(make(2))).prompt


@pytest.mark.parametrize("make", [trees, chat, documents], ids=["trees", "chat", "documents"])
def test_tokens_are_those_of_the_text(make: Callable[[int], Workload]) -> None:
    for call in walk(make(1)):
        assert list(call.prompt.tokens) == encode(call.prompt.text.decode())


class TestText:
    def test_a_message_is_written_as_the_engine_writes_it(self) -> None:
        said = [("system", " be kind"), ("user", " hello, how\nare you?"), ("assistant", " fine")]
        ours = join(
            [*(message(role, passage(text)) for role, text in said), passage("<|im_start|>assistant\n")]
        )
        messages = [{"role": role, "content": text} for role, text in said]
        assert ours.tokens == chat_tokens(messages)

    def test_prose_has_the_length_that_was_asked_for(self) -> None:
        prose = Prose(random.Random(1))
        for length in (0, 1, 17, 400):
            piece = prose.passage(length)
            assert len(piece.tokens) == length
            assert decode(piece.tokens) == piece.text.decode()

    @pytest.mark.parametrize(
        ("spread", "low", "high"),
        [
            pytest.param(Spread(129, 400), 1, 1e9, id="free"),
            pytest.param(Spread(129, 400, 100, 150), 100, 150, id="bounded on both sides"),
        ],
    )
    def test_a_spread_has_its_quantiles_and_bounds(self, spread: Spread, low: float, high: float) -> None:
        rng = random.Random(1)
        drawn = sorted(spread.draw(rng) for _ in range(20_000))
        assert low <= drawn[0]
        assert drawn[-1] <= high
        assert median(drawn) == pytest.approx(129, rel=0.05)
        assert drawn[18_000] == pytest.approx(min(400, high), rel=0.05)

    def test_chance_has_the_means_it_promises(self) -> None:
        rng = random.Random(1)
        assert fmean(exponential(rng, 3.0) for _ in range(20_000)) == pytest.approx(3.0, rel=0.03)
        turns = [geometric(rng, 3.0) for _ in range(20_000)]
        assert min(turns) == 1
        assert fmean(turns) == pytest.approx(3.0, rel=0.03)
        assert {geometric(rng, 1.0) for _ in range(100)} == {1}


class TestTrees:
    @pytest.mark.parametrize(("branches", "requests"), [(1, 4), (2, 15), (3, 40), (4, 85)])
    def test_a_tree_has_a_request_per_node(self, branches: int, requests: int) -> None:
        workload = TreesOfThought(made_up(1, 3), [Clients(2, branches, 3)], 1)
        by_tree = Counter(call.session for call in walk(workload))
        assert set(by_tree.values()) == {requests}
        assert len(by_tree) == 6

    def test_no_problem_is_posed_twice_while_there_are_others(self) -> None:
        workload = TreesOfThought(made_up(1, 10), [Clients(2, 1, 2), Clients(1, 2, 6)], 1)
        questions = {
            call.session: call.prompt.text.split(b"user")[1].split(b"\nNext step")[0]
            for call in walk(workload)
            if call.id.endswith(".")
        }
        assert len(questions) == len(set(questions.values())) == 10

    def test_children_wait_for_their_parent_and_take_up_its_thoughts(self) -> None:
        workload = TreesOfThought(made_up(1, 3), [Clients(1, 2, 1)], 1)
        (root,) = (arrival.call for arrival in workload.opening())
        children = [arrival.call for arrival in workload.ended(root, 12.0)]
        assert [child.id for child in children] == [f"{root.id}A", f"{root.id}B"]
        said = decode(root.answer, skip_special=True)
        for child in children:
            taken_up = common(root.prompt.text, child.prompt.text)
            thought = child.prompt.text[taken_up:].split(b"\nNext step")[0].decode()
            assert thought in said

    def test_the_next_tree_begins_when_the_last_request_of_this_one_has_ended(self) -> None:
        workload = TreesOfThought(made_up(1, 3), [Clients(1, 2, 2)], 1)
        pending = [arrival.call for arrival in workload.opening()]
        sessions = []
        while pending:
            call = pending.pop()
            sessions.append(call.session)
            pending += [arrival.call for arrival in workload.ended(call, 1.0)]
        assert sessions == ["0-0"] * 15 + ["0-1"] * 15

    def test_what_is_said_does_not_depend_on_who_came_first(self) -> None:
        """Or policies would be compared on different workloads."""

        def said(last_first: bool) -> dict[str, tuple[bytes, tuple[int, ...]]]:
            workload = trees(musing_tokens=Spread(20, 60))
            pending = [arrival.call for arrival in workload.opening()]
            heard = {}
            while pending:
                call = pending.pop(-1 if last_first else 0)
                heard[call.id] = (call.prompt.text, call.answer)
                pending += [arrival.call for arrival in workload.ended(call, 0.0)]
            return heard

        assert said(last_first=True) == said(last_first=False)

    def test_musing_is_said_but_not_taken_up(self) -> None:
        plain, wordy = list(walk(trees())), list(walk(trees(musing_tokens=Spread(100, 300))))
        assert fmean(len(call.prompt.tokens) for call in wordy) == pytest.approx(
            fmean(len(call.prompt.tokens) for call in plain), rel=0.05
        )
        assert fmean(len(call.answer) for call in wordy) > 2 * fmean(len(call.answer) for call in plain)
        assert all(call.answer[-1] == EOS for call in wordy)

    def test_without_problems_there_is_nothing_to_think_about(self) -> None:
        with pytest.raises(ValueError, match="problems"):
            TreesOfThought([], [Clients(1)], 1)

    def test_problems_are_read_as_they_are_published(self, tmp_path: Path) -> None:
        path = tmp_path / "train.jsonl.gz"
        lines = [
            {"question": "How many?", "answer": "one\ntwo"},
            {"question": "Why?", "answer": "a\nb\nc\nd\ne"},
        ]
        with gzip.open(path, "wb") as out:
            out.write(b"\n".join(orjson.dumps(line) for line in lines))
        assert load_gsm8k(path) == [
            Problem("How many?", ("one", "two", "two", "two")),
            Problem("Why?", ("a", "b", "c", "d")),
        ]
        assert len(load_gsm8k(path, limit=1)) == 1

    @pytest.mark.long
    @pytest.mark.skipif(not GSM8K.exists(), reason="needs the GSM8K training set")
    @pytest.mark.parametrize(("shared_tokens", "ideal"), [(0, 0.658), (300, 0.893), (1000, 0.960)], ids=str)
    def test_the_ideal_hit_rate_is_the_one_that_was_measured(self, shared_tokens: int, ideal: float) -> None:
        """On another tokenizer, hence the tolerance; SkyWalker's engines found 0.896 to 0.900 of the prompts."""
        workload = TreesOfThought(load_gsm8k(GSM8K, 200), [Clients(40, 2, 5)], 1, shared_tokens=shared_tokens)
        assert ideal_hit_rate(walk(workload)) == pytest.approx(ideal, abs=0.01 if shared_tokens else 0.04)

    @pytest.mark.skipif(not GSM8K.exists(), reason="needs the GSM8K training set")
    def test_made_up_problems_are_like_the_real_ones(self) -> None:
        def ideal(problems: list[Problem]) -> float:
            return ideal_hit_rate(walk(TreesOfThought(problems, [Clients(20, 2, 2)], 1)))

        assert ideal(made_up(1, 200)) == pytest.approx(ideal(load_gsm8k(GSM8K, 200)), abs=0.015)


class TestChat:
    def test_a_turn_is_sent_with_all_that_was_said_before(self) -> None:
        by_user: dict[str, list[Call]] = {}
        for call in walk(chat()):
            by_user.setdefault(call.session, []).append(call)
        long = [calls for calls in by_user.values() if len(calls) > 1]
        assert long
        for calls in long:
            for before, after in pairwise(calls):
                assert after.prompt.tokens[: len(before.prompt.tokens) + len(before.answer)] == (
                    before.prompt.tokens + before.answer
                )

    def test_conversations_of_a_tenant_begin_alike_and_others_do_not(self) -> None:
        heads: dict[str, set[tuple[int, ...]]] = {}
        for call in walk(chat()):
            heads.setdefault(call.scope, set()).add(call.prompt.tokens[:200])
        assert len(heads) > 1
        assert all(len(several) == 1 for several in heads.values())
        assert len(set.union(*heads.values())) == len(heads)

    def test_people_think_before_they_write(self) -> None:
        workload = chat()
        gaps = []
        for arrival in list(workload.opening()):
            gaps += [later.at_s - 100.0 for later in workload.ended(arrival.call, 100.0)]
        assert gaps
        assert min(gaps) >= Habits().think_s.low

    def test_a_conversation_ends_before_it_is_too_long(self) -> None:
        workload = Chat(2.0, 30.0, 1, Habits(turns_mean=50, longest_tokens=1000))
        turns = Counter(call.session for call in walk(workload))
        assert max(turns.values()) > 1
        assert max(turns.values()) < 20

    def test_more_traffic_changes_no_conversation(self) -> None:
        def first_of_user_0(rate: float) -> Call:
            return next(call for call in walk(Chat(rate, 30.0, 1)) if call.session == "user-0")

        assert first_of_user_0(1.0).prompt == first_of_user_0(3.0).prompt


class TestMooncake:
    def test_equal_ids_are_equal_prompts_for_both_parties(self) -> None:
        a, b, c, _ = sorted(walk(mooncake()), key=lambda call: int(call.id))
        assert len(a.prompt.tokens) == 128
        assert b.prompt.tokens[:128] == a.prompt.tokens
        assert b.prompt.text.startswith(a.prompt.text)
        assert c.prompt.tokens[:64] == a.prompt.tokens[:64]
        assert common(c.prompt.text, a.prompt.text) < 64 * 4 + 4
        assert common(c.prompt.tokens, a.prompt.tokens) == 64
        assert [len(call.answer) for call in (a, b, c)] == [10, 2, 1]

    def test_speed_and_steps(self) -> None:
        slow = [arrival.at_s for arrival in Mooncake(recorded(), 1).opening()]
        fast = [arrival.at_s for arrival in Mooncake(recorded(), 1, speed=2.0).opening()]
        assert fast == pytest.approx([at_s / 2 for at_s in slow])
        assert [int(at_s // 3) for at_s in slow] == [0, 0, 1, 2]

    def test_what_no_engine_could_hold_is_left_out(self) -> None:
        workload = Mooncake(recorded(), 1, longest_tokens=1000)
        assert sorted(call.id for call in walk(workload)) == ["0", "1", "2"]

    @pytest.mark.parametrize("shrink", [0, 3, 64])
    def test_blocks_shrink_to_whole_engine_blocks_only(self, shrink: int) -> None:
        with pytest.raises(ValueError, match="shrink"):
            Mooncake(recorded(), 1, shrink=shrink)

    @pytest.mark.skipif(not MOONCAKE.exists(), reason="needs the Mooncake conversation trace")
    def test_the_ideal_hit_rate_is_the_one_that_was_measured(self) -> None:
        trace = load_mooncake(MOONCAKE)
        assert len(trace) == 12_031
        workload = Mooncake(trace, 1, longest_tokens=1_000_000)
        assert ideal_hit_rate(walk(workload)) == pytest.approx(0.374, abs=0.002)


class TestIdealHitRate:
    @staticmethod
    def calls(*prompts: str) -> Iterator[Call]:
        for index, prompt in enumerate(prompts):
            yield Call(str(index), passage(prompt), (EOS,))

    @pytest.mark.parametrize(
        ("prompts", "ideal"),
        [
            pytest.param(("." * 32,), 0.0, id="nothing is known at first"),
            pytest.param(("." * 33, "." * 33), 32 / 66, id="whole blocks"),
            pytest.param(("." * 32, "." * 32), 16 / 64, id="never the last token"),
            pytest.param(("." * 20 + "," * 20, "." * 40), 16 / 80, id="not behind a difference"),
            pytest.param(("." * 33, "," * 16 + "." * 17), 0.0, id="not behind another prefix"),
        ],
    )
    def test_counts_blocks_as_engines_do(self, prompts: tuple[str, ...], ideal: float) -> None:
        assert ideal_hit_rate(self.calls(*prompts)) == ideal

    def test_answers_are_remembered_too(self) -> None:
        first = Call("0", passage("." * 16), tuple(encode("," * 16)))
        then = Call("1", passage("." * 16 + "," * 16 + "!"), (EOS,))
        assert ideal_hit_rate([first, then]) == pytest.approx(32 / 49)


class TestDocuments:
    def test_a_question_shares_its_whole_document_and_nothing_else(self) -> None:
        calls = list(walk(documents()))
        by_session: dict[str, list[Call]] = {}
        for call in calls:
            by_session.setdefault(call.session, []).append(call)
        one, other = next(several for several in by_session.values() if len(several) > 1)[:2]
        stranger = next(call for call in calls if call.session != one.session)
        assert common(one.prompt.tokens, other.prompt.tokens) >= 500
        assert common(one.prompt.tokens, stranger.prompt.tokens) < 20

    def test_documents_are_of_8_to_40_thousand_tokens_and_hot_ones_are_asked_about_more(self) -> None:
        calls = list(Documents(4.0, 50.0, 1).opening())
        lengths = [len(arrival.call.prompt.tokens) for arrival in calls]
        assert min(lengths) > 8_000
        assert max(lengths) < 43_000
        asked = Counter(arrival.call.session for arrival in calls)
        assert asked["document-0"] > 3 * median(asked.values())

    def test_more_questions_per_second_are_the_same_questions_sooner(self) -> None:
        slow, fast = list(Documents(1.0, 20.0, 1).opening()), list(Documents(2.0, 20.0, 1).opening())
        assert [one.call.prompt for one in slow] == [one.call.prompt for one in fast[: len(slow)]]
        assert [one.at_s for one in slow] == pytest.approx([2 * one.at_s for one in fast[: len(slow)]])


@pytest.mark.parametrize(
    ("at_s", "moved"),
    [(5.0, 5.0), (10.0, 10.0), (16.0, 12.0), (40.0, 20.0), (41.0, 21.0)],
    ids=["before", "as it begins", "within", "as it ends", "after"],
)
def test_a_burst_plays_a_stretch_faster_and_moves_what_follows(at_s: float, moved: float) -> None:
    assert Burst(at_s=10.0, length_s=10.0, times=3.0).moved(at_s) == pytest.approx(moved)


def test_a_burst_keeps_every_call() -> None:
    plain = [arrival.call.id for arrival in documents().opening()]
    burst = WithBurst(documents(), Burst(at_s=2.0, length_s=2.0, times=3.0))
    assert [arrival.call.id for arrival in burst.opening()] == plain
