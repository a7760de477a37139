"""What the requests of each API key and model have used, by day, as a controller reads it (`GET /-/usage`): values <-> JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lb.config.decode import MAX_TEXT, Fields, WireError

DAY_S = 86_400
#: Days that an agent keeps, today included. A controller that is away for longer misses what came before.
KEPT_DAYS = 8
#: Rows of one report.
MOST_ROWS = 5_000
_MOST = 2**53
_LAST_DAY = 10**6  # in the year 4707


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
    there are rows beyond `mark`.
    """

    source: str
    mark: int
    more: bool
    rows: tuple[UsageRow, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "mark": self.mark,
            "more": self.more,
            "rows": [list(row) for row in self.rows],
        }

    @classmethod
    def from_json(cls, value: object, path: str = "") -> UsageReport:
        """Raise WireError."""
        fields = Fields(value, path)
        report = cls(
            fields.name("source"),
            fields.count("mark"),
            fields.flag("more"),
            tuple(_row(one, at) for one, at in fields.items("rows")),
        )
        fields.done()
        return report


def _row(value: object, path: str) -> UsageRow:
    if not isinstance(value, list) or len(value) != len(UsageRow._fields):
        raise WireError(path, f"expected a list of {len(UsageRow._fields)} values")
    day, *names = value[:3]
    if not all(isinstance(one, str) and len(one) <= MAX_TEXT and _is_plain(one) for one in names):
        raise WireError(path, "expected the names of a key and a model")
    if type(day) is not int or not 0 <= day <= _LAST_DAY:
        raise WireError(path, "expected a day, counted from 1970-01-01")
    if not all(type(one) is int and 0 <= one <= _MOST for one in value[3:]):
        raise WireError(path, "expected counts")
    return UsageRow(*value)


def _is_plain(text: str) -> bool:
    """Return whether every database stores the text as it is."""
    return not text or text.isprintable()
