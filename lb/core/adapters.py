"""Which LoRA adapters each target should have. Pure.

A client loads an adapter through the endpoint like any request, so one target has it first. What that target accepted is then
repeated on all others that serve the same models, and on those that join later. The same holds for unloading.

Per name only the last operation counts. Operations are numbered, and of each target the number that it has applied is known. A target
that lists its models shows as well what it has: one that has been started again without its adapters gets them again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NamedTuple

import orjson

from lb.core.target_state import Key

LOAD: Final = b"/v1/load_lora_adapter"
UNLOAD: Final = b"/v1/unload_lora_adapter"
MOST: Final = 1000  # names that are remembered; then those are forgotten that were named longest ago
LONGEST_BYTES: Final = 16 * 1024  # of a request
LISTED_AFTER_S: Final = 45.0  # a target that has loaded an adapter lists it by then
_LONGEST_WAIT_S: Final = 60.0


class Operation(NamedTuple):
    """A request that loads or unloads the adapter `name`. `lines` are header lines with the client's key for engines."""

    path: bytes
    name: str
    body: bytes
    lines: bytes = b""


class _Wanted(NamedTuple):
    """An operation, its number, and the models of the target that accepted it; none if they are not known."""

    number: int
    operation: Operation
    models: frozenset[str]


class _Has:
    """What one target has applied of a name."""

    __slots__ = ("at", "failures", "number")

    def __init__(self, number: int, at: float) -> None:
        self.number = number
        self.at = at  # when it applied it, or when the next attempt is due
        self.failures = 0


class Adapters:
    """The operations on adapters, and how far each target is. `now` never runs backwards."""

    def __init__(self) -> None:
        self._wanted: dict[str, _Wanted] = {}
        self._has: dict[Key, dict[str, _Has]] = {}
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def accepted(
        self,
        operation: Operation,
        key: Key | None,
        models: Collection[str],
        present: Collection[Key],
        now: float,
    ) -> None:
        """A target has done it: `key`, which serves the `models`; None if it is none of this agent's. `present` are all there are."""
        self._number += 1
        self._wanted.pop(operation.name, None)
        self._wanted[operation.name] = _Wanted(
            self._number, operation, frozenset(models) - set(self._wanted) - {operation.name}
        )
        if len(self._wanted) > MOST:
            del self._wanted[next(iter(self._wanted))]
        for one in present:
            self._has.setdefault(one, {})
        if key is not None:
            self._has.setdefault(key, {})[operation.name] = _Has(self._number, now)

    def retain(self, present: Collection[Key]) -> None:
        """These are all the targets there are. What all of them have unloaded is forgotten."""
        self._has = {key: has for key, has in self._has.items() if key in present}
        done = [
            name
            for name, wanted in self._wanted.items()
            if wanted.operation.path == UNLOAD
            and all(
                name in has and has[name].number == wanted.number and not has[name].failures
                for has in self._has.values()
            )
        ]
        for name in done:
            del self._wanted[name]

    def next(self, key: Key, models: Collection[str] | None, now: float) -> Operation | None:
        """Return what the target, which lists these models (None: none, or it is not known), should do now."""
        is_new = key not in self._has
        has = self._has.setdefault(key, {})
        for name, (number, operation, base) in self._wanted.items():
            if models is not None and base and not base & set(models):
                continue  # it serves something else
            loads, one = operation.path == LOAD, has.get(name)
            if one is None and (name in (models or ()) if loads else is_new):
                has[name] = _Has(number, now)  # it is so already
            elif one is None or one.number != number:
                one = has[name] = _Has(number, now)
                one.failures = 1
                return operation
            elif one.failures:
                if now >= one.at:
                    return operation
            elif loads and models is not None and name not in models and now >= one.at + LISTED_AFTER_S:
                return operation
        return None

    def applied(self, key: Key, operation: Operation, status: int, now: float) -> bool:
        """The target has responded with that status; 0: not at all. Returns whether that settles it.

        A refusal (4xx) does: engines refuse to load what they have, and to unload what they have not.
        """
        has = self._has.get(key, {}).get(operation.name)
        if has is None:
            return True
        if 200 <= status < 300 or (400 <= status < 500 and status not in (408, 429)):
            has.failures, has.at = 0, now
            return True
        has.failures += 1
        has.at = now + min(_LONGEST_WAIT_S, 2.0 ** min(has.failures, 6))
        return False

    def to_json(self) -> list[list[str]]:
        """Return the adapters that should be loaded, without their header lines."""
        wanted = (one for one in self._wanted.values() if one.operation.path == LOAD)
        return [
            [one.operation.name, one.operation.body.decode("utf-8", "replace"), *sorted(one.models)]
            for one in wanted
        ]

    def restore(self, rows: Any) -> None:
        """Take over what `to_json` returned elsewhere. Raises ValueError."""
        for row in rows if type(rows) is list else ():
            if type(row) is not list or len(row) < 2 or not all(type(one) is str for one in row):
                raise ValueError("not a list of adapters")
            self._number += 1
            operation = Operation(LOAD, row[0], row[1].encode())
            self._wanted[row[0]] = _Wanted(self._number, operation, frozenset(row[2:]))


def read_operation(path: bytes, body: bytes, lines: bytes) -> Operation | None:
    """Return what a request does to an adapter; None if that cannot be read."""
    if len(body) > LONGEST_BYTES:
        return None
    try:
        json = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    name = json.get("lora_name") if type(json) is dict else None
    return Operation(path, name, body, lines) if type(name) is str and name else None
