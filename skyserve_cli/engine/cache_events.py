"""Publishes what the engine caches and evicts, as vLLM does: batches in MessagePack over ZeroMQ, numbered, and replayed on request.

Batches are published on the port 1,000 above the engine's own, and replayed on the port 2,000 above it. A thread has the sockets,
and sleeps until there is something to send or a replay is requested.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

import msgspec
import zmq

from skyserve_cli.engine.kv import BLOCK_TOKENS, BlockNode, PrefixCache

EVENTS_PORT: Final = 1000
REPLAY_PORT: Final = 2000
KEPT_BATCHES: Final = 10_000
_LAST: Final = (2**64 - 1).to_bytes(8, "big")


def batch(changes: list[tuple[bool, BlockNode]], at: float) -> bytes:
    """Return the batch of these changes: for each whether a block was stored, and the block."""
    events: list[dict[str, Any]] = []
    for is_stored, node in changes:
        if not is_stored:
            events.append({"type": "BlockRemoved", "block_hashes": [node.name], "medium": "GPU"})
            continue
        last = events[-1] if events else None
        if (
            last is not None
            and last["type"] == "BlockStored"
            and last["block_hashes"][-1] == node.parent_name
        ):
            last["block_hashes"].append(node.name)
            last["token_ids"].extend(node.key)
            continue
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": [node.name],
                "parent_block_hash": node.parent_name or None,
                "token_ids": list(node.key),
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
        )
    return msgspec.msgpack.encode([at, events, 0])


class CachePublisher:
    """Publishes the changes of one cache, from the first on."""

    def __init__(self, cache: PrefixCache, host: str, port: int, first_name: int = 0) -> None:
        """Take the ports. Raises OSError if one is in use; `first_name` distinguishes the blocks of processes."""
        self._cache = cache
        self._context: zmq.Context[Any] = zmq.Context()
        at = f"[{host}]" if ":" in host else host
        self._events = self._bound(zmq.PUB, f"tcp://{at}:{port + EVENTS_PORT}")
        self._replays = self._bound(zmq.ROUTER, f"tcp://{at}:{port + REPLAY_PORT}")
        self._inlet: zmq.Socket[Any] = self._context.socket(zmq.PAIR)
        self._outlet: zmq.Socket[Any] = self._context.socket(zmq.PAIR)
        self._outlet.bind("inproc://batches")
        self._inlet.connect("inproc://batches")
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        cache.follow(first_name)
        self._thread = threading.Thread(target=self._run, name="cache-events", daemon=True)
        self._thread.start()

    def publish(self, at: float) -> None:
        """Publish what has changed since the last call."""
        changes = self._cache.take_changes()
        if changes:
            self._inlet.send(batch(changes, at))

    def close(self) -> None:
        """Give the ports back."""
        self._inlet.send(b"")
        self._thread.join()
        self._inlet.close()
        self._context.term()

    def _bound(self, kind: int, endpoint: str) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"{error.strerror} ({endpoint})") from None
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._outlet, self._replays):
            poller.register(socket, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            if self._outlet in ready:
                payload = self._outlet.recv()
                if not payload:
                    break
                self._kept.append((number, payload))
                self._events.send_multipart((b"", number.to_bytes(8, "big"), payload))
                number += 1
            if self._replays in ready:
                self._replay(self._replays.recv_multipart())
        for socket in (self._outlet, self._replays, self._events):
            socket.close()

    def _replay(self, request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != 8:
            return
        client, start = request[0], int.from_bytes(request[2], "big")
        for number, payload in self._kept:
            if number >= start:
                self._replays.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
        self._replays.send_multipart((client, b"", b"", _LAST, b""))
