"""A WebSocket between a client and a target: bytes pass both ways as they come, with an idle clock.

A tunnel is not resumed. When its target is drained or removed, or when nothing has passed for the idle timeout, both ends
get a close frame with code 1001 (going away) and are closed, so that a client connects again and a target runs dry.
"""

from __future__ import annotations

import asyncio

from lb.http.websocket import GOING_AWAY, FrameTracker, close_frame


class Tunnel:
    """`last_byte_at` is when something last passed, in either direction."""

    __slots__ = ("_active", "_client", "_target", "_to_client", "_to_target", "last_byte_at")

    def __init__(self, client: asyncio.Transport, target: asyncio.Transport, now: float) -> None:
        self._client = client
        self._target = target
        self._to_client = FrameTracker()
        self._to_target = FrameTracker()
        self._active = False
        self.last_byte_at = now

    def from_client(self, data: bytes) -> None:
        self._active = True
        self._to_target.feed(data)
        self._target.write(data)

    def from_target(self, data: bytes) -> None:
        self._active = True
        self._to_client.feed(data)
        self._client.write(data)

    def idle_s(self, now: float) -> float:
        """Return for how long nothing has passed, as far as earlier calls know."""
        if self._active:
            self._active = False
            self.last_byte_at = now
        return now - self.last_byte_at

    def send_close_frames(self) -> None:
        """Send close frames, to each side that is not inside a frame. A frame put into another would be read as data."""
        if self._to_client.between and not self._client.is_closing():
            self._client.write(close_frame(GOING_AWAY, masked=False))
        if self._to_target.between and not self._target.is_closing():
            self._target.write(close_frame(GOING_AWAY, masked=True))
