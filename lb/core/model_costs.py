"""What requests to each model have cost lately, for those whose engine never said: bytes of text per token, and the pace of responses. Pure.

A client that hangs up gets no report of tokens. Its prompt counts by the model's usual bytes per token; what the engine had
written of a response that is not a stream, by how long it had been at it.
"""

from __future__ import annotations

from typing import Final

BYTES_PER_TOKEN: Final = 4.0  # until a model's engine has counted
MOST_MODELS: Final = 256
_LEARN: Final = 0.1  # the weight of one more request in the running means
_LEAST_TEXT_BYTES: Final = 64  # shorter prompts say more about the template than about the text
_LEAST_TOKENS: Final = 8  # of a response that says something about the pace
_RANGE = (
    1.0,
    6.0,
)  # of bytes per token: prompts that are made for it (white space) do not make others cheap


class ModelCost:
    """The running means of one model."""

    __slots__ = ("_bytes_per_token", "_first_s", "_gap_s")

    def __init__(self) -> None:
        self._bytes_per_token = BYTES_PER_TOKEN
        self._first_s: float | None = None
        self._gap_s: float | None = None

    def prompt_tokens(self, text_bytes: int) -> int:
        return round(text_bytes / self._bytes_per_token)

    def generated(self, ran_s: float) -> int | None:
        """Return how many tokens a request has probably made that an engine has had for so long; None if nothing is known."""
        if not self._gap_s:
            return None
        return max(0, round((ran_s - (self._first_s or 0.0)) / self._gap_s))

    def read(self, text_bytes: int, tokens: int) -> None:
        """An engine has counted the tokens of a prompt that is nothing but text."""
        if text_bytes >= _LEAST_TEXT_BYTES and tokens:
            found = min(_RANGE[1], max(_RANGE[0], text_bytes / tokens))
            self._bytes_per_token += _LEARN * (found - self._bytes_per_token)

    def wrote(self, ran_s: float, first_s: float | None, tokens: int) -> None:
        """An engine has made a response of so many tokens in `ran_s` seconds; of a stream the first came after `first_s`."""
        if tokens < _LEAST_TOKENS:
            return
        if first_s is not None:
            self._first_s = _mean(self._first_s, first_s)
        begun_s = self._first_s or 0.0 if first_s is None else first_s
        self._gap_s = _mean(self._gap_s, max(0.0, ran_s - begun_s) / tokens)


class ModelCosts:
    """By model. Those of which nothing has been learned, and those beyond MOST_MODELS, share one."""

    __slots__ = ("_costs", "_others")

    def __init__(self) -> None:
        self._costs: dict[str, ModelCost] = {}
        self._others = ModelCost()

    def of(self, model: str) -> ModelCost:
        return self._costs.get(model, self._others)

    def served(self, model: str) -> ModelCost:
        """Return the costs of a model that an engine has served. A client may name any other, and makes no room for it by that."""
        cost = self._costs.get(model)
        if cost is None:
            if len(self._costs) >= MOST_MODELS:
                return self._others
            cost = self._costs[model] = ModelCost()
        return cost


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _LEARN * (value - mean)
