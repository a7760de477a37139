"""The pages and OpenAPI documents of the two HTTP APIs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from scripts.reference.operations import Operation
from scripts.reference.text import NOTE, code, table
from skyserve_cli import __version__

_IN_PATH = re.compile(r"{(\w+)}")


def page(title: str, intro: str, operations: Sequence[Operation], document: str) -> str:
    """Returns the page in Markdown; `document` is the name of the OpenAPI document beside it."""
    parts = [NOTE, f"# {title}\n", f"{intro} OpenAPI: [{document}]({document}).\n"]
    for one in operations:
        parts.append(f"## `{one.method} {one.path}`\n")
        parts.append(f"{one.summary}\n")
        rows = [(code(name), "query", about) for name, about in one.query]
        rows += [(code(name), "body", about) for name, about in one.body]
        if rows:
            parts.append(table(["name", "in", "meaning"], rows))
        parts.append(f"Returns: {one.returns}.\n")
    return "\n".join(parts)


def document(title: str, operations: Sequence[Operation]) -> str:
    """Returns the OpenAPI 3.1 document as JSON."""
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    whole = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }
    return json.dumps(whole, indent=2) + "\n"


def _operation(one: Operation) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _IN_PATH.findall(one.path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": about, "schema": {"type": "string"}}
        for name, about in one.query
    ]
    kind = "text/plain" if one.text else "application/json"
    found: dict[str, Any] = {
        "summary": one.summary,
        "responses": {
            "200": {"description": one.returns, "content": {kind: {}}},
            "401": {"description": "the token is missing or wrong"},
        },
    }
    if parameters:
        found["parameters"] = parameters
    if one.body:
        properties = {name: {"description": about} for name, about in one.body}
        schema = {"type": "object", "properties": properties}
        found["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return found
