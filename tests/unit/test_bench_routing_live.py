"""The pure parts of `benchmarks.routing_live`: prompts as messages, responses read back, rounds compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import orjson
import pytest

from benchmarks.routing_client import Answer, Memory, NotAChat, Until, messages, read
from benchmarks.routing_live import COUNTER, busy_share, computed
from benchmarks.routing_live_report import CLAIMANT, COLUMNS, Middle, Row, comparison, render, verdict, worse
from benchmarks.traffic.chat import Chat
from benchmarks.traffic.measure import Metrics
from benchmarks.traffic.trees import Clients, TreesOfThought, made_up
from benchmarks.traffic.workloads import Call, Workload, walk
from skyserve_cli.engine import chat as template
from skyserve_cli.engine.metrics import Telemetry
from skyserve_cli.engine.model import EngineModel, Request
from skyserve_cli.engine.profiles import L4_8B
from skyserve_cli.engine.text import Language


def trees() -> Workload:
    return TreesOfThought(made_up(1, 5), [Clients(2, 2, 1)], seed=3)


def talk() -> Workload:
    return Chat(0.5, 60, seed=3)


# --- prompts


@pytest.mark.parametrize("make", [pytest.param(trees, id="trees"), pytest.param(talk, id="chat")])
def test_the_engine_makes_the_same_tokens_from_messages_as_the_workload_says(
    make: Callable[[], Workload],
) -> None:
    calls = list(walk(make()))
    assert len(calls) > 20
    for call in calls:
        assert template.tokens(messages(call.prompt.text)) == call.prompt.tokens


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(b"<|im_start|>user\nHi<|im_end|>\n", id="nobody is asked to answer"),
        pytest.param(
            b"Hi<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", id="words outside of messages"
        ),
        pytest.param(b"<|im_start|>user\nHi<|im_start|>assistant\n", id="a message without an end"),
    ],
)
def test_what_is_no_conversation_is_refused(prompt: bytes) -> None:
    with pytest.raises(NotAChat):
        messages(prompt)


def test_a_prompt_without_any_mark_of_the_template_is_one_message() -> None:
    assert messages(b"The sea") == [{"role": "user", "content": "The sea"}]


def test_what_was_really_said_takes_the_place_of_what_was_foreseen() -> None:
    memory = Memory()
    turns: dict[str, list[Call]] = {}
    for call in walk(talk()):
        turns.setdefault(call.session, []).append(call)
    three = next(calls for calls in turns.values() if len(calls) >= 3)[:3]
    for number, call in enumerate(three):
        said = [one["content"] for one in messages(memory.prompt(call)) if one["role"] == "assistant"]
        foreseen = [one["content"] for one in messages(call.prompt.text) if one["role"] == "assistant"]
        assert said == [f" answer {turn}" for turn in range(number)]
        assert len(foreseen) == number
        memory.hear(call, memory.prompt(call), f" answer {number}")
    users = [[one for one in messages(text) if one["role"] != "assistant"] for text in (
        memory.prompt(three[2]), three[2].prompt.text
    )]  # fmt: skip
    assert users[0] == users[1]


def test_prompts_that_repeat_no_answer_are_as_the_workload_says() -> None:
    memory = Memory()
    for call in walk(trees()):
        assert memory.prompt(call) == call.prompt.text
        memory.hear(call, call.prompt.text, " something else")


@pytest.mark.parametrize("until_s", [0.0, 20.0, 45.0])
def test_nobody_calls_after_the_end(until_s: float) -> None:
    everything = {call.id for call in walk(talk())}
    arrivals = list(Until(talk(), until_s).opening())
    assert all(one.at_s < until_s for one in arrivals)
    some = {call.id for call in walk(Until(talk(), until_s))}
    assert some < everything
    assert bool(some) == (until_s > 0)


# --- responses


def chunk(content: str | None, **more: object) -> bytes:
    choices = [] if content is None else [{"index": 0, "delta": {"content": content}}]
    return b"data: " + orjson.dumps({"choices": choices} | more) + b"\n\n"


USAGE = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("stream", "answer"),
    [
        pytest.param(
            [chunk(" a"), chunk(" b"), chunk(None, usage=USAGE), DONE],
            Answer("", text=" a b", prompt_tokens=40, cached_tokens=32, response_tokens=2),
            id="whole",
        ),
        pytest.param(
            [b": comment\n\n", chunk(" a"), chunk("", usage={**USAGE, "prompt_tokens_details": None}), DONE],
            Answer("", text=" a", prompt_tokens=40, response_tokens=2),
            id="an engine that does not tell what was cached",
        ),
        pytest.param([chunk(" a"), DONE], Answer("the stream ended early"), id="without usage"),
        pytest.param(
            [chunk(" a"), chunk(None, usage=USAGE)], Answer("the stream ended early"), id="without its last event"
        ),
        pytest.param(
            [chunk(" a"), b'data: {"error": {"code": "x"}}\n\n'],
            Answer("error event: {'code': 'x'}"),
            id="an error in its midst",
        ),
    ],
)  # fmt: skip
def test_an_answer_is_read_from_its_stream(stream: list[bytes], answer: Answer) -> None:
    assert read(b"".join(stream)) == answer


# --- counters


def test_the_work_of_an_engine_is_what_it_has_computed() -> None:
    model = EngineModel(L4_8B, Language())
    telemetry = Telemetry(model, "m")

    def counters() -> dict[str, float]:
        return {name.decode(): float(value) for name, value in COUNTER.findall(telemetry.exposition())}

    prompt = tuple(range(40))
    for number in range(2):
        before = counters()
        model.submit(Request(str(number), prompt, max_tokens=8, ignore_eos=True), now=float(number))
        now = number + 0.5
        while model.wakes_at(now) is not None:
            now += model.step(now).duration_s
        assert computed(before, counters()) == 8 + (40 if number == 0 else 40 - 32)


def test_the_machine_is_as_busy_as_its_ticks_say() -> None:
    assert busy_share((100, 1000), (130, 1040)) == pytest.approx(0.75)


# --- rounds

METRICS = Metrics(
    calls=100, refused=0, hit_rate=0.8, foreseen=0, ttft_p50_s=1, ttft_p90_s=2, ttft_p99_s=3, e2e_p50_s=4,
    e2e_p90_s=5, normalized_p99_s=1, held_p50_s=0, held_p90_s=0, tokens_per_s=1000, calls_per_s=5, imbalance=1.1,
    preemptions=0,
)  # fmt: skip


def row(number: int, system: str, hit_rate: float, ttft_p90_s: float) -> Row:
    metrics = replace(METRICS, hit_rate=hit_rate, ttft_p90_s=ttft_p90_s)
    return Row(number, "trees", system, "1", metrics, wall_s=30, busy=0.5)


def two(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> list[Row]:
    return [
        row(number, system, *values)
        for system, several in ((CLAIMANT, ours), ("sglang-router", theirs))
        for number, values in enumerate(several, 1)
    ]


def test_systems_are_compared_within_rounds() -> None:
    # The machine was slow in round 2, for both: the ratio of the medians would be another.
    rows = two([(0.8, 1.0), (0.8, 10.0), (0.7, 3.0)], [(0.7, 2.0), (0.8, 20.0), (0.8, 2.0)])
    hits, p90 = (next(column for column in COLUMNS if column.head == head) for head in ("hit rate", "p90"))
    assert comparison(rows, hits, CLAIMANT, "sglang-router") == pytest.approx((0.0, -0.1, 0.1, 3))
    assert comparison(rows, p90, CLAIMANT, "sglang-router") == pytest.approx((0.5, 0.5, 1.5, 3))
    assert comparison(rows, p90, CLAIMANT, "smg") is None


@pytest.mark.parametrize(
    ("head", "middle", "said"),
    [
        pytest.param("p90", Middle(0.8, 0.7, 0.9, 5), "better", id="sooner is better"),
        pytest.param("p90", Middle(1.2, 1.1, 1.3, 5), "worse", id="later is worse"),
        pytest.param("p90", Middle(0.8, 0.7, 1.0, 5), "", id="an interval that touches one is noise"),
        pytest.param("p90", Middle(0.8, 0.8, 0.8, 1), "", id="one round says nothing"),
        pytest.param("hit rate", Middle(0.02, 0.01, 0.03, 5), "better", id="more hits are better"),
        pytest.param("hit rate", Middle(-0.02, -0.03, -0.01, 5), "worse", id="fewer hits are worse"),
        pytest.param("tokens/s", Middle(1.2, 1.1, 1.3, 5), "better", id="more tokens are better"),
    ],
)
def test_only_a_whole_interval_is_a_difference(head: str, middle: Middle, said: str) -> None:
    assert verdict(middle, next(column for column in COLUMNS if column.head == head)) == said


def test_what_is_worse_in_every_round_is_named() -> None:
    fine = two([(0.8, 1.0), (0.9, 3.0)], [(0.8, 1.1), (0.8, 2.0)])
    slow = two([(0.8, 2.0), (0.9, 3.0)], [(0.8, 1.0), (0.8, 2.0)])
    assert worse(fine) == []
    assert worse(slow) == ["trees: p90 1.75 [1.50, 2.00]"]
    assert worse([one for one in slow if one.system == CLAIMANT]) == []


def test_rows_survive_being_kept() -> None:
    one = replace(row(1, "smg", 0.8, 1.0), faults=("0-1.: status 503",))
    again = Row.from_json(json.loads(json.dumps(one.to_json())))
    assert asdict(again) == asdict(one) | {"faults": ["0-1.: status 503"]}


def test_a_table_tells_medians_intervals_and_who_ran_nowhere() -> None:
    rows = two([(0.8, 1.0), (0.9, 3.0), (0.85, 2.0)], [(0.7, 2.0), (0.7, 2.5), (0.7, 4.0)])
    simulated = Row(1, "trees", "simulated gorgo", "", METRICS)
    values, compared = render([*rows, simulated], "four engines").split("Compared")
    assert _cells(values)["gorgo 1"] == [
        *("0.850 [0.800, 0.900]", "1.00 [1.00, 1.00]", "2.00 [1.00, 3.00]", "3.00 [3.00, 3.00]"),
        *("1000 [1000, 1000]", "1.10 [1.10, 1.10]", "0", "30", "50%", "0.000"),
    ]
    assert _cells(values)["simulated gorgo"][-4:] == ["0", "", "", ""]
    assert _cells(compared)[CLAIMANT][0] == "+0.150 [+0.100, +0.200] better"
    assert _cells(compared)[CLAIMANT][2] == "0.50 [0.50, 1.20]"
    assert _cells(compared)["simulated gorgo"][0] == "+0.100"


def _cells(table: str) -> dict[str, list[str]]:
    lines = [line.split("|") for line in table.splitlines()]
    return {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines if len(line) > 3}
