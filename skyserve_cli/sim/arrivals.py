"""Requests as they arrive, for the simulator: evenly, by a Poisson process, or as they were recorded.

Arrivals are a count that rises with time, and here it rises in straight lines between knots. So every span
has a result at once, spans that follow each other never count a request twice, and the same seed gives the
same requests. Within ten seconds, recorded instants are spread evenly.

A recording is one of these, as it is or compressed by gzip:

    TIMESTAMP,ContextTokens,...      a request per line; a date and time, or seconds
    t_s,requests,...                 a count per line, from this second on until the next line's
    day,hour,...,requests            a count per line and hour; `day` may be missing. The count is in
                                     `requests`, else in the last column
    {"timestamp": 1500, ...}         JSON lines, in milliseconds; a line counts once, or once per entry of
                                     `requests`

Each may have the tokens of its requests, in two columns (or values of a line, or of an entry): `prompt_tokens` and
`response_tokens`, or what others call them (`TOKEN_NAMES`). Of a count they are the tokens of all its requests.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import orjson

from skyserve_cli.sim.trace import TraceError

BIN_S = 10.0  # single requests are counted in bins of this length

MAX_BYTES = 1 << 30  # unpacked
MAX_LINE_BYTES = 16 << 20
MAX_BINS = 1_000_000
MAX_NUMBER = 1e13  # a time in milliseconds since 1970, and some

#: Names of the two token counts, as they are and in lower case.
TOKEN_NAMES = (
    ("prompt_tokens", "response_tokens"),
    ("input_tokens", "output_tokens"),
    ("input_length", "output_length"),
    ("contexttokens", "generatedtokens"),
    ("Prompt Length", "Output Length"),
)
_HOURLY_S = {"day": 86400.0, "hour": 3600.0}
_HAIR = 1e-9  # so that 30 s at 0.1 per second are 3 requests, in spite of binary fractions


class TokenMeans(NamedTuple):
    """Mean tokens of a request of each bin; a bin without requests is between its neighbours."""

    prompt: tuple[float, ...]
    response: tuple[float, ...]


class _Row(NamedTuple):
    """Requests from an instant on, and their tokens."""

    at_s: float
    requests: float
    prompt: float = 0.0
    response: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`counts[i]` requests have arrived by `at_s[i]`. Both rise from 0; after the last knot everything repeats.

    `tokens` are those of the bins between two knots; None: not known.
    """

    name: str
    at_s: tuple[float, ...]
    counts: tuple[float, ...]
    tokens: TokenMeans | None = None

    @property
    def length_s(self) -> float:
        """How long it is before it repeats."""
        return self.at_s[-1]

    @property
    def mean_rate(self) -> float:
        """Requests per second."""
        return self.counts[-1] / self.length_s

    def count(self, start_s: float, end_s: float) -> int:
        """Return how many requests arrive from `start_s` (not below 0) up to `end_s`, itself not included."""
        return self._by(end_s) - self._by(start_s)

    def rate(self, t_s: float) -> float:
        """Requests per second around an instant."""
        index = bisect_right(self.at_s, t_s % self.length_s) - 1
        return (self.counts[index + 1] - self.counts[index]) / (self.at_s[index + 1] - self.at_s[index])

    def scaled(self, factor: float) -> Arrivals:
        """`factor` times as many requests at every moment."""
        return Arrivals(self.name, self.at_s, tuple(count * factor for count in self.counts), self.tokens)

    def later(self, start_s: float) -> Arrivals:
        """Return the same requests from `start_s` on, without tokens; what was before it comes after the end."""
        start = start_s % self.length_s
        if start == 0.0:
            return self
        index = bisect_right(self.at_s, start)
        done = float(np.interp(start, self.at_s, self.counts))
        rest = [
            (at - start, count - done)
            for at, count in zip(self.at_s[index:], self.counts[index:], strict=True)
        ]
        end_s, end = rest[-1]
        again = [
            (end_s + at, end + count)
            for at, count in zip(self.at_s[1:index], self.counts[1:index], strict=True)
        ]
        knots = [(0.0, 0.0), *rest, *again]
        if knots[-1][0] < self.length_s:
            knots.append((self.length_s, self.counts[-1]))
        return Arrivals(self.name, tuple(at for at, _ in knots), tuple(count for _, count in knots))

    def _by(self, t_s: float) -> int:
        """Return how many have arrived before an instant."""
        at_s, counts = self.at_s, self.counts
        rounds, rest_s = divmod(t_s, at_s[-1])
        index = bisect_right(at_s, rest_s) - 1
        slope = (counts[index + 1] - counts[index]) / (at_s[index + 1] - at_s[index])
        return math.floor(rounds * counts[-1] + counts[index] + slope * (rest_s - at_s[index]) + _HAIR)


def arrivals_of(text: str, *, seed: int, length_s: float) -> Arrivals:
    """Return what a user requests: "2.5" requests per second, "poisson:2.5" drawn from `seed` for `length_s`, or a file.

    Raises TraceError.
    """
    kind, _, rate = text.rpartition(":")
    try:
        if kind == "poisson":
            return poisson(float(rate), seed, length_s)
        return constant(float(text))
    except ValueError as error:
        if Path(text).exists():
            return load_arrivals(Path(text))
        raise TraceError(f"{text}: neither a rate (2.5, or poisson:2.5, per second) nor a file") from error


def constant(rate: float) -> Arrivals:
    """`rate` requests per second (not below 0), evenly."""
    if not 0 <= rate < math.inf:
        raise ValueError(f"a rate of {rate:g} requests per second makes no sense")
    return Arrivals(f"{rate:g}/s", (0.0, 3600.0), (0.0, rate * 3600.0))


def poisson(rate: float, seed: int, length_s: float) -> Arrivals:
    """Independent requests, `rate` per second on average, drawn for `length_s`; after that they repeat."""
    if not 0 <= rate < math.inf or length_s <= 0:
        raise ValueError("a Poisson process has a rate of at least 0 and a length above 0")
    bins = math.ceil(length_s / BIN_S)
    # RandomState, because NumPy promises that its stream stays as it is.
    drawn = np.random.RandomState(seed).poisson(rate * BIN_S, bins)
    return _of_bins(f"poisson {rate:g}/s", [BIN_S] * bins, drawn.tolist())


def load_arrivals(path: Path) -> Arrivals:
    """Read a recording; its first request or line is time 0. Raises TraceError."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not packed:
                return _read(path, raw)
            with gzip.open(raw) as unpacked:
                return _read(path, unpacked)
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path}: damaged: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


# --- reading ------------------------------------------------------------------------------------------------


def _read(path: Path, stream: BinaryIO | gzip.GzipFile) -> Arrivals:
    lines = _lines(path, stream)
    first = next(lines, "")
    if first.startswith("{"):
        return _of_instants(path, _json_instants(path, chain([first], lines)))
    header = [name.strip().lower() for name in next(csv.reader([first]), [])]
    rows = csv.reader(lines)
    tokens = _token_columns(header)
    if "timestamp" in header:
        return _of_instants(path, _csv_instants(path, rows, header.index("timestamp"), tokens))
    if "t_s" in header and "requests" in header:
        units_s = {header.index("t_s"): 1.0}
        return _of_counts(path, _csv_counts(path, rows, units_s, header.index("requests"), tokens), tokens)
    if "hour" in header and header[-1] != "hour":
        units_s = {header.index(name): unit for name, unit in _HOURLY_S.items() if name in header}
        counted = header.index("requests") if "requests" in header else len(header) - 1
        return _of_counts(path, _csv_counts(path, rows, units_s, counted, tokens), tokens)
    raise TraceError(
        f"{path}: no recording of requests: its first line names neither `timestamp`, nor `t_s` and `requests`,"
        " nor `hour` and a count"
    )


def _lines(path: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[str]:
    """Yield the lines that are not empty, as long as they are not too many."""
    read = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        read += len(line)
        if len(line) > MAX_LINE_BYTES or read > MAX_BYTES:
            raise TraceError(
                f"{path}: longer than {MAX_BYTES >> 20} MiB, or than {MAX_LINE_BYTES >> 20} MiB in one line"
            )
        try:
            text = line.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}: not a text: {error}") from error
        if text:
            yield text


def _token_columns(header: list[str]) -> tuple[int, ...]:
    """Return the columns of prompt and response tokens; none where the file has not both."""
    for names in TOKEN_NAMES:
        if all(name in header for name in names):
            return tuple(header.index(name) for name in names)
    return ()


def _json_instants(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        try:
            entry = orjson.loads(line)
            requests = entry.get("requests")
            each = requests if isinstance(requests, list) else [entry]
            tokens = [_json_tokens(one) for one in each]
            prompt, response = (sum(column) for column in zip(*tokens, strict=True)) if tokens else (0.0, 0.0)
            yield _Row(_finite(entry["timestamp"]) / 1000, len(each), prompt, response)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TraceError(f'{path}: entry {number} is not {{"timestamp": milliseconds, …}}') from error


def _json_tokens(entry: object) -> tuple[float, float]:
    if isinstance(entry, dict):
        for prompt, response in TOKEN_NAMES:
            if prompt in entry and response in entry:
                return _tokens(entry[prompt]), _tokens(entry[response])
    return 0.0, 0.0


def _csv_instants(
    path: Path, rows: Iterable[list[str]], column: int, tokens: tuple[int, ...]
) -> Iterator[_Row]:
    for number, row in enumerate(rows, 1):
        try:
            at_s = _instant(row[column])
        except (ValueError, IndexError) as error:
            raise TraceError(f"{path}: row {number} has no time in its `timestamp`") from error
        yield _Row(at_s, 1, *_csv_tokens(path, number, row, tokens))


def _csv_counts(
    path: Path, rows: Iterable[list[str]], units_s: Mapping[int, float], counted: int, tokens: tuple[int, ...]
) -> Iterator[_Row]:
    """`units_s` is what one is worth in each column that contains the time."""
    for number, row in enumerate(rows, 1):
        try:
            count = _finite(row[counted])
            at_s = sum(_finite(row[column]) * unit_s for column, unit_s in units_s.items())
        except (ValueError, IndexError) as error:
            raise TraceError(f"{path}: row {number} has no time or no count") from error
        if count < 0:
            raise TraceError(f"{path}: row {number} counts {count:g} requests")
        yield _Row(at_s, count, *_csv_tokens(path, number, row, tokens))


def _csv_tokens(path: Path, number: int, row: list[str], columns: tuple[int, ...]) -> list[float]:
    try:
        return [_tokens(row[column]) for column in columns]
    except (ValueError, IndexError) as error:
        raise TraceError(f"{path}: row {number} has no count of tokens where others have one") from error


def _tokens(raw: str | float) -> float:
    count = _finite(raw)
    if count < 0:
        raise ValueError(f"{count:g} tokens")
    return count


def _instant(text: str) -> float:
    """Return seconds, written as a number or as a date and time (UTC where it does not say)."""
    try:
        return _finite(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _finite(raw: str | float) -> float:
    number = float(raw)
    if not abs(number) < MAX_NUMBER:
        raise ValueError(f"{number} is out of bounds")
    return number


def _of_instants(path: Path, rows: Iterable[_Row]) -> Arrivals:
    """They need not be in order."""
    by_bin: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    zero: float | None = None
    for row in rows:
        zero = row.at_s if zero is None else zero
        sums = by_bin[math.floor((row.at_s - zero) / BIN_S)]
        for index, count in enumerate(row[1:]):
            sums[index] += count
    if not by_bin:
        raise TraceError(f"{path}: no request in it")
    first, last = min(by_bin), max(by_bin)
    if last - first >= MAX_BINS:
        raise TraceError(f"{path}: longer than {MAX_BINS * BIN_S / 86400:.0f} days")
    bins = [by_bin[index] for index in range(first, last + 1)]
    counts, prompt, response = (list(column) for column in zip(*bins, strict=True))
    return _of_bins(path.name, [BIN_S] * len(bins), counts, _means(counts, prompt, response))


def _of_counts(path: Path, rows: Iterable[_Row], tokens: tuple[int, ...]) -> Arrivals:
    """Return the last row holds for as long as the one before it."""
    found: list[_Row] = []
    for row in rows:
        if found and row.at_s <= found[-1].at_s:
            raise TraceError(f"{path}: row {len(found) + 1} is not later than the one before it")
        if len(found) >= MAX_BINS:
            raise TraceError(f"{path}: more than {MAX_BINS} rows")
        found.append(row)
    if len(found) < 2:
        raise TraceError(f"{path}: fewer than two rows, so that it has no length")
    times, counts, prompt, response = (list(column) for column in zip(*found, strict=True))
    lengths = [later - earlier for earlier, later in pairwise(times)]
    means = _means(counts, prompt, response) if tokens else None
    return _of_bins(path.name, [*lengths, lengths[-1]], counts, means)


def _means(counts: list[float], prompt: list[float], response: list[float]) -> TokenMeans | None:
    """Return the mean tokens of a request of each bin; None where no request has any."""
    if not any(prompt) and not any(response):
        return None
    requests = np.asarray(counts)
    known = np.flatnonzero(requests > 0.0)
    prompts, responses = (
        np.interp(np.arange(len(requests)), known, np.asarray(tokens)[known] / requests[known])
        for tokens in (prompt, response)
    )
    return TokenMeans(tuple(prompts.tolist()), tuple(responses.tolist()))


def _of_bins(
    name: str, lengths_s: Iterable[float], counts: Iterable[float], tokens: TokenMeans | None = None
) -> Arrivals:
    return Arrivals(
        name,
        tuple(accumulate(lengths_s, initial=0.0)),
        tuple(accumulate(map(float, counts), initial=0.0)),
        tokens,
    )
