"""What the requests of each API key and model have used. Pure, and on the path of every request.

A client chooses the model that it names, so a name gets a sum of its own only once an engine has served it to this key, and
neither one key nor all of them can make more sums than MOST_MODELS and MOST_SUMS. The rest is in the key's sum of the model "".
"""

from __future__ import annotations

MOST_MODELS = 64  # of one key, in one day
MOST_SUMS = 20_000  # of all keys, in one day; each key has one more for the rest
LONGEST_MODEL = 200


class UsageSum:
    """Requests that are over, and their tokens."""

    __slots__ = ("requests", "tokens_in", "tokens_out")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens_in = 0
        self.tokens_out = 0

    def add(self, other: UsageSum) -> None:
        self.requests += other.requests
        self.tokens_in += other.tokens_in
        self.tokens_out += other.tokens_out


class KeyUsage:
    """The sums since they were last taken, by (name of the key's owner, model)."""

    __slots__ = ("_count", "_models", "_sums")

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], UsageSum] = {}
        self._models: dict[str, set[str]] = {}  # that have sums of their own, by key
        self._count = 0

    def add(self, key: str, model: str, served: bool, tokens_in: int, tokens_out: int) -> None:
        """Count a request that is over. `served`: an engine has accepted the model that it names."""
        found = self._sums.get((key, model))
        if found is None:
            found = self._new(key, model, served)
        found.requests += 1
        found.tokens_in += tokens_in
        found.tokens_out += tokens_out

    def take(self) -> dict[tuple[str, str], UsageSum]:
        """Return the sums, and begin with none."""
        taken, self._sums = self._sums, {}
        return taken

    def forget_models(self) -> None:
        """A new day: models that are no longer requested need no place."""
        self._models = {}
        self._count = 0

    def _new(self, key: str, model: str, served: bool) -> UsageSum:
        models = self._models.get(key)
        if models is None:
            models = self._models[key] = set()
        if model and model not in models:
            has_room = len(models) < MOST_MODELS and self._count < MOST_SUMS
            if served and has_room and len(model) <= LONGEST_MODEL and model.isprintable():
                models.add(model)
                self._count += 1
            else:
                model = ""
        found = self._sums.get((key, model))
        if found is None:
            found = self._sums[key, model] = UsageSum()
        return found
