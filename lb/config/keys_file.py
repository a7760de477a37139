"""API keys from a file or a mounted Secret: a JSON list of entries as `api_keys` of the service file has them.

    [{"name": "research", "sha256": "3f79…", "requests_per_minute": 600}, {"name": "guests", "key": "at least 16 characters"}]

An entry has the key itself (`key`) or its SHA-256 (`sha256`), and any of the limits, also by model (`models`). Prices are not here, but in
the service file. The text is read entry by entry, so that an event loop can do other things in between, and an error can name the
entry and its line. No error has anything of a key in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from lb.config.decode import WireError, kind_of
from lb.config.key_limits import OTHER_MODELS
from lb.config.options import Access, ApiKey

MOST_BYTES = 20 * 1024 * 1024
MOST_KEYS = 50_000
SHORTEST_KEY = 16
LONGEST_NAME = 100

_GAP = re.compile(r"[ \t\r\n]*")


class KeysFileError(ValueError):
    """The text cannot be used; the message has the place and the problem."""


class KeysReading:
    """Reads one text. `keys` are those that have been read so far."""

    def __init__(self, content: bytes, before: Sequence[ApiKey] = ()) -> None:
        """Take the object of a key that is as `before`: then others need no comparison to see it. Raises KeysFileError."""
        if len(content) > MOST_BYTES:
            raise KeysFileError(f"has more than {MOST_BYTES >> 20} MiB")
        try:
            self._text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise KeysFileError(f"is no UTF-8: byte {error.start}") from None
        self.keys: list[ApiKey] = []
        self._digests: dict[str, int] = {}  # to the number of the entry
        self._before = {key.sha256: key for key in before}
        self._decoder = json.JSONDecoder(object_pairs_hook=_object)
        self._at = 0
        if self._next() != "[":
            raise self._error("expected a JSON list of keys")
        self._at += 1

    def step(self, most: int) -> bool:
        """Read at most this many entries. Returns whether there are more. Raises KeysFileError."""
        for _ in range(most):
            if not self.keys and self._next() == "]":
                return self._end()
            self._entry()
            mark = self._next()
            if mark == "]":
                return self._end()
            if mark != ",":
                raise self._error("expected a comma or the end of the list")
            self._at += 1
        return True

    def _entry(self) -> None:
        self._next()
        begin = self._at
        try:
            value, self._at = self._decoder.raw_decode(self._text, begin)
            key = _key(value)
        except json.JSONDecodeError as error:
            self._at = error.pos
            raise self._error(f"no JSON: {error.msg}") from None
        except WireError as error:
            self._at = begin
            raise self._error(str(error).removeprefix("message: ")) from None
        except (ValueError, RecursionError):  # a number of thousands of digits, lists in thousands of lists
            self._at = begin
            raise self._error("no JSON that is read here") from None
        before = self._digests.get(key.sha256)
        number = len(self.keys) + 1
        if before is not None or number > MOST_KEYS:
            self._at = begin
            raise self._error(
                f"is the same key as entry {before}" if before else f"more than {MOST_KEYS} keys"
            )
        known = self._before.get(key.sha256)
        key = known if known is not None and known == key else key
        self._digests[key.sha256] = number
        self.keys.append(key)

    def _end(self) -> bool:
        self._at += 1
        if self._next():
            raise self._error("expected nothing after the list")
        return False

    def _next(self) -> str:
        """Go to the next character that is no space and return it; empty at the end."""
        gap = _GAP.match(self._text, self._at)
        self._at = self._at if gap is None else gap.end()
        return self._text[self._at : self._at + 1]

    def _error(self, problem: str) -> KeysFileError:
        line = self._text.count("\n", 0, self._at) + 1
        return KeysFileError(f"entry {len(self.keys) + 1} (line {line}): {problem}")


def merged(access: Access, keys: Sequence[ApiKey]) -> Access:
    """Return the access with the keys of a file. A name or a key that the table has is the table's: the file's entries of it are left out."""
    names = {key.name for key in access.keys}
    digests = {key.sha256 for key in access.keys}
    more = tuple(key for key in keys if key.name not in names and key.sha256 not in digests)
    return replace(access, keys=access.keys + more) if more else access


def unpriced(access: Access, keys: Sequence[ApiKey]) -> str:
    """Return the name of a key with a limit in US dollars that models without a price would not count for; empty: there is none."""
    if any(model == OTHER_MODELS for model, _ in access.prices):
        return ""
    return next((key.name for key in keys if key.needs_prices), "")


def _key(value: object) -> ApiKey:
    """Raise WireError."""
    if not isinstance(value, dict):
        raise WireError("", f"expected an object, got {kind_of(value)}")
    fields = dict(value)
    if ("key" in fields) == ("sha256" in fields):
        said = "has both key and sha256" if "key" in fields else "has neither key nor sha256"
        raise WireError("", f"{said}; one of them says which key it is")
    if "key" in fields:
        fields["sha256"] = _digest(fields.pop("key"))
    elif isinstance(fields["sha256"], str):
        fields["sha256"] = fields["sha256"].lower()
    key = ApiKey.from_json(fields)
    if not key.name.isprintable() or len(key.name) > LONGEST_NAME:
        raise WireError("name", f"must be at most {LONGEST_NAME} printable characters")
    return key


def _digest(key: object) -> str:
    if not isinstance(key, str) or not (key.isascii() and key.isprintable() and " " not in key):
        raise WireError("key", "must be one word of printable ASCII")
    if len(key) < SHORTEST_KEY:
        raise WireError("key", f"has fewer than {SHORTEST_KEY} characters: too easy to guess")
    return hashlib.sha256(key.encode()).hexdigest()


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise WireError(twice[:80], "is there twice")
    return found
