"""Which web pages may call through the load balancer (CORS), as a value <-> JSON.

What follows from it for a request is in `lb.http.cors`.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, field, fields
from typing import Any

from lb.config.decode import MAX_TEXT, Fields, WireError, kind_of

ANY = "*"
SUBDOMAIN = r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*"  # what the * of a pattern stands for
TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105 - the name of a header or a method (RFC 9110 §5.6.2)
_MAX_ENTRIES = 100
MAX_AGE_S = 86_400  # no browser keeps a preflight for longer
_NO_DEFAULT_PORT = r"(?!http:.*:80$|https:.*:443$)"  # browsers leave it out, so it would never match
_HOST = rf"(?:(?:\*\.)?{SUBDOMAIN}|\[[0-9a-f:.]+\])(?::[0-9]{{1,5}})?"
_ORIGIN = rf"\*|{_NO_DEFAULT_PORT}[a-z][a-z0-9+.-]*://{_HOST}"
_ORIGINS = "*, https://example.com or https://*.example.com: lower case, no path, no default port"
_HEADERS = "* or the name of a header"


def _texts(default: tuple[str, ...], form: str, expected: str) -> Any:
    return field(default=default, metadata={"form": re.compile(form), "expected": "expected " + expected})


@dataclass(frozen=True, slots=True)
class Cors:
    """Which pages may call, and how. Without `origins` CORS is off.

    An origin is exact (`https://example.com`), a pattern for all subdomains (`https://*.example.com`), or `*`. `headers`
    are those a request may carry (`*`: any, `Authorization` too), `exposed_headers` those of a response a page may read.
    A browser may keep the result of a preflight for `max_age_s`. `credentials` means cookies and client certificates; an
    `Authorization` header that the page sets itself does not need it.
    """

    origins: tuple[str, ...] = _texts((), _ORIGIN, _ORIGINS)
    methods: tuple[str, ...] = _texts(("GET", "POST", "DELETE"), "[A-Z]+", "a method in upper case")
    headers: tuple[str, ...] = _texts((ANY,), TOKEN, _HEADERS)
    exposed_headers: tuple[str, ...] = _texts(("X-Request-Id", "Retry-After"), TOKEN, _HEADERS)
    max_age_s: int = 600
    credentials: bool = False

    def to_json(self) -> dict[str, Any]:
        lists = {one.name: list(getattr(self, one.name)) for one in fields(self) if one.metadata}
        return lists | {"max_age_s": self.max_age_s, "credentials": self.credentials}

    @classmethod
    def from_json(cls, value: object, path: str = "") -> Cors:
        given = Fields(value, path)
        lists = {one.name: _read(given, one) for one in fields(cls) if one.metadata}
        max_age_s = given.integer("max_age_s", 0, MAX_AGE_S, 600)
        cors = cls(**lists, max_age_s=max_age_s, credentials=given.flag("credentials", False))
        given.done()
        for name in ("origins", "exposed_headers"):  # where browsers do not take * together with credentials
            if cors.credentials and ANY in lists[name]:
                raise WireError(given.at("credentials"), f"must be false while {name} contains *")
        return cors


def _read(given: Fields, one: Field[Any]) -> tuple[str, ...]:
    default: Any = one.default
    values, at = given.take(one.name, list(default)), given.at(one.name)
    if not isinstance(values, list) or len(values) > _MAX_ENTRIES:
        raise WireError(at, f"expected a list of up to {_MAX_ENTRIES}, got {kind_of(values)}")
    for index, text in enumerate(values):
        if not isinstance(text, str) or len(text) > MAX_TEXT or not one.metadata["form"].fullmatch(text):
            raise WireError(f"{at}[{index}]", one.metadata["expected"])
    return tuple(values)
