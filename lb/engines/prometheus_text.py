"""Reading a few gauges off a Prometheus page, quickly. Pure.

A page is searched for the few names wanted, never split into lines: a vLLM page of 60 KB is read ten times a second
for each busy target. Names are matched whole, other labels are ignored. On any input, nothing
raises: a number that is not finite, negative or absurd makes its gauge unknown.

Several engines behind one port are one target: their counts are added up, their shares averaged. Several series of
*one* engine (one per rank, or a total beside its parts by priority, as SGLang writes them) are not: the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lb.core.admission import EngineLoad

MOST = 1e9  # requests or other units; more is garbage


@dataclass(frozen=True, slots=True)
class Gauge:
    """A metric by its whole name; with `where`, only the samples that carry this label pair."""

    name: bytes
    where: bytes = b""


@dataclass(frozen=True, slots=True)
class Page:
    """How one engine's page is read. Of several gauges the first that the page has counts.

    `engine_label` is the label whose values identify the engines behind one port; None: every series is its own.
    """

    running: tuple[Gauge, ...]
    pending: tuple[Gauge, ...]
    kv_usage: tuple[Gauge, ...] = ()
    max_running: tuple[Gauge, ...] = ()
    engine_label: bytes | None = None

    def parse(self, page: bytes) -> EngineLoad | None:
        running = total(self._values(page, self.running))
        pending = total(self._values(page, self.pending))
        if running is None and pending is None:
            return None
        usage = mean(self._values(page, self.kv_usage))
        most = total(self._values(page, self.max_running))
        return EngineLoad(running, pending, usage, most or None)

    def _values(self, page: bytes, gauges: tuple[Gauge, ...]) -> Sequence[float]:
        """Return one value for each engine; none if the page does not have the gauge, or has garbage for it."""
        for gauge in gauges:
            samples = list(_samples(page, gauge))
            if len(samples) == 1:
                value = _number(samples[0][1])
                return () if value is None else (value,)
            if samples:
                return self._by_engine(samples)
        return ()

    def _by_engine(self, samples: list[tuple[bytes, bytes]]) -> Sequence[float]:
        largest: dict[bytes, float] = {}
        for labels, text in samples:
            value = _number(text)
            if value is None:
                return ()
            engine = labels if self.engine_label is None else _label(labels, self.engine_label)
            largest[engine] = max(value, largest.get(engine, 0.0))
        return tuple(largest.values())


def _samples(page: bytes, gauge: Gauge) -> Iterator[tuple[bytes, bytes]]:
    """Yield the gauge's samples: (labels, value and maybe a time stamp)."""
    for begin in _lines(page, gauge.name):
        end = page.find(b"\n", begin)
        line = page[begin + len(gauge.name) : end if end >= 0 else len(page)]
        if line[:1] == b"{":
            labels, _, rest = line.rpartition(b"}")
        elif line[:1] in (b" ", b"\t"):
            labels, rest = b"", line
        else:
            continue  # a longer name
        if not gauge.where or _carries(labels, gauge.where):
            yield labels, rest


def _lines(page: bytes, name: bytes) -> Iterator[int]:
    """Yield where lines begin with `name`."""
    if page.startswith(name):
        yield 0
    needle = b"\n" + name
    at = page.find(needle)
    while at >= 0:
        yield at + 1
        at = page.find(needle, at + len(needle))


def _carries(labels: bytes, pair: bytes) -> bool:
    return b"{" + pair in labels or b"," + pair in labels


def _label(labels: bytes, name: bytes) -> bytes:
    """Return the value of a label in `{a="x",b="y"`; empty if it is not there."""
    for before in (b"{", b","):
        _, found, rest = labels.partition(before + name + b'="')
        if found:
            return rest.partition(b'"')[0]
    return b""


def _number(text: bytes) -> float | None:
    try:
        value = float(text.split(None, 1)[0])
    except (ValueError, IndexError):
        return None
    return value if 0.0 <= value <= MOST else None  # false for NaN as well


def total(values: Sequence[float]) -> int | None:
    return int(sum(values)) if values else None


def mean(values: Sequence[float]) -> float | None:
    """Of shares between 0 and 1; rounding may push one a little above."""
    if not values or max(values) > 1.01:
        return None
    return min(1.0, sum(values) / len(values))
