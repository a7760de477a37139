"""Demand until now, and forecasts fitted to it: what concerns minutes that are over is computed once, and not in every minute.

A fit is to the two weeks before the last multiple of six hours (of one hour in the first two days), so that it is a function of the
history: after a restart it is the same. Demand is work (`work`), of which prompts are a part, where weights are known.

The series of a history are never changed where they have been shown (see `History`), so the same places of the same series are
the same minutes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from policies.forecast.demand import DAY_MIN, Floats, Horizon, Model, fit
from policies.forecast.work import SIZE_MIN, Weights, prompt_share, work
from policies.history import History

FIT_EVERY_MIN = 360
FIRST_FITS_EVERY_MIN = 60
#: The oldest minutes of two weeks go one by one, a fit stays.
FIT_MIN = 14 * DAY_MIN - FIT_EVERY_MIN - SIZE_MIN
READ_MIN = 7 * DAY_MIN + 180  # what a forecast looks at: a week, and some
BEFORE_MIN = 60  # the size of requests is that of the last sound minute


#: The demand of consecutive minutes, and where tokens are known its parts: prompts and responses.
Demand = tuple[Floats, ...]


class Stretch:
    """Minutes of a history until one of them, and what requests weigh in them. Equal ones are the same places of the same series."""

    __slots__ = ("_places", "history", "of")

    def __init__(self, history: History, of: Weights | None, end: int) -> None:
        first = max(history.first, end - FIT_MIN - SIZE_MIN)
        self.history, self.of = history.since(first).until(end), of
        series = (self.history.requests, self.history.within_slo, self.history.prompt, self.history.response)
        self._places = (first, end, of, *(None if one is None else _place(one) for one in series))

    def __hash__(self) -> int:
        return hash(self._places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stretch) and self._places == other._places


def fit_number(history: History) -> int:
    """Return the number of the last fit."""
    return history.end // _every(history)


def recent(history: History, of: Weights | None) -> Demand:
    """Return the demand of the last `READ_MIN` minutes, as far as they are known."""
    end = _fitted_until(history, 0)
    if of is None or end - BEFORE_MIN - SIZE_MIN <= history.first:
        return _demand(history.since(history.end - READ_MIN), of)
    known = _past(_stretch(history, of, end))
    new = _demand(history.since(end - BEFORE_MIN - SIZE_MIN), of)
    count = history.end - end
    return tuple(
        np.concatenate((old, now[len(now) - count :]))[-READ_MIN:]
        for old, now in zip(known, new, strict=True)
    )


def fitted(history: History, of: Weights | None, horizon: Horizon, *, part: int = 0, late: int = 0) -> Model:
    """Return the last fit of one of the demand's series, `late` minutes after others so that no minute bears all fits."""
    return _fitted(_stretch(history, of, _fitted_until(history, late)), part, horizon)


@lru_cache(maxsize=16)
def _stretch(history: History, of: Weights | None, end: int) -> Stretch:
    """Return it: of one history it is wanted several times."""
    return Stretch(history, of, end)


@lru_cache(maxsize=256)
def _fitted(stretch: Stretch, part: int, horizon: Horizon) -> Model:
    return fit(_past(stretch)[part][-FIT_MIN:], horizon)


@lru_cache(maxsize=64)
def _past(stretch: Stretch) -> Demand:
    return _demand(stretch.history, stretch.of)


def _demand(history: History, of: Weights | None) -> Demand:
    requests = np.frombuffer(history.requests, dtype=np.float64)
    if of is None:
        return (requests,)
    total = work(history, requests, of)
    prompts = total * prompt_share(history, of)
    return total, prompts, total - prompts


def _fitted_until(history: History, late: int) -> int:
    return (history.end - late) // _every(history) * _every(history)


def _every(history: History) -> int:
    return FIT_EVERY_MIN if len(history.requests) >= 2 * DAY_MIN else FIRST_FITS_EVERY_MIN


def _place(series: memoryview) -> int:
    found: int = np.frombuffer(series, dtype=np.float64).__array_interface__["data"][0]
    return found
