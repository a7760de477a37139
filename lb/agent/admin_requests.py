"""Requests of the admin port: reading them, and errors for those that are rejected."""

from __future__ import annotations

import json
import math
from typing import TypeVar

from aiohttp import web

from lb.http import error_responses

_D = TypeVar("_D", float, None)


def error_response(status: int, code: str, message: str) -> web.Response:
    """Return an error in the shape of the data port's."""
    body = error_responses.error_body(status, code, message)
    headers = {"Server": error_responses.SERVER}
    return web.Response(status=status, headers=headers, body=body, content_type="application/json")


class Rejected(Exception):
    """A request that gets an error and has changed nothing."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.response = error_response(status, code, message)


async def read_json(request: web.Request) -> object:
    """Return the body's JSON. Half a surrogate pair (`"\\ud800"`) is refused: no response and no metric could show it."""
    try:
        text = (await request.read()).decode()
        value: object = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Rejected(400, "bad_json", "the body is not JSON of Unicode text") from error
    return value


def read_number(request: web.Request, name: str, default: _D, low: float, high: float) -> float | _D:
    """Return a number of the query, or the default."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise Rejected(400, f"bad_{name}", f"{name} must be between {low:g} and {high:g}")
    return value
