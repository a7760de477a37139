"""A WebSocket through the proxy: two shaken hands and a pump in each direction.

Messages pass one by one, pings and pongs included; whoever closes first closes both, with the same code. The
idle timeout does not apply: heartbeats are a matter between the two ends.
"""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web
from aiohttp.http import WSMsgType


async def pump(
    request: web.BaseRequest, upstream: aiohttp.ClientWebSocketResponse, max_bytes: int
) -> web.WebSocketResponse:
    """Connect the client to an open upstream WebSocket until one of them closes."""
    protocols = (upstream.protocol,) if upstream.protocol else ()
    client = web.WebSocketResponse(
        protocols=protocols, autoping=False, autoclose=False, compress=False, max_msg_size=max_bytes
    )
    try:
        await client.prepare(request)
        ways = {
            asyncio.create_task(_forward(client, upstream)),
            asyncio.create_task(_forward(upstream, client)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(
                *ways, return_exceptions=True
            )  # a connection that went is an end like others
    finally:
        await upstream.close()
        await client.close()
    return client


async def _forward(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    sink: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
) -> None:
    while True:
        message = await source.receive()
        if message.type is WSMsgType.TEXT:
            await sink.send_str(message.data)
        elif message.type is WSMsgType.BINARY:
            await sink.send_bytes(message.data)
        elif message.type is WSMsgType.PING:
            await sink.ping(message.data)
        elif message.type is WSMsgType.PONG:
            await sink.pong(message.data)
        elif message.type is WSMsgType.CLOSE:
            await sink.close(
                code=message.data or aiohttp.WSCloseCode.OK, message=(message.extra or "").encode()
            )
            return
        else:  # CLOSING, CLOSED, ERROR: the connection is gone without a word
            await sink.close(code=aiohttp.WSCloseCode.GOING_AWAY)
            return
