"""The session that fields of a query or of a JSON body name. Pure.

The fields are configured (`lb.config.options.Session`). The first one that is there and holds a text or a whole number names
the session; a dot in its name goes down into an object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from lb.stream.openai_request import MAX_SESSION_BYTES

_VALUE = rb'"\s*:\s*(?:"([^"\\]{1,%d})"|(\d{1,%d})\b)' % (MAX_SESSION_BYTES, MAX_SESSION_BYTES)


class SessionFields:
    """The fields of one table, in their order."""

    __slots__ = ("_marks", "_paths", "_queries", "_texts")

    def __init__(self, names: Iterable[str]) -> None:
        fields = tuple(names)
        self._paths = [name.split(".") for name in fields]
        self._marks = [b'"%b"' % path[-1].encode() for path in self._paths]
        # In a body that is not parsed, a field of an object inside it looks like one of the request's own.
        self._texts = [re.compile(b'"%b%b' % (name.encode(), _VALUE)) for name in fields if "." not in name]
        self._queries = [re.compile(rb"[?&]%b=([^&#]+)" % re.escape(name.encode())) for name in fields]

    def __bool__(self) -> bool:
        return bool(self._paths)

    def in_query(self, target: bytes) -> str:
        """Return the session that the query of a request's target names; empty if it names none."""
        if target.find(b"?") < 0:
            return ""
        for query in self._queries:
            found = query.search(target)
            if found is not None:
                return unquote_to_bytes(found[1]).decode("utf-8", "replace")[:MAX_SESSION_BYTES]
        return ""

    def may_be_in(self, body: bytes) -> bool:
        """Return whether the body has to be parsed to know."""
        return any(body.find(mark) >= 0 for mark in self._marks)

    def in_json(self, json: Mapping[str, Any]) -> str:
        """Return the session that a parsed body names; empty if it names none."""
        for path in self._paths:
            value: Any = json
            for name in path:
                value = value.get(name) if type(value) is dict else None
            if type(value) is int:
                value = str(value)
            if type(value) is str and value:
                return value[:MAX_SESSION_BYTES]
        return ""

    def in_text(self, body: bytes) -> str:
        """Return the session that a body names which is not parsed, or of which a part is here; empty if it names none.

        A field of the same name deeper down may be taken for the request's own; text never is, as quotes in it are escaped.
        """
        for text in self._texts:
            found = text.search(body)
            if found is not None:
                return (found[1] or found[2]).decode("utf-8", "replace")
        return ""
