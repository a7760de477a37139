"""What recorded tokens ask of simulated replicas: the work of a request, step by step.

A token of a response weighs `response_weight` tokens of a prompt. A request of the usual size, which is the mean of the part of the
recording that is known beforehand, is 1: a profile of that part would say so. Between the middles of two bins the size changes along
a straight line, and all requests of a step have the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from policies.forecast.demand import Floats
from skyserve_cli.sim.arrivals import Arrivals
from skyserve_cli.sim.slo_queue import STEP_S

#: Requests at a time in a replica at its capacity: in proportion to the work, as Little's law has it where a token takes its time.
RUNNING = 8.0


class TokenSteps(NamedTuple):
    """Of a request in each step: tokens of its prompt and of its response, and its work; `reported`: whether autoscalers see tokens."""

    prompt: Floats
    response: Floats
    size: Floats
    reported: bool = True


def token_steps(
    arrivals: Arrivals, length_s: float, known_s: float, response_weight: float, step_s: float = STEP_S
) -> TokenSteps | None:
    """Return the tokens of `length_s` seconds; None where the recording has none. `known_s` 0: the usual size is that of all."""
    if arrivals.tokens is None:
        return None
    at_s = np.asarray(arrivals.at_s)
    bins = (at_s[1:] + at_s[:-1]) / 2.0
    middles = (np.arange(math.ceil(length_s / step_s)) * step_s + step_s / 2.0) % at_s[-1]
    usual = _mean_size(arrivals, 0.0, known_s or length_s, response_weight)
    prompt, response = (np.interp(middles, bins, tokens) for tokens in arrivals.tokens)
    return TokenSteps(prompt, response, (prompt + response_weight * response) / usual)


def work_share(arrivals: Arrivals, length_s: float, known_s: float, response_weight: float) -> float:
    """Return the work of a request from `known_s` on; 1 is that of one before. 1 where there are no tokens."""
    if arrivals.tokens is None or not known_s:
        return 1.0
    later, usual = (
        _mean_size(arrivals, *span, response_weight) for span in ((known_s, length_s), (0.0, known_s))
    )
    return later / usual


def _mean_size(arrivals: Arrivals, start_s: float, end_s: float, response_weight: float) -> float:
    assert arrivals.tokens is not None  # noqa: S101 - the callers asked
    at_s = np.clip(arrivals.at_s, start_s, end_s)
    requests = np.diff(np.interp(at_s, arrivals.at_s, arrivals.counts))
    prompt, response = (np.asarray(tokens) for tokens in arrivals.tokens)
    total = float(requests.sum())
    found = float((requests * (prompt + response_weight * response)).sum()) / total if total else 0.0
    return found if found > 0.0 else 1.0
