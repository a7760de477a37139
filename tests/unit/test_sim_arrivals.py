"""Requests as they arrive: constant, drawn, and recorded."""

from __future__ import annotations

import gzip
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyserve_cli.sim import arrivals
from skyserve_cli.sim.arrivals import Arrivals, arrivals_of, constant, load_arrivals, poisson
from skyserve_cli.sim.trace import TraceError

RISING = Arrivals("rising", (0.0, 10.0, 20.0), (0.0, 10.0, 40.0))


def loaded(tmp_path: Path, text: str) -> Arrivals:
    path = tmp_path / "requests"
    path.write_text(text)
    return load_arrivals(path)


# --- counting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_s", "end_s", "count"),
    [
        pytest.param(0, 10, 10, id="a bin"),
        pytest.param(5, 15, 20, id="halves of two"),
        pytest.param(7, 7, 0, id="no time, no requests"),
        pytest.param(15, 25, 20, id="across the end, from the beginning again"),
        pytest.param(20, 40, 40, id="the second round"),
        pytest.param(0, 2000, 4000, id="a hundred rounds"),
    ],
)
def test_spans(start_s: float, end_s: float, count: int) -> None:
    assert RISING.count(start_s, end_s) == count


@pytest.mark.parametrize(
    ("t_s", "rate"), [(0, 1.0), (9.9, 1.0), (10, 3.0), (19.9, 3.0), (20, 1.0), (35, 3.0)]
)
def test_rates(t_s: float, rate: float) -> None:
    assert RISING.rate(t_s) == rate
    assert RISING.mean_rate == 2.0


SOURCES = st.sampled_from([RISING, constant(0.37), poisson(3.0, 5, 900.0), constant(0.0)])


@given(SOURCES, st.lists(st.floats(0, 5000), min_size=2, max_size=20))
def test_spans_that_follow_each_other_add_up(source: Arrivals, instants: list[float]) -> None:
    instants.sort()
    parts = [source.count(start, end) for start, end in pairwise(instants)]
    assert min(parts) >= 0
    assert sum(parts) == source.count(instants[0], instants[-1])


@pytest.mark.parametrize("rate", [0.1, 0.3, 1 / 3, 2.5, 1000.0], ids=str)
def test_a_constant_rate_is_never_off_by_a_binary_fraction(rate: float) -> None:
    source = constant(rate)
    assert [source.count(0, 30 * tick) for tick in range(400)] == [
        round(rate * 30 * tick) for tick in range(400)
    ]


def test_scaling_multiplies() -> None:
    assert RISING.scaled(3.0).count(0, 20) == 120


# --- a Poisson process ----------------------------------------------------------------------------------------


def test_same_seed_same_requests() -> None:
    assert poisson(2.0, 1, 3600.0) == poisson(2.0, 1, 3600.0)
    assert poisson(2.0, 1, 3600.0) != poisson(2.0, 2, 3600.0)


def test_counts_vary_as_they_should() -> None:
    source = poisson(2.0, 1, 100_000.0)
    counts = [source.count(at_s, at_s + 10) for at_s in range(0, 100_000, 10)]
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert mean == pytest.approx(20.0, rel=0.02)
    assert variance == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf], ids=str)
def test_rates_that_make_no_sense(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        constant(rate)
    with pytest.raises(ValueError, match="rate"):
        poisson(rate, 1, 10.0)


# --- recordings -----------------------------------------------------------------------------------------------

DATED = """TIMESTAMP,ContextTokens,GeneratedTokens

2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:13.0319600,3180,8
2023-11-16T18:17:14.0781490,110,27
2023-11-16 18:17:36.0,1,1
"""


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        pytest.param(DATED, [2, 1, 0, 1], id="dates and times"),
        pytest.param("timestamp,tokens\n5,1\n6,1\n15.5,1\n", [2, 1], id="seconds"),
        pytest.param("timestamp,tokens\n25,1\n6,1\n5,1\n", [2, 0, 1], id="not in order"),
        pytest.param(
            '{"timestamp": 0}\n{"timestamp": 9999}\n{"timestamp": 31000}\n', [2, 0, 0, 1], id="JSON lines"
        ),
        pytest.param(
            '{"timestamp": 7000, "requests": [{}, {}, {}]}\n{"timestamp": 18000, "requests": [{}]}\n',
            [3, 1],
            id="JSON lines with several requests each",
        ),
        pytest.param("\ufefftimestamp\n1\n", [1], id="a byte order mark"),
    ],
)
def test_single_requests_are_counted_in_bins_of_ten_seconds(
    tmp_path: Path, text: str, counts: list[int]
) -> None:
    source = loaded(tmp_path, text)
    assert [source.count(10 * index, 10 * index + 10) for index in range(len(counts))] == counts
    assert source.length_s == 10 * len(counts)


@pytest.mark.parametrize(
    ("text", "step_s", "counts"),
    [
        pytest.param("t_s,requests,tokens\n0,600,1\n600,1200,2\n1200,0,3\n", 600, [600, 1200, 0], id="t_s"),
        pytest.param(
            "day,hour,date,chat\n0,22,x,10\n0,23,x,20\n1,0,y,30\n", 3600, [10, 20, 30], id="day and hour"
        ),
        pytest.param("hour,requests,other\n0,7,a\n1,8,b\n", 3600, [7, 8], id="hour, and a named count"),
    ],
)
def test_counts_per_line(tmp_path: Path, text: str, step_s: int, counts: list[int]) -> None:
    source = loaded(tmp_path, text)
    assert [source.count(step_s * index, step_s * (index + 1)) for index in range(len(counts))] == counts
    assert source.length_s == step_s * len(counts)
    assert source.rate(step_s / 2) == counts[0] / step_s


def test_a_compressed_recording_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    path.write_bytes(gzip.compress(DATED.encode()))
    assert load_arrivals(path) == loaded(tmp_path, DATED)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "no recording of requests", id="nothing"),
        pytest.param(b"a,b\n1,2\n", "no recording of requests", id="other columns"),
        pytest.param(b"hour\n1\n", "no recording of requests", id="hours without a count"),
        pytest.param(b"timestamp\n", "no request in it", id="no rows"),
        pytest.param(b"timestamp\nyesterday\n", "row 1 has no time", id="a time that is none"),
        pytest.param(b"timestamp\nnan\n", "row 1 has no time", id="a time that is no number"),
        pytest.param(b"x,timestamp\n1,1\n2\n", "row 2 has no time", id="a short row"),
        pytest.param(b"timestamp\n0\n1e12\n", "longer than", id="thousands of years"),
        pytest.param(b't_s,requests\n0,1\n"10,1\n', "row 2", id="a quote that stays open"),
        pytest.param(b"t_s,requests\n0,1\n0,1\n", "row 2 is not later", id="time stands still"),
        pytest.param(b"t_s,requests\n0,-1\n1,1\n", "row 1 counts -1", id="a negative count"),
        pytest.param(b"t_s,requests\n0,inf\n1,1\n", "row 1 has no time or no count", id="an endless count"),
        pytest.param(b"t_s,requests\n0,1\n", "fewer than two rows", id="one row"),
        pytest.param(b'{"timestamp": "soon"}\n', "entry 1 is not", id="JSON, a time that is none"),
        pytest.param(b'{"timestamp": 1}\n[]\n', "entry 2 is not", id="JSON, another kind of line"),
        pytest.param(b'{"time": 1}\n', "entry 1 is not", id="JSON, no time"),
        pytest.param(b"\xff\xfe\n", "not a text", id="no text"),
        pytest.param(gzip.compress(b"timestamp\n1\n")[:-9], "damaged", id="a compressed file cut short"),
        pytest.param(b"\x1f\x8b" + b"x" * 50, "Unknown compression method", id="a damaged compressed file"),
    ],
)
def test_what_is_wrong_is_said_with_the_path(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "requests"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        load_arrivals(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_BINS", 3)
    with pytest.raises(TraceError, match="more than 3 rows"):
        loaded(tmp_path, "t_s,requests\n0,1\n1,1\n2,1\n3,1\n")
    monkeypatch.setattr(arrivals, "MAX_BYTES", 100)
    (tmp_path / "bomb").write_bytes(gzip.compress(b"timestamp\n" + b"1\n" * 1000))
    with pytest.raises(TraceError, match="longer than"):
        load_arrivals(tmp_path / "bomb")
    monkeypatch.setattr(arrivals, "MAX_LINE_BYTES", 20)
    with pytest.raises(TraceError, match="in one line"):
        loaded(tmp_path, "timestamp" + "," * 30)


# --- what a user writes ---------------------------------------------------------------------------------------


def test_a_rate_a_process_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "requests.csv").write_text(DATED)
    assert arrivals_of("2.5", seed=1, length_s=60.0) == constant(2.5)
    assert arrivals_of("poisson:2.5", seed=1, length_s=60.0) == poisson(2.5, 1, 60.0)
    assert arrivals_of(str(tmp_path / "requests.csv"), seed=1, length_s=60.0).name == "requests.csv"


@pytest.mark.parametrize("text", ["", "-1", "nan", "poisson:", "poisson:x", "gauss:1", "no-such.csv"])
def test_anything_else_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=r"rate|file|directory"):
        arrivals_of(text, seed=1, length_s=60.0)


# --- tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "prompt", "response"),
    [
        pytest.param(
            "t_s,requests,prompt_tokens,response_tokens\n0,10,1000,50\n60,0,0,0\n120,20,6000,100\n",
            (100.0, 200.0, 300.0),
            (5.0, 5.0, 5.0),
            id="by count, a bin without requests between its neighbours",
        ),
        pytest.param(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,7\n1,300,9\n15,50,2\n",
            (200.0, 50.0),
            (8.0, 2.0),
            id="by request",
        ),
        pytest.param(
            '{"timestamp": 0, "input_length": 100, "output_length": 7}\n{"timestamp": 500, "input_length": 300, "output_length": 9}\n',
            (200.0,),
            (8.0,),
            id="by line",
        ),
        pytest.param(
            '{"timestamp": 0, "requests": [{"Prompt Length": 4, "Output Length": 2}, {"Prompt Length": 6, "Output Length": 4}]}\n',
            (5.0,),
            (3.0,),
            id="by entry",
        ),
    ],
)
def test_tokens_of_a_recording(
    tmp_path: Path, text: str, prompt: tuple[float, ...], response: tuple[float, ...]
) -> None:
    found = loaded(tmp_path, text)
    assert found.tokens == (pytest.approx(prompt), pytest.approx(response))
    assert found.scaled(3.0).tokens == found.tokens


@pytest.mark.parametrize(
    "text",
    ["t_s,requests\n0,1\n60,2\n", "t_s,requests,prompt_tokens\n0,1,9\n60,2,9\n", '{"timestamp": 0}\n'],
)
def test_a_recording_without_both_counts_has_no_tokens(tmp_path: Path, text: str) -> None:
    assert loaded(tmp_path, text).tokens is None


@pytest.mark.parametrize("tokens", ["x,1", "-5,1", "7"])
def test_tokens_that_are_no_count_are_named_by_their_row(tmp_path: Path, tokens: str) -> None:
    with pytest.raises(TraceError, match="row 2 has no count of tokens"):
        loaded(tmp_path, f"t_s,requests,prompt_tokens,response_tokens\n0,1,5,5\n60,1,{tokens}\n")
