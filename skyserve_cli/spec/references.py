"""``$NAME``, ``${NAME}`` and ``${NAME:-default}`` inside text."""

import re
from collections.abc import Callable, Collection, Mapping

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(rf"\$(?:({NAME.pattern})|\{{({NAME.pattern})(?::-([^{{}}]*))?\}})")


def substitute(
    text: str,
    values: Mapping[str, str],
    *,
    keep: Collection[str] = (),
    quote: Callable[[str], str] = str,
    unknown: Callable[[str], None] = lambda name: None,
) -> str:
    """Replace each reference once, left to right; what a value itself contains is not looked at again.

    Names in `keep` stay references. A name without a value becomes its default if one is written (as in the
    shell, also when the value is empty); else it stays as written and `unknown` is called.
    """

    def replaced(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        default: str | None = match[3]
        if name in keep:
            return match[0]
        if values.get(name):
            return quote(values[name])
        if default is not None:
            return quote(default)
        if name in values:
            return ""
        unknown(name)
        return match[0]

    return _REFERENCE.sub(replaced, text)


def referenced(text: str) -> frozenset[str]:
    """Return the names `text` refers to."""
    return frozenset(match[1] or match[2] for match in _REFERENCE.finditer(text))
