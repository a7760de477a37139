"""What the requests of each API key and model have used. Pure, and on the path of every request.

A client chooses the model that it names, so a name gets a sum of its own only once an engine has served it to this key, and
neither one key nor all of them can make more sums than MOST_MODELS and MOST_SUMS. The rest is in the key's sum of the model "".
"""

from __future__ import annotations

from typing import Final, NamedTuple

MOST_MODELS: Final = 64  # of one key, in one day
MOST_SUMS = 20_000  # of all keys, in one day; each key has one more for the rest
LONGEST_MODEL: Final = 200


class UsageSum(NamedTuple):
    """Requests that are over, and their tokens, of one key and model. `key` is the name of the key's owner."""

    key: str
    model: str
    requests: int
    tokens_in: int
    tokens_out: int


class _Counter:
    """What has been added since it was last taken."""

    __slots__ = ("key", "model", "requests", "tokens_in", "tokens_out")

    def __init__(self, key: str, model: str) -> None:
        self.key = key
        self.model = model
        self.requests = 0
        self.tokens_in = 0
        self.tokens_out = 0

    def take(self) -> UsageSum:
        taken = UsageSum(self.key, self.model, self.requests, self.tokens_in, self.tokens_out)
        self.requests = self.tokens_in = self.tokens_out = 0
        return taken


class KeyUsage:
    """Sums by key and model since they were last taken. Counters stay for a day, so the next request only adds."""

    __slots__ = ("_counters", "_models", "_touched")

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], _Counter] = {}
        self._models: dict[str, int] = {}  # how many have counters of their own, by key
        self._touched: list[_Counter] = []  # that are not 0

    def add(self, key: str, model: str, served: bool, tokens_in: int, tokens_out: int) -> None:
        """Count a request that is over. `served`: an engine has accepted the model that it names."""
        counter = self._counters.get((key, model))
        if counter is None:
            counter = self._new(key, model, served)
        if not counter.requests:
            self._touched.append(counter)
        counter.requests += 1
        counter.tokens_in += tokens_in
        counter.tokens_out += tokens_out

    def take(self) -> list[UsageSum]:
        """Return the sums, and begin at 0."""
        taken = [counter.take() for counter in self._touched]
        self._touched.clear()
        return taken

    def forget_models(self) -> None:
        """A new day: models that are no longer requested need no place. What was not taken stays."""
        self._counters = {}
        self._models = {}

    def _new(self, key: str, model: str, served: bool) -> _Counter:
        if model:
            models = self._models.get(key, 0)
            has_room = models < MOST_MODELS and len(self._counters) < MOST_SUMS
            if served and has_room and len(model) <= LONGEST_MODEL and model.isprintable():
                self._models[key] = models + 1
            else:
                model = ""
        counter = self._counters.get((key, model))
        if counter is None:
            counter = self._counters[key, model] = _Counter(key, model)
        return counter
