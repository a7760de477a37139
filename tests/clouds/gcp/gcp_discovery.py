"""Requests and responses against Google's own description of its APIs.

The discovery documents ship with google-api-python-client. They say which methods there are, which parameters and fields
those take, of which type, pattern and enumeration. What they do not say (which fields are required) `gcp_world` checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import googleapiclient

_DOCUMENTS = Path(googleapiclient.__file__).parent / "discovery_cache" / "documents"
_RANGES = {"int32": (-(2**31), 2**31 - 1), "uint32": (0, 2**32 - 1)}
_LONG = {"int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}
# A field of responses only is marked in one of two ways.
_OUTPUT_ONLY = re.compile(r"^(Output only\. )?\[Output Only\]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Call:
    """One request, understood: `id` as in `compute.instances.insert`; `path` and `query` by parameter."""

    id: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Any


@dataclass(frozen=True, slots=True)
class _Route:
    verb: str
    pattern: re.Pattern[str]
    method: Mapping[str, Any]
    api: Discovery


class Discovery:
    """One API."""

    def __init__(self, name: str) -> None:
        document = json.loads((_DOCUMENTS / f"{name}.json").read_text())
        self.schemas: Mapping[str, Any] = document["schemas"]
        self.parameters: Mapping[str, Any] = document["parameters"]
        base = "/" + document["servicePath"]
        self.routes = [
            _Route(
                method["httpMethod"],
                _pattern(base + (method.get("flatPath") or method["path"])),
                method,
                self,
            )
            for method in _methods(document)
        ]

    def problems(self, schema: Mapping[str, Any], value: Any, at: str, *, is_request: bool) -> Iterator[str]:
        """Sentences about whatever in `value` does not fit the schema."""
        if "$ref" in schema:
            schema = self.schemas[schema["$ref"]]
        kind = schema.get("type")
        if kind == "object":
            if not isinstance(value, dict):
                yield f"{at}: {value!r} is no object"
                return
            known = schema.get("properties", {})
            other = schema.get("additionalProperties")
            for key, held in value.items():
                field = known.get(key, other)
                if field is None:
                    yield f"{at}.{key}: there is no such field"
                    continue
                if is_request and key in known and _is_output_only(field):
                    yield f"{at}.{key}: is for answers only"
                yield from self.problems(field, held, f"{at}.{key}", is_request=is_request)
        elif kind == "array":
            if not isinstance(value, list):
                yield f"{at}: {value!r} is no list"
                return
            for index, held in enumerate(value):
                yield from self.problems(schema["items"], held, f"{at}[{index}]", is_request=is_request)
        else:
            yield from _scalar_problems(schema, value, at)


def read(
    verb: str, url: str, body: bytes
) -> tuple[Call | None, Mapping[str, Any], Discovery | None, list[str]]:
    """The call, its method, its API, and all that is wrong with it. No such method: None."""
    parts = urlsplit(url)
    for route in _routes():
        found = route.pattern.fullmatch(parts.path) if route.verb == verb else None
        if found is None:
            continue
        api, method = route.api, route.method
        path = {key: unquote(value) for key, value in found.groupdict().items()}
        query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        wrong = list(_parameter_problems(api, method, path, query))
        content = json.loads(body) if body else None
        if "request" in method:
            wrong += api.problems(method["request"], content or {}, "$", is_request=True)
        elif content:
            wrong.append("$: the method takes no body")
        return Call(method["id"], path, query, content or {}), method, api, wrong
    return None, {}, None, [f"there is no method {verb} {parts.path}"]


def answer_problems(method: Mapping[str, Any], api: Discovery, answer: Any) -> list[str]:
    """The faults of a successful response."""
    if "response" not in method:
        return []
    return list(api.problems(method["response"], answer, "$", is_request=False))


def _parameter_problems(
    api: Discovery, method: Mapping[str, Any], path: Mapping[str, str], query: Mapping[str, str]
) -> Iterator[str]:
    own = method.get("parameters", {})
    for key, value in query.items():
        declared = own.get(key) or api.parameters.get(key)
        if declared is None or declared.get("location") == "path":
            yield f"query {key}: there is no such parameter"
        else:
            yield from _scalar_problems(declared, _typed(declared, value), f"query {key}")
    for key, value in path.items():
        if key in own:
            yield from _scalar_problems(own[key], _typed(own[key], value), f"path {key}")
    for key, declared in own.items():
        if declared.get("required") and declared["location"] == "query" and key not in query:
            yield f"query {key}: is required"


def _typed(declared: Mapping[str, Any], text: str) -> Any:
    if declared.get("type") == "integer" and re.fullmatch(r"-?\d+", text):
        return int(text)
    if declared.get("type") == "boolean":
        return {"true": True, "false": False}.get(text, text)
    return text


def _scalar_problems(schema: Mapping[str, Any], value: Any, at: str) -> Iterator[str]:
    kind, form = schema.get("type"), schema.get("format")
    if kind == "string":
        if not isinstance(value, str):
            yield f"{at}: {value!r} is no string"
            return
        if form in _LONG and not (
            re.fullmatch(r"-?\d+", value) and _LONG[form][0] <= int(value) <= _LONG[form][1]
        ):
            yield f"{at}: {value!r} is no {form}"
        if "enum" in schema and value not in schema["enum"]:
            yield f"{at}: {value!r} is none of {', '.join(schema['enum'][:8])}"
        if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
            yield f"{at}: {value!r} is not like {schema['pattern']}"
    elif kind == "integer":
        low, high = _RANGES.get(str(form), (-(2**63), 2**63))
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            yield f"{at}: {value!r} is no {form or 'integer'}"
    elif kind == "boolean" and not isinstance(value, bool):
        yield f"{at}: {value!r} is no boolean"
    elif kind == "number" and (isinstance(value, bool) or not isinstance(value, (int, float))):
        yield f"{at}: {value!r} is no number"


def _is_output_only(field: Mapping[str, Any]) -> bool:
    return bool(field.get("readOnly")) or bool(_OUTPUT_ONLY.match(field.get("description", "")))


def _methods(resource: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from resource.get("methods", {}).values()
    for held in resource.get("resources", {}).values():
        yield from _methods(held)


def _pattern(path: str) -> re.Pattern[str]:
    pieces = re.split(r"\{\+?(\w+)\}", path)
    return re.compile(
        "".join(f"(?P<{x}>[^/]+?)" if index % 2 else re.escape(x) for index, x in enumerate(pieces))
    )


@cache
def _routes() -> list[_Route]:
    names = ("compute.v1", "cloudresourcemanager.v1", "cloudbilling.v1")
    return [route for name in names for route in Discovery(name).routes]
