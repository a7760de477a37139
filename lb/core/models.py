"""Which target serves which models, and so which targets a request that names a model may be offered. Pure.

A target either lists models, or lists none (it is not an engine, or one without `/v1/models`), or has not been polled yet. A
request for a model is not offered to targets that list others. Targets that list none are offered everything, as if
there were no lists: unknown models are left to the engine.

*The usual case costs nothing.* If all targets list the same models there is nothing to choose by: then `mixed` is False, and
requests need not even be parsed for their model.

The lists of targets that are draining or gone do not count, because they take no requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import orjson

from lb.config.schema import Readiness, Target
from lb.core.target_state import Key, TargetState

_NO_EPOCHS: frozenset[int] = frozenset()
_LATEST = ":latest"


@dataclass(frozen=True, slots=True)
class ModelList:
    """The models that an engine lists: for each its name, and its entry in the list as JSON."""

    entries: Mapping[str, bytes]
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        # Ollama lists "llama3:latest" and accepts "llama3".
        short = {name.removesuffix(_LATEST) for name in self.entries}
        object.__setattr__(self, "names", frozenset(self.entries) | short)


def read_models(body: bytes) -> ModelList | None:
    """Return what the body of a response to `GET /v1/models` lists; None if it is no such list, or empty."""
    try:
        json = orjson.loads(body)
        data = json.get("data") if type(json) is dict else None
        entries = {
            one["id"]: orjson.dumps(one)
            for one in (data if type(data) is list else ())
            if type(one) is dict and type(one.get("id")) is str and one["id"]
        }
    except (orjson.JSONDecodeError, TypeError):  # TypeError: nested more deeply than orjson writes
        return None
    return ModelList(entries) if entries else None


class ModelDirectory:
    """The model lists of a table's targets. The table reports when its targets or their epochs have changed."""

    __slots__ = (
        "_barred",
        "_entries",
        "_lists",
        "_merged",
        "_names",
        "_open",
        "_polled",
        "_unlisted",
        "changes",
        "differ",
        "mixed",
        "pinned",
        "version",
    )

    def __init__(self, entries: Mapping[str, TargetState]) -> None:
        self._entries = entries
        self._open: list[TargetState] = []  # neither draining nor gone
        self._lists: dict[
            Key, ModelList | None
        ] = {}  # of targets that have been polled; None: it lists no models
        self._names: frozenset[str] = frozenset()  # all that are listed
        self._unlisted = False  # a target lists no models, or has not been polled yet
        self._polled = True  # all targets have been
        self._barred: dict[str, frozenset[int]] = {}
        self._merged: bytes | None = None
        self.changes = 0  # of what `targets` returns
        self.version = (
            0  # changes whenever what `barred` returns may have changed, or a target of a table with zones
        )
        self.mixed = False  # two targets may serve different models
        self.differ = False  # two targets list different models
        self.pinned = False  # some requests may have some targets only, for their residency

    # --- questions

    def barred(self, model: str) -> frozenset[int]:
        """Return the epochs of the targets that do not serve the model. `model` is empty if a request names none."""
        if not model or not self.mixed:
            return _NO_EPOCHS
        name = model if model in self._names else ""  # clients make up any number of names
        epochs = self._barred.get(name)
        if epochs is None:
            epochs = frozenset(one.epoch for one in self._open if self._serves(one.key, name) is False)
            self._barred[name] = epochs
        return epochs

    def missing(self, model: str) -> bool:
        """Return True if it is certain that no target serves the model, although they serve others."""
        return self.differ and not self._unlisted and model != "" and model not in self._names

    def serves(self, target_id: str, model: str) -> bool | None:
        """Return whether the target serves the model; None if its models are not known."""
        entry = self._entries.get(target_id)
        return None if entry is None else self._serves(entry.key, model)

    def names_of(self, key: Key) -> frozenset[str] | None:
        """Return the models that a target lists; None if it lists none, or has not been polled yet."""
        return _names(self._lists.get(key))

    def served_elsewhere(self, model: str, tried: Collection[int]) -> bool:
        """Return True if a target whose epoch is not in `tried` lists the model, or has not been polled yet."""
        if self._polled and model not in self._names:
            return False
        return any(
            one.epoch not in tried and (one.key not in self._lists or self._serves(one.key, model))
            for one in self._open
        )

    def merged(self) -> bytes:
        """Return the lists of all targets as one, in the shape of OpenAI: each name once, the first target's entry."""
        if self._merged is None:
            self._merged = b'{"object":"list","data":[%b]}' % b",".join(self._all_entries().values())
        return self._merged

    def entry(self, model: str) -> bytes | None:
        """Return the entry of one model; None if no target lists it."""
        entries = self._all_entries()
        return entries.get(model) or entries.get(model + _LATEST)

    def targets(self) -> Iterator[tuple[Key, Target, int]]:
        """Yield every target whose list counts, with its epoch."""
        for one in self._open:
            yield one.key, one.target, one.epoch

    # --- reports

    def table_changed(self) -> None:
        """The targets of the table have changed."""
        self.changes += 1
        self._open = [one for one in self._entries.values() if one.target.state is not Readiness.DRAINING]
        self._lists = {one.key: self._lists[one.key] for one in self._open if one.key in self._lists}
        self._compare()

    def renewed(self) -> None:
        """The epoch of a target has changed."""
        self.changes += 1
        self._barred.clear()
        self.version += self.mixed or self.pinned

    def learned(self, entry: TargetState, models: ModelList | None) -> bool:
        """Return a target lists these models, or none. Returns True if it may serve a model that it did not serve before."""
        key = entry.key
        if entry.target.state is Readiness.DRAINING:
            return False
        first = key not in self._lists
        before = self._lists.get(key)
        self._lists[key] = models
        self._merged = None  # even if the names are the same: engines put the time of the poll into entries
        if not first and _names(before) == _names(models):
            return False
        self._compare()
        return before is not None and (models is None or not models.names <= before.names)

    # --- inside

    def _serves(self, key: Key, model: str) -> bool | None:
        models = self._lists.get(key)
        return None if models is None else model in models.names

    def _all_entries(self) -> dict[str, bytes]:
        entries: dict[str, bytes] = {}
        for one in self._open:
            models = self._lists.get(one.key)
            for name, entry in models.entries.items() if models is not None else ():
                entries.setdefault(name, entry)
        return entries

    def _compare(self) -> None:
        lists = {_names(self._lists.get(one.key)) for one in self._open}
        known = [names for names in lists if names is not None]
        self._polled = all(one.key in self._lists for one in self._open)
        self._names = frozenset().union(*known)
        self._unlisted = None in lists
        self.differ = len(known) > 1
        self.mixed = len(lists) > 1 or not self._polled
        self._barred.clear()
        self._merged = None
        self.version += 1


def _names(models: ModelList | None) -> frozenset[str] | None:
    return models.names if models is not None else None
