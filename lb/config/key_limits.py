"""The limits of an API key, altogether or of one model, as values <-> JSON; and the prices by which tokens become money."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Final

from lb.config.decode import MAX_ITEMS, MAX_TEXT, Fields, WireError, is_visible, kind_of

MAX_CONCURRENT: Final = 1_000_000
OTHER_MODELS: Final = "*"
_MOST: Final = 1e12


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """How much may be used; 0 is no limit.

    Input tokens are those of prompts, output tokens those of responses, and tokens are both. Per minute, a limit is a bucket that fills
    evenly (`lb.core.quota`). Days and months are those of the calendar in UTC. `max_concurrent` bounds the requests under way, those that wait for a
    target included. US dollars come from tokens by `Price`.
    """

    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    input_tokens_per_minute: float = 0.0
    output_tokens_per_minute: float = 0.0
    requests_per_day: float = 0.0
    tokens_per_day: float = 0.0
    input_tokens_per_day: float = 0.0
    output_tokens_per_day: float = 0.0
    tokens_per_month: float = 0.0
    usd_per_month: float = 0.0
    max_concurrent: int = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether any limit is one of tokens, or of what they cost."""
        return any(getattr(self, name) for name in _OF_TOKENS)

    @property
    def of_calendar(self) -> bool:
        """Whether any limit is one of days or months."""
        return any(getattr(self, name) for name in _OF_CALENDAR)

    def to_json(self) -> dict[str, Any]:
        """Return those that are limits."""
        return {name: getattr(self, name) for name in LIMITS if getattr(self, name)}

    @classmethod
    def read(cls, given: Fields) -> KeyLimits:
        """Take the limits from an object that may have more. Raises WireError."""
        numbers = tuple(given.number(name, 0.0, _MOST, 0.0) for name in LIMITS[:-1])
        return _shared(numbers, given.integer("max_concurrent", 0, MAX_CONCURRENT, 0))


LIMITS: Final = tuple(one.name for one in fields(KeyLimits))
_OF_TOKENS: Final = tuple(name for name in LIMITS if "tokens" in name or "usd" in name)
_OF_CALENDAR: Final = tuple(name for name in LIMITS if name.endswith(("_day", "_month")))


@lru_cache(maxsize=1024)
def _shared(numbers: tuple[float, ...], max_concurrent: int) -> KeyLimits:
    """Return one object for equal limits: most of 10,000 keys have the same."""
    return replace(KeyLimits(**dict(zip(LIMITS, numbers, strict=False))), max_concurrent=max_concurrent)  # type: ignore[arg-type]


NO_LIMITS: Final = _shared((0.0,) * (len(LIMITS) - 1), 0)
ModelLimits = tuple[tuple[str, KeyLimits], ...]
"""By the name of a model in requests. OTHER_MODELS has those of all other names together, and of requests that name none."""


def models_to_json(models: ModelLimits) -> dict[str, Any]:
    return {name: limits.to_json() for name, limits in models}


def models_from_json(value: object, path: str) -> ModelLimits:
    """Raise WireError."""
    found = []
    for name, one, at in _by_model(value, path):
        given = Fields(one, at)
        found.append((name, KeyLimits.read(given)))
        given.done()
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars per million tokens."""

    input: float
    output: float

    def usd(self, tokens_in: float, tokens_out: float) -> float:
        return (tokens_in * self.input + tokens_out * self.output) / 1e6

    def to_json(self) -> dict[str, float]:
        return {"input": self.input, "output": self.output}

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Price:
        given = Fields(value, path)
        price = cls(given.number("input", 0.0, 1e6), given.number("output", 0.0, 1e6))
        given.done()
        return price


FREE: Final = Price(0.0, 0.0)
Prices = tuple[tuple[str, Price], ...]
"""By the name of a model in requests; OTHER_MODELS is any other. Without either, tokens cost nothing."""


def price_of(prices: Mapping[str, Price], model: str) -> Price:
    price = prices.get(model)
    return price if price is not None else prices.get(OTHER_MODELS, FREE)


def prices_to_json(prices: Prices) -> dict[str, Any]:
    return {name: price.to_json() for name, price in prices}


def prices_from_json(value: object, path: str) -> Prices:
    """Raise WireError."""
    return tuple((name, Price.from_json(one, at)) for name, one, at in _by_model(value, path))


def _by_model(value: object, path: str) -> list[tuple[str, object, str]]:
    """Return (model, value, path of the value)."""
    if not isinstance(value, dict):
        raise WireError(path, f"expected an object, got {kind_of(value)}")
    if len(value) > MAX_ITEMS:
        raise WireError(path, f"more than {MAX_ITEMS} entries")
    for name in value:
        if not 0 < len(name) <= MAX_TEXT or not is_visible(name):
            raise WireError(path, "expected the names of models")
    return [(name, one, f"{path}.{name[:80]}") for name, one in value.items()]
