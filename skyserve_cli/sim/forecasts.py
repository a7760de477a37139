"""What the predictive autoscaler foresaw in a trial, against what came: for the pictures of a report."""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

import numpy as np

from policies.forecast import past
from policies.forecast.demand import Floats
from policies.history import History
from policies.scaling.predictive import ADD_MIN, CHANCES, forecast_demand
from skyserve_cli.sim.scaling import MINUTE_S, ScalingTrial

MOST_ROWS = 600


class Forecasts(NamedTuple):
    """A row per forecast: the minute it is about, `CHANCES` equally likely values of the busiest of its `ADD_MIN` minutes, and what came.

    Requests of the usual size per minute.
    """

    minutes: Floats
    values: Floats
    came: Floats

    def quantile(self, share: float) -> Floats:
        found: Floats = np.quantile(self.values, share, axis=1)
        return found

    def covered(self, share: float) -> float:
        """Return the share of what came that was not above this quantile."""
        return float(np.mean(self.came <= self.quantile(share)))


def forecasts(trial: ScalingTrial) -> Forecasts | None:
    """Return the forecasts of every few minutes of the judged part; None where it is too short for one."""
    asked = trial.by_minute(trial.work())
    minutes = len(asked)
    known = memoryview(array("d", asked)).toreadonly()
    lead = max(1, math.ceil(trial.cold_start_s / MINUTE_S))
    last = minutes - lead - ADD_MIN + 1
    if last - trial.known_min < 1:
        return None
    asked_in = range(trial.known_min, last, max(1, (last - trial.known_min) // MOST_ROWS))
    values = np.empty((len(asked_in), CHANCES))
    for row, number in enumerate(asked_in):
        history = History(0, known[:number], known[:number])
        values[row] = forecast_demand(history, None, past.recent(history, None), trial.cold_start_s, False)[2]
    about = np.array(asked_in) - 1 + lead
    came = np.max([asked[about + width] for width in range(ADD_MIN)], axis=0)
    return Forecasts(about.astype(np.float64), values, came)
