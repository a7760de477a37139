"""The owner of one or several API keys: its quotas, its past responses, and its account in this process. Pure; `now` is an argument."""

from __future__ import annotations

from typing import Final

from lb.config.key_limits import OTHER_MODELS
from lb.config.options import ApiKey
from lb.core.calendar import Calendar
from lb.core.limit_store import LimitStore
from lb.core.quota import Left, Quota

# What a request is expected to generate at least: short requests, of which anybody can send many, do not lower it further.
LEAST_EXPECTED: Final = 256
_REMEMBERED: Final = 64  # responses
_QUANTILE: Final = 0.9
_RANK_EVERY: Final = 8  # responses: ranking costs microseconds


class PastResponses:
    """How many tokens each choice of the last responses had."""

    __slots__ = ("_counts", "_oldest", "_unranked", "expected")

    def __init__(self) -> None:
        self.expected = (
            LEAST_EXPECTED  # tokens that nine of ten responses do not exceed, and never less than the least
        )
        # The last ones, in a ring: an empty deque has room for 64, which is 7 MiB of 10,000 keys.
        self._counts: list[int] = []
        self._oldest = 0
        self._unranked = 0

    def add(self, tokens: int) -> None:
        if len(self._counts) < _REMEMBERED:
            self._counts.append(tokens)
        else:
            self._counts[self._oldest] = tokens
            self._oldest = (self._oldest + 1) % _REMEMBERED
        self._unranked += 1
        if self._unranked >= _RANK_EVERY or tokens > self.expected:
            self._unranked = 0
            ranked = sorted(self._counts)
            self.expected = max(LEAST_EXPECTED, ranked[int(_QUANTILE * (len(ranked) - 1))])


class Tenant:
    """`whole` has the limits of the key, `models` those of its models, by the names of `ApiKey.models`."""

    __slots__ = ("_past", "admitted", "key", "limited", "models", "reads_bodies", "used", "whole", "zones")

    def __init__(self, key: ApiKey, store: LimitStore) -> None:
        """`use` and `change` must follow."""
        self.key = key
        self.zones = zones_of(key)
        self.whole = Quota(key.name, "", store)
        self.models: dict[str, Quota] | None = None  # of most keys
        self.reads_bodies = False  # whether limits depend on what is in a request's body
        self.admitted = 0
        self.limited = 0
        self.used = 0
        self._past: PastResponses | None = None  # of one whose limits ask for it: 2 MiB of 10,000 keys

    @property
    def expected(self) -> int:
        """How many tokens a choice of its next response is expected to have, at most."""
        return LEAST_EXPECTED if self._past is None else self._past.expected

    def learn(self, tokens: int) -> None:
        """A choice of a response had this many."""
        if self.reads_bodies:
            if self._past is None:
                self._past = PastResponses()
            self._past.add(tokens)

    def use(self, key: ApiKey, store: LimitStore) -> None:
        """Have the quotas of a key. `change` must follow, under the lock."""
        self.key = key
        self.zones = zones_of(key)
        before = self.models or {}
        names = [name for name, _ in key.models]
        self.models = {name: before.get(name) or Quota(key.name, name, store) for name in names} or None

    def change(self, stamp: int, now: float, today: Calendar) -> None:
        """Put the limits of the key in force, under the lock."""
        limits = ((self.whole, self.key.limits), *((self.models[name], of) for name, of in self.key.models))  # type: ignore[index]
        for quota, of_quota in limits:
            quota.load(stamp)
            quota.change(of_quota, now, today)
            quota.save()
        self.reads_bodies = self.whole.counts_tokens or self.models is not None

    def of_model(self, model: str) -> Quota | None:
        """Return the quota of a model, by its name in a request; None if only that of the key counts."""
        models = self.models
        if models is None:
            return None
        return models.get(model) or models.get(OTHER_MODELS)

    def quotas(self) -> list[Quota]:
        return [self.whole, *(self.models or {}).values()]

    def left(self, model: Quota | None) -> Left:
        """Return what is left of the limits of requests and tokens per minute; of each the one of which less is left."""
        found = self.whole.left()
        if model is None:
            return found
        of_model = model.left()
        requests = found if found[0] and (not of_model[0] or found[1] <= of_model[1]) else of_model
        tokens = found if found[2] and (not of_model[2] or found[3] <= of_model[3]) else of_model
        return requests[0], requests[1], tokens[2], tokens[3]


def zones_of(key: ApiKey) -> frozenset[str]:
    """Return the residency zones of the key's requests."""
    return frozenset({key.residency}) if key.residency else frozenset()
