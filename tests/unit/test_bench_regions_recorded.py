"""Recorded conversations as clients of regions, and the tables of the papers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.regions.__main__ import check_clients, main
from benchmarks.regions.measure import Figures
from benchmarks.regions.papers import CLAIMS, rows, scenarios
from benchmarks.regions.recorded import Recorded, load_conversations
from benchmarks.regions.rules import RULES
from benchmarks.regions.scenario import ScenarioError
from benchmarks.traffic.workloads import Call

REGIONS = {"us": 1, "eu": 1}
COUNTRIES = {"us": ["United States"], "eu": ["France", "Germany"]}


def talk(*texts: str) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * len(texts), texts, strict=False)
    ]


WILDCHAT: list[dict[str, object]] = [
    {"conversation": talk("hello", "hi", "more", "less"), "country": "United States", "hashed_ip": "a"},
    {"conversation": talk("bonjour", "salut"), "country": "France", "hashed_ip": "b"},
    {"conversation": talk("hola", "hola"), "country": "Spain", "hashed_ip": "c"},
    {"conversation": talk("no response"), "country": "France", "hashed_ip": "d"},
    {"conversation": talk("long " * 9000, "short"), "country": "France", "hashed_ip": "e"},
]


def written(path: Path, lines: list[dict[str, object]]) -> str:
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def opened(workload: Recorded) -> dict[str, Call]:
    """The first call of each region."""
    calls = [arrival.call for arrival in workload.opening()]
    return {workload.region_of(call): call for call in calls}


def test_conversations_of_wildchat_enter_where_their_users_are(tmp_path: Path) -> None:
    path = written(tmp_path / "w.jsonl", WILDCHAT)
    made = Recorded(
        REGIONS,
        1,
        path=path,
        format="wildchat",
        clients={"us": 1, "eu": 1},
        countries=COUNTRIES,
        length_s=10.0,
    )
    calls = opened(made)
    assert {region: call.session for region, call in calls.items()} == {"us": "a", "eu": "b"}
    first = calls["us"]
    (second,) = made.ended(first, 3.0)
    assert (second.at_s, second.call.session, made.region_of(second.call)) == (3.0, "a", "us")
    assert second.call.prompt.text.startswith(first.prompt.text)
    assert b"more" in second.call.prompt.text
    (again,) = made.ended(second.call, 5.0)  # it is over: the only one of the region begins again
    assert again.call.prompt == first.prompt
    assert list(made.ended(calls["eu"], 11.0)) == []


def test_users_of_arena_are_spread_over_the_regions(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [
        {"conversation_a": talk(f"question {n}", "response"), "judge": f"judge_{n}"} for n in range(20)
    ]
    path = written(tmp_path / "a.jsonl.gz", lines)
    made = Recorded(REGIONS, 1, path=path, format="arena", clients={"us": 2, "eu": 2})
    assert set(opened(made)) == {"us", "eu"}
    assert {one.user for one in load_conversations(Path(path), "arena", limit=3)} == {
        "judge_0",
        "judge_1",
        "judge_2",
    }


def test_marks_of_a_template_in_a_text_are_text(tmp_path: Path) -> None:
    line: dict[str, object] = {"conversation": talk("<|im_end|>", "x"), "country": "France"}
    path = written(tmp_path / "w.jsonl", [line])
    made = Recorded(REGIONS, 1, path=path, format="wildchat", clients={"eu": 1}, countries=COUNTRIES)
    assert opened(made)["eu"].prompt.text.count(b"<|im_end|>") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "gone.jsonl", "format": "arena"}, "gone.jsonl"),
        ({"format": "chat"}, "unknown format 'chat'; known: wildchat, arena"),
        ({"clients": {"us": 1, "eu": 1}, "countries": {"us": ["United States"]}}, "clients.eu"),
        ({"format": "arena"}, "line 2 is no conversation of arena"),
    ],
)
def test_a_wrong_file_is_named_in_one_sentence(
    tmp_path: Path, options: Mapping[str, object], message: str
) -> None:
    lines = WILDCHAT[:1] + ([{"no": 1}] if options == {"format": "arena"} else [])
    path = written(tmp_path / "w.jsonl", lines)
    given = {"path": path, "format": "wildchat", "clients": {"us": 1}, **options}
    (scenario, _) = scenarios(1.0)["arena"]
    wrong = replace(scenario, clients=replace(scenario.clients, kind="recorded", options=given))
    with pytest.raises(ScenarioError, match=message):
        check_clients(wrong)


def test_the_papers_are_compared_by_the_rules_that_their_claims_need() -> None:
    some = Figures(10, 0, 0.2, 1.0, 3.0, 5.0, 9.0, 1000.0, 0.5, 0.1, 0.9, 1.0, 0.1, 100.0)
    runs = {}
    for name, (scenario, rules) in scenarios(30.0).items():
        check_clients(scenario)
        assert set(rules) <= set(RULES)
        runs[name] = dict.fromkeys(rules, some)
    found = rows(runs)
    assert len(found) == len(CLAIMS)
    assert {row[3] for row in found} == {"1.00", "50.0"}


def test_the_papers_need_a_file_that_exists(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["regions", "papers", "--arena", "gone.jsonl"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "no such file: gone.jsonl" in capsys.readouterr().err
