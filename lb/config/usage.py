"""What the requests of each API key and model have used: values <-> JSON.

A controller reads the rows of each agent by day (`GET /-/usage`). To agents that have limits of days or months it sends the sums over all
agents (`POST /-/usage/totals`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from typing import Any, NamedTuple

from lb.config.decode import MAX_TEXT, Fields, WireError

DAY_S = 86_400
#: Days that an agent keeps, today included. A controller that is away for longer misses what came before.
KEPT_DAYS = 8
#: Rows of one report, and of one message of totals.
MOST_ROWS = 5_000
MOST_COUNT = 2**53
_LAST_DAY = 10**6  # in the year 4707
_EPOCH = date(1970, 1, 1).toordinal()


def month_of(day: int) -> int:
    """Return the month of a day, both counted from 1970-01, in UTC."""
    found = date.fromordinal(_EPOCH + day)
    return (found.year - 1970) * 12 + found.month - 1


def first_day(month: int) -> int:
    """Return the first day of a month, both counted from 1970-01, in UTC."""
    years, months = divmod(month, 12)
    return date(1970 + years, months + 1, 1).toordinal() - _EPOCH


class UsageRow(NamedTuple):
    """The requests of one key and model that ended on one day, so far.

    `day` is counted from 1970-01-01, UTC. `key` is the name of the key's owner, empty where no key is needed. `model` is empty
    for requests that named none, or one that no engine has served to this owner.
    """

    day: int
    key: str
    model: str
    requests: int
    tokens_in: int
    tokens_out: int


@dataclass(frozen=True, slots=True)
class UsageReport:
    """Rows that have changed since the reader's last `mark`, in order of their changes.

    Numbers are sums since the day began, not increments: a report that is read twice, or late, says nothing new. `source` names the
    counters, and changes when they begin at 0 again: then the mark of another source means nothing, and all rows are reported. `more`:
    there are rows beyond `mark`. `totals`: the agent has limits of days or months, and needs what all agents have counted.
    """

    source: str
    mark: int
    more: bool
    rows: tuple[UsageRow, ...]
    totals: bool = False

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "source": self.source,
            "mark": self.mark,
            "more": self.more,
            "rows": [list(row) for row in self.rows],
        }
        if self.totals:  # a controller that is older than this field takes the reports in which it is not
            shown["totals"] = True
        return shown

    @classmethod
    def from_json(cls, value: object, path: str = "") -> UsageReport:
        """Raise WireError."""
        fields = Fields(value, path)
        report = cls(
            fields.name("source"),
            fields.count("mark"),
            fields.flag("more"),
            tuple(_row(one, at) for one, at in fields.items("rows")),
            fields.flag("totals", False),
        )
        fields.done()
        return report


class KeyTotal(NamedTuple):
    """What the requests of one key and model have used today and in this month so far, as all agents together have counted it.

    `key` and `model` are those of `UsageRow`.
    """

    key: str
    model: str
    requests_today: int
    tokens_in_today: int
    tokens_out_today: int
    tokens_in_month: int
    tokens_out_month: int


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """Totals of some keys: all models of a key are in one message, in order of keys and of models.

    `day` is today, counted from 1970-01-01, UTC; the month is that of the day. Totals only grow, so a message that comes twice or late
    changes nothing.
    """

    day: int
    rows: tuple[KeyTotal, ...]

    def to_json(self) -> dict[str, Any]:
        return {"day": self.day, "rows": [list(row) for row in self.rows]}

    @classmethod
    def from_json(cls, value: object, path: str = "") -> UsageTotals:
        """Raise WireError."""
        fields = Fields(value, path)
        found = fields.items("rows")
        if len(found) > MOST_ROWS:
            raise WireError(fields.at("rows"), f"more than {MOST_ROWS} rows")
        totals = cls(
            fields.integer("day", 0, _LAST_DAY), tuple(_key_total(one, row_path) for one, row_path in found)
        )
        fields.done()
        for index, (row, following) in enumerate(pairwise(totals.rows), 1):
            if row[:2] >= following[:2]:
                raise WireError(found[index][1], "expected keys and models in order, each once")
        return totals


def _row(value: object, path: str) -> UsageRow:
    row = _list_of(value, len(UsageRow._fields), path)
    day = row[0]
    _check_names(row[1:3], path)
    if type(day) is not int or not 0 <= day <= _LAST_DAY:
        raise WireError(path, "expected a day, counted from 1970-01-01")
    _check_counts(row[3:], path)
    return UsageRow(*row)


def _key_total(value: object, path: str) -> KeyTotal:
    row = _list_of(value, len(KeyTotal._fields), path)
    _check_names(row[:2], path)
    _check_counts(row[2:], path)
    return KeyTotal(*row)


def _list_of(value: object, length: int, path: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise WireError(path, f"expected a list of {length} values")
    return value


def _check_names(names: list[Any], path: str) -> None:
    if not all(isinstance(one, str) and len(one) <= MAX_TEXT and _is_plain(one) for one in names):
        raise WireError(path, "expected the names of a key and a model")


def _check_counts(counts: list[Any], path: str) -> None:
    if not all(type(one) is int and 0 <= one <= MOST_COUNT for one in counts):
        raise WireError(path, "expected counts")


def _is_plain(text: str) -> bool:
    """Return whether every database stores the text as it is."""
    return not text or text.isprintable()
