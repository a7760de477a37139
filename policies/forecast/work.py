"""One unit of work for requests of different length: what tokens and requests weigh, learned from a service's own minutes.

Engines carry tokens, and tokens per request move within a day. Work is

    work  =  request * requests  +  prompt * tokens of prompts  +  response * tokens of responses

and 1 is a request of the service's usual size, so that what a replica carries stays a number of requests per second. The usual
size is the mean of what was known when half a day of tokens was; from then on it stays.

*Weights* are learned per accelerator and version from the mean number of requests that run at a time. By Little's law that is the
seconds that all of them take, and in a batch a token holds up the others for as long as the engine needs for it: requests of
more tokens are seen to take longer. Each minute is a row of a least-squares regression without negative weights of the running
requests per request on the tokens per request; old minutes fade as in `forecast.capacity`. Minutes in which many were late say how long
they waited, and teach nothing. An engine with little to do waits for
its memory and computes prompts meanwhile, so light minutes make responses look heavier than they are where it matters: a response token
is held to weigh at most `MOST_RATIO` times what the prior says against one of a prompt, and at least as little. The prior counts like `PRIOR_MIN` minutes of requests that differ widely: a response token is what the service file says of it, or
a token like others, as in PreServe's hybrid rate (Algorithm 1), and a request weighs nothing of its own. Prompt tokens that were found in a cache are not separate in the minutes:
they make the mean prompt token lighter.

*Size* is the work of a request in the last minute. One request's luck is not demand, so the minute is mixed with `LUCK` requests of
the size of the last `SIZE_MIN` minutes, and these with `USUAL_REQUESTS` usual ones: of many requests the last minute counts, of few
what is usual. Tokens count when a request ends: while many are late the size does not sink, and without a token it stays.
A minute's work is its requests times its size.

PreServe takes the largest of three needs: of prompts, of responses and of both, each with a rate of its own. An engine that serves
both carries the sum of their work, so here one capacity is learned, of that sum, and the scaler forecasts the parts and the sum.

Minutes without tokens (older load balancers, audio, images) count as requests of the usual size, and a service that never had any
is counted by requests.

Memory: {"usual": [tokens of a prompt, of a response], "minutes": how many it is of, "weights": those in use, "kinds": {kind: sums of
the regression}}.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from policies.forecast.capacity import FADE, MOST_KINDS
from policies.forecast.demand import Floats
from policies.history import History, Load
from policies.model import Json

SIZE_MIN = 5
LUCK = 200.0
USUAL_REQUESTS = 30.0
USUAL_MIN = 720  # minutes with tokens, after which the usual size stays
LATE_SHARE = 0.1  # of a minute's requests: more, and its tokens are those of another time
MOST_RATIO = 4.0
PRIOR_MIN = 1.0
RESPONSE_WEIGHT = 1.0  # of a response token in those of a prompt token, before anything is learned
LEAST_REQUESTS = 20.0  # of a minute that teaches weights
LEAST_CHANGE = 0.02  # of a weight in use: forecasts are fitted again for it
UNKNOWN_KIND = "@0"  # of a fleet that is not known


class Weights(NamedTuple):
    """The work of a request as such, of a token of its prompt, and of one of its response."""

    request: float
    prompt: float
    response: float


def has_tokens(history: History) -> bool:
    """Return whether any minute has tokens."""
    if history.prompt is None or history.response is None:
        return False
    return any(bool((tokens > 0.0).any()) for tokens in _tokens(history))


def in_use(memory: Json) -> Weights | None:
    """Return the weights in use; None where requests are counted."""
    return Weights(*memory["weights"]) if "weights" in memory else None


def refresh(memory: Json, history: History, kinds: Sequence[str], start: float | None = None) -> Json:
    """Return the memory with the weights that a fleet of these kinds is to be sized by, from `start` on; empty if there are no tokens.

    A change of a weight changes the whole history, so this is for the minutes in which a forecast is fitted.
    """
    if not has_tokens(history):
        return {}
    usual, minutes = memory.get("usual"), memory.get("minutes", 0)
    if usual is None or minutes < USUAL_MIN:
        usual, minutes = _usual(history)
    known = memory.get("kinds", {})
    fleet = Counter(kinds) or Counter([UNKNOWN_KIND])
    each = [weights(known, kind, usual, start or RESPONSE_WEIGHT) for kind in fleet]
    found = np.average(each, axis=0, weights=list(fleet.values())).tolist()
    before = memory.get("weights")
    if before is not None and usual == memory.get("usual") and not _differ(found, before, usual):
        found = before
    return {**memory, "usual": usual, "minutes": minutes, "weights": [_rounded(one) for one in found]}


def learn(memory: Json, history: History, kinds: Sequence[str], load: Load) -> Json:
    """Return the memory after the last minute of the history, in which `load` was measured."""
    requests, late = history.requests[-1], history.requests[-1] - history.within_slo[-1]
    if "usual" not in memory or history.prompt is None or history.response is None:
        return memory
    running = load.ongoing - load.queued
    tokens = history.prompt[-1], history.response[-1]
    is_late = late > LATE_SHARE * requests
    if not requests >= LEAST_REQUESTS or is_late or running <= 0.0 or not sum(tokens) > 0:
        return memory
    row = (1.0, tokens[0] / requests, tokens[1] / requests)
    pairs = [a * b for index, a in enumerate(row) for b in row[index:]]
    sums = [*pairs, *(one * running / requests for one in row)]
    known = dict(memory.get("kinds", {}))
    for kind in dict.fromkeys(kinds) or (UNKNOWN_KIND,):
        before = known.pop(kind, None) or [0.0] * len(sums)
        known[kind] = [_rounded(FADE * old + new) for old, new in zip(before, sums, strict=True)]
    for oldest in list(known)[: max(0, len(known) - MOST_KINDS)]:
        del known[oldest]
    return {**memory, "kinds": known}


def weights(known: Json, kind: str, usual: list[float], start: float = RESPONSE_WEIGHT) -> Weights:
    """Return the weights of a kind, of its newest known version where it is new, or the prior, in which responses weigh `start`."""
    accelerator = kind.rpartition("@")[0]
    alike = [one for one in known if one.rpartition("@")[0] == accelerator]
    scale = np.array([1.0, max(usual[0], 1.0), max(usual[1], 1.0)])
    prior = np.array([0.0, scale[1], start * scale[2]])
    shares = prior / prior.sum()
    if alike:
        newest = kind if kind in known else max(alike, key=lambda one: int(one.rpartition("@")[2]))
        shares = _shares(np.array(known[newest]), scale, shares)
        if shares[1] + shares[2] > 0.0:
            least = prior[2] / prior[1] / MOST_RATIO
            odds = np.clip(shares[2] / max(shares[1], 1e-9), least, least * MOST_RATIO**2)
            shares[1:] = (shares[1] + shares[2]) * np.array([1.0, odds]) / (1.0 + odds)
    found: list[float] = (shares / scale).tolist()
    return Weights(*found)


def work(history: History, requests: Floats, of: Weights) -> Floats:
    """Return the work of each minute; NaN where its requests are not known."""
    prompt, response = _tokens(history)
    within = np.frombuffer(history.within_slo, dtype=np.float64)
    tokens = of.prompt * prompt + of.response * response
    known = (tokens > 0.0) & (requests > 0.0)
    usual = 1.0 - of.request
    came, carried = np.where(known, requests, 0.0), np.where(known, tokens, 0.0)
    before = (_last(carried) + USUAL_REQUESTS * usual) / (_last(came) + USUAL_REQUESTS)
    size = (carried + LUCK * before) / (came + LUCK)
    sound = known & ~(requests - within > LATE_SHARE * requests)
    at = np.maximum.accumulate(np.where(sound, np.arange(len(size)), -1))
    sound_size = np.where(at >= 0, size[at], usual)
    found: Floats = requests * (of.request + np.where(known, np.maximum(size, sound_size), sound_size))
    return found


def prompt_share(history: History, of: Weights) -> Floats:
    """Return the share of prompts in the work of each minute's tokens; one half where there are none."""
    prompt, response = _tokens(history)
    prompts = of.prompt * prompt
    tokens = prompts + of.response * response
    found: Floats = np.divide(prompts, tokens, out=np.full(len(tokens), 0.5), where=tokens > 0.0)
    return found


def _last(series: Floats) -> Floats:
    """Return the sums of the last `SIZE_MIN` minutes."""
    found: Floats = series.copy()
    for back in range(1, SIZE_MIN):  # not by a running sum, whose rounding depends on where it began
        found[back:] += series[:-back]
    return found


def _usual(history: History) -> tuple[list[float], int]:
    """Return the mean tokens of a prompt and of a response, and of how many minutes."""
    prompt, response = _tokens(history)
    requests = np.frombuffer(history.requests, dtype=np.float64)
    known = (prompt + response > 0.0) & (requests > 0.0)
    came = max(1e-9, float(requests[known].sum()))
    usual = [_rounded(float(tokens[known].sum()) / came) for tokens in (prompt, response)]
    return usual, int(known.sum())


def _shares(sums: Floats, scale: Floats, prior: Floats) -> Floats:
    """Return the shares of a usual request's work, from the sums of the regression; they are at least 0 and add up to 1."""
    squares = np.empty((3, 3))
    squares[np.triu_indices(3)] = sums[:6]
    squares = np.triu(squares) + np.triu(squares, 1).T
    squares, products = squares / scale[:, None] / scale, sums[6:] / scale
    usual_s = products[0] / max(1e-9, float(squares[0] @ prior))  # running requests per request of the prior
    squares, products = squares + PRIOR_MIN * np.eye(3), products + PRIOR_MIN * usual_s * prior
    free = np.ones(3, dtype=np.bool_)
    found = np.zeros(3)
    while free.any():
        found = np.zeros(3)
        found[free] = np.linalg.solve(squares[np.ix_(free, free)], products[free])
        if (found >= 0.0).all():
            break
        free &= found > np.min(found)
    total = float(found.sum())
    shares: Floats = found / total if math.isfinite(total) and total > 0.0 else prior
    return shares


def _differ(found: Iterable[float], before: Iterable[float], usual: list[float]) -> bool:
    sizes = (1.0, *usual)
    return any(
        abs(new - old) * size > LEAST_CHANGE for new, old, size in zip(found, before, sizes, strict=True)
    )


def _tokens(history: History) -> tuple[Floats, Floats]:
    assert history.prompt is not None  # noqa: S101 - `has_tokens` was asked
    assert history.response is not None  # noqa: S101
    return (
        np.frombuffer(history.prompt, dtype=np.float64),
        np.frombuffer(history.response, dtype=np.float64),
    )


def _rounded(value: float) -> float:
    """Eight significant digits: differences of large sums are what is learned."""
    return float(f"{value:.8g}")
