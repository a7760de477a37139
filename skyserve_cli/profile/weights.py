"""What a token of a response weighs in tokens of a prompt, from capacities measured with requests of different lengths.

A replica that carries `q` requests per second, of `p` prompt and `d` response tokens, is full with the work `q (a p + b d)`. So each
run says `q (a p + b d) = 1`; `a` and `b` are the least-squares solution, and the weight is `b / a`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

LEAST, MOST = 0.05, 100.0
DIFFERENT = 2.0  # response tokens per prompt token, at most over at least: below, one run does not differ from the other


class ResultError(Exception):
    """A file has no result of `serve profile`. The text says which, and why."""


class Carried(NamedTuple):
    """What a replica carries of requests per second, and the mean tokens of one of them."""

    qps: float
    prompt: float
    response: float


def response_weight(runs: Sequence[Carried]) -> float | None:
    """Return the weight, from `LEAST` to `MOST`; None where the lengths of all runs are much the same."""
    odds = [one.response / one.prompt for one in runs]
    if not odds or max(odds) < DIFFERENT * min(odds):
        return None
    rows = np.array([(one.qps * one.prompt, one.qps * one.response) for one in runs])
    (prompt, response), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    if prompt <= 0.0:
        return MOST
    return float(min(MOST, max(LEAST, response / prompt)))


def carried_of(path: Path) -> Carried:
    """Return what a file of ``serve profile -o json`` says. Raises ResultError."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        names = ("capacity_qps", "mean_prompt_tokens", "mean_response_tokens")
        found = Carried(*(float(result[name]) for name in names))
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        found = Carried(0.0, 0.0, 0.0)
    if not all(0.0 < one < 1e9 for one in found):
        raise ResultError(f"{path} has no capacity and mean tokens, as serve profile -o json prints them")
    return found
