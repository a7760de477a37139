"""The body of a request: JSON as `spec.json_text` reads it, and a goal with its spec checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from aiohttp import web

from policies.goals import UpdateMode
from skyserve_cli.spec import Problem, ServiceSpec, SpecError, sent_spec
from skyserve_cli.spec.json_text import read_json
from skyserve_cli.spec.problems import dotted, shown


class SentOrder(NamedTuple):
    """What `up`, `update` and `plan` send."""

    spec: ServiceSpec
    secrets: Mapping[str, str]
    mode: UpdateMode | None


async def json_body(request: web.Request) -> dict[str, Any]:
    """Return the object in the body; an empty one without a body. Raises SpecError with the paths of what is wrong."""
    body = read_json(await request.read()) if request.can_read_body else {}
    if not isinstance(body, dict):
        raise SpecError([Problem("", "the body must be a JSON object")])
    return body


def sent_order(body: Mapping[str, Any], name: str | None = None) -> SentOrder:
    """Return what the body orders. `name` is that of the path. Raises SpecError."""
    document, secrets, mode = body.get("spec"), body.get("secrets", {}), body.get("mode")
    if not isinstance(document, dict):
        raise SpecError([Problem("spec", "must be a mapping")])
    if not isinstance(secrets, dict):
        raise SpecError([Problem("secrets", "must be a mapping from name to text")])
    wrong = [
        Problem(dotted(("secrets", key)), "must be text")
        for key in secrets
        if not isinstance(secrets[key], str)
    ]
    modes = [one.value for one in UpdateMode]
    if mode is not None and mode not in modes:
        wrong.append(Problem("mode", f"must be null or one of {', '.join(modes)} (got {shown(mode)})"))
    spec = sent_spec(document)
    if name not in (None, spec.name):
        wrong.append(Problem("name", f"must be the name in the path, {shown(name)} (got {shown(spec.name)})"))
    if wrong:
        raise SpecError(wrong)
    return SentOrder(spec, secrets, None if mode is None else UpdateMode(mode))
