"""Money, time and tables as commands show them."""

from __future__ import annotations

import io

import pytest

from skyserve_cli.output import plural, printable, saving, span, usd
from skyserve_cli.text_tables import FittedTable, console


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3, "0s"),
        (0, "0s"),
        (0.9, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (61, "1m 1s"),
        (3599, "59m 59s"),
        (3600, "1h"),
        (3659, "1h"),
        (7500, "2h 5m"),
        (86400, "1d"),
        (360000, "4d 4h"),
    ],
)
def test_a_span_has_two_units_at_most(seconds: float, shown: str) -> None:
    assert span(seconds) == shown


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0, "0.0000"), (0.3, "0.3000"), (0.99999, "1.0000"), (1, "1.00"), (12345.678, "12,345.68")],
)
def test_small_money_has_more_digits(amount: float, shown: str) -> None:
    assert usd(amount) == shown


@pytest.mark.parametrize(
    ("paid", "on_demand", "shown"),
    [(1.06, 3.30, "68%"), (0, 1, "100%"), (1, 1, ""), (2, 1, ""), (0, 0, "")],
    ids=["spot", "free", "on demand", "dearer", "nothing runs"],
)
def test_a_saving_is_shown_where_there_is_one(paid: float, on_demand: float, shown: str) -> None:
    assert saving(paid, on_demand) == shown


def test_one_replica_two_replicas() -> None:
    assert [plural(count, "replica") for count in (0, 1, 2)] == ["0 replicas", "1 replica", "2 replicas"]


def test_what_a_replica_printed_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\rc\td\né") == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}c\td\né"


def test_a_table_in_a_file_has_no_escape_codes_and_cuts_nothing() -> None:
    file = io.StringIO()
    message = "a long story " * 30
    console(file).print(
        FittedTable(("NAME", "#N", "STATE", "MESSAGE"), [("[red]x", "7", "READY", message.strip())])
    )
    head, row = file.getvalue().splitlines()
    assert head.split() == ["NAME", "N", "STATE", "MESSAGE"]
    assert row.rstrip().endswith("a long story")
    assert row.startswith("[red]x  7  READY  a long story")
    assert "\x1b" not in file.getvalue()
