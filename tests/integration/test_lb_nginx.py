"""A real nginx in front of an agent: it cuts a stream that is silent for `proxy_read_timeout`, unless comments are sent.

Times are short: nginx waits one second, engines think for more than two.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.lb_harness import RunningAgent, Seen, until, world

NGINX = shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin")))
READ_TIMEOUT_S, SILENCE_S, KEEPALIVE_S = 1, 2.5, 0.3
CHAT = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Think."}]}

pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx: install Debian's package nginx")


def event(text: str, finish: str = "null") -> bytes:
    return (
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"%b"},'
        b'"finish_reason":%b}]}\n\n' % (text.encode(), finish.encode())
    )


EVENTS = [event("It"), event(" is"), event(" so.", '"stop"'), b"data: [DONE]\n\n"]


async def thinks_first(seen: Seen) -> None:
    """No byte, not even a head, until the thought is complete."""
    await asyncio.sleep(SILENCE_S)
    await seen.begin_stream()
    for one in EVENTS:
        await seen.chunk(one)
    await seen.send(b"0\r\n\r\n")


async def thinks_in_between(seen: Seen) -> None:
    await seen.begin_stream()
    for number, one in enumerate(EVENTS):
        if number == 1:
            await asyncio.sleep(SILENCE_S)
        await seen.chunk(one)
    await seen.send(b"0\r\n\r\n")


@asynccontextmanager
async def nginx(agent: RunningAgent, folder: Path) -> AsyncIterator[str]:
    """The URL of an nginx as its documentation configures it for streams."""
    assert NGINX is not None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    paths = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}server {{\nlisten 127.0.0.1:{port};\nlocation / {{\n"
        f"proxy_pass {agent.url}; proxy_http_version 1.1; proxy_buffering off; proxy_next_upstream off;\n"
        f"proxy_read_timeout {READ_TIMEOUT_S}s;\n}}\n}}\n}}\n"
    )
    process = await asyncio.create_subprocess_exec(NGINX, "-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.log"))  # fmt: skip
    try:

        async def listens() -> bool:
            assert process.returncode is None, (folder / "nginx.log").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        await until(listens)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def asked_through_nginx(behave: Any, folder: Path, **limits: float) -> tuple[int, list[bytes], bool]:
    """Status, data lines, and whether the response came to its end."""
    async with world(folder) as it:
        agent = await it.agent()
        target = await it.target("slow", behave)
        await agent.push(target.json, limits=limits)
        async with nginx(agent, folder) as url, aiohttp.ClientSession() as http:
            received, complete = b"", False
            async with http.post(url + "/v1/chat/completions", json=CHAT) as response:
                with suppress(aiohttp.ClientError):
                    while chunk := await response.content.readany():
                        received += chunk
                    complete = True
            lines = [line + b"\n\n" for line in received.split(b"\n") if line.startswith(b"data: ")]
            return response.status, lines, complete


@pytest.mark.parametrize("behave", [thinks_first, thinks_in_between])
async def test_without_comments_nginx_cuts_a_silent_stream(behave: Any, tmp_path: Path) -> None:
    status, lines, _ = await asked_through_nginx(behave, tmp_path)
    assert status == (504 if behave is thinks_first else 200)
    assert len(lines) == (0 if behave is thinks_first else 1)


@pytest.mark.parametrize("behave", [thinks_first, thinks_in_between])
async def test_with_comments_it_passes_the_whole_stream(behave: Any, tmp_path: Path) -> None:
    status, lines, complete = await asked_through_nginx(behave, tmp_path, stream_keepalive_s=KEEPALIVE_S)
    assert (status, complete) == (200, True)
    assert lines == EVENTS
