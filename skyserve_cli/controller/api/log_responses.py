"""Responses with a piece of a log, and the offset of what follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

MAX_LOG_BYTES = 1 << 20


async def log_response(
    request: web.Request,
    read: Callable[[int, int], bytes],
    first_kept: int = 0,
    end: int = 0,
    times: Callable[[float, int], bytes] | None = None,
) -> web.Response:
    """A negative offset counts from the `end`. `times` reads marks of the log (see `host_agent.log_times`); a log without any is shown whole."""
    asked = int(request.query.get("offset", 0))
    asked += end if asked < 0 else 0
    if "since" in request.query and times is not None:
        since = float(request.query["since"])
        from provisioners.remote.host_agent.log_times import offset_since  # rarely needed

        found = await asyncio.to_thread(offset_since, times, since)
        asked = asked if found is None else end if found < 0 else found
    offset = min(2**62, max(first_kept, asked))
    content = await asyncio.to_thread(read, offset, _most(request))
    return web.Response(body=content, headers={"X-Next-Offset": str(offset + len(content))})


async def file_response(request: web.Request, path: Path) -> web.Response:
    asked = min(2**62, max(0, int(request.query.get("offset", 0))))
    content, end = await asyncio.to_thread(_read_cut, path, asked, _most(request))
    return web.Response(body=content, headers={"X-Next-Offset": str(end)})


def _read_cut(path: Path, offset: int, most: int) -> tuple[bytes, int]:
    """Read a log that is cut when it is large. An offset beyond its end is from before the cut: read from the beginning."""
    if path.exists() and offset > path.stat().st_size:
        offset = 0
    content = read_file(path, offset, most)
    return content, offset + len(content)


def _most(request: web.Request) -> int:
    return min(MAX_LOG_BYTES, max(0, int(request.query.get("max", MAX_LOG_BYTES))))


def read_file(path: Path, offset: int, most: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(most)
