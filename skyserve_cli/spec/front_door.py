"""The parts of `service.load_balancer` for browsers and for proxies before it.

What may be written in them is what an agent takes (`lb.config`).
"""

import re
from collections.abc import Callable
from dataclasses import fields
from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from lb.config.cors import MAX_AGE_S, Cors
from lb.config.options import MAX_SESSION_FIELDS, SESSION_FIELD, CookieMode
from lb.config.schema import network_problem
from skyserve_cli.spec.fields import not_bool, one_of, refuse
from skyserve_cli.spec.section import Section

_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_LONGEST_HOST = 253
_cors = Cors()
_COOKIE = [mode.value for mode in CookieMode]
_FORMS = {one.name: one.metadata for one in fields(Cors) if one.metadata}


def _text(name: str) -> Callable[[object], str]:
    form = _FORMS[name]

    def parse(value: object) -> str:
        if not isinstance(value, str) or not form["form"].fullmatch(value):
            raise refuse(f"must be {str(form['expected']).removeprefix('expected ')}", value)
        return value

    return parse


def _schema(name: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^(?:{_FORMS[name]['form'].pattern})$"})


Origin = Annotated[str, PlainValidator(_text("origins")), _schema("origins")]
Method = Annotated[str, PlainValidator(_text("methods")), _schema("methods")]
Header = Annotated[str, PlainValidator(_text("headers")), _schema("headers")]


def _network(value: object) -> str:
    problem = network_problem(value)
    if problem is not None:
        raise refuse(problem.replace("expected", "must be", 1), value)
    return str(value)


def _host(value: object) -> str:
    name = value if isinstance(value, str) else ""
    try:
        return str(ip_address(name))
    except ValueError:
        if len(name) > _LONGEST_HOST or not all(_LABEL.fullmatch(label) for label in name.split(".")):
            raise refuse("must be an address or the name of a host", value) from None
    return name


ListenHost = Annotated[str, PlainValidator(_host), WithJsonSchema({"type": "string"})]
Network = Annotated[str, PlainValidator(_network), WithJsonSchema({"type": "string"})]
Seconds = Annotated[int, BeforeValidator(not_bool), Field(ge=0, le=MAX_AGE_S)]


def _cookie(value: object) -> str:
    """``off`` without quotes is YAML's word for false."""
    return CookieMode.OFF.value if value is False else one_of(*_COOKIE)(value)


CookieWord = Annotated[str, PlainValidator(_cookie), WithJsonSchema({"enum": [*_COOKIE, False]})]


def _session_field(value: object) -> str:
    if not isinstance(value, str) or not SESSION_FIELD.fullmatch(value):
        raise refuse("must be the name of a field, such as user or metadata.session_id", value)
    return value


SessionField = Annotated[
    str,
    PlainValidator(_session_field),
    WithJsonSchema({"type": "string", "pattern": f"^{SESSION_FIELD.pattern}$"}),
]


class SessionSection(Section):
    cookie: CookieWord = CookieMode.OFF.value
    """auto: a client that names no session gets one by cookie. Default: off."""
    fields: Annotated[tuple[SessionField, ...], Field(max_length=MAX_SESSION_FIELDS)] = ()
    """Fields of a body or of a query that name the session: user, metadata.session_id. Default: user, for consistent_hash or with a cookie."""


class CorsSection(Section):
    origins: tuple[Origin, ...] = ()
    """Pages that may call: https://example.com, https://*.example.com for all subdomains, or *. Default: none."""
    methods: tuple[Method, ...] = _cors.methods
    """Methods of their requests, besides GET, HEAD and POST."""
    headers: tuple[Header, ...] = _cors.headers
    """Headers of their requests; * for any."""
    exposed_headers: tuple[Header, ...] = _cors.exposed_headers
    """Headers of responses that a page may read."""
    max_age_seconds: Seconds = _cors.max_age_s
    """How long a browser may keep the response to a preflight."""
    credentials: bool = _cors.credentials
    """Whether cookies may come along. A key in a header does not need it."""


def cors(section: CorsSection) -> Cors:
    """Raise WireError if an agent would reject it."""
    lists: dict[str, Any] = {name: list(getattr(section, name)) for name in _FORMS}
    rest = {"max_age_s": section.max_age_seconds, "credentials": section.credentials}
    return Cors.from_json(lists | rest)
