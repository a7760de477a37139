"""Subscribes to the cache events of all targets over ZeroMQ, and asks for what is missing.

An engine publishes on the port 1,000 above the one that it serves on, and replays what it has published on the port 2,000 above.
The agent's ticker calls `tick`: it reads what has come without waiting, at most BLOCKS_AT_ONCE blocks at a time, so that no request
waits for long behind a full cache that is reported at once.

A replay that has not ended after REPLAY_TIMEOUT_S of silence is requested again, TRIES times. A target of which nothing came for
CHECK_EVERY_S is checked: the replay of its last batch finds out a new process, and batches that were the last ones and got lost.

The events have the tokens of prompts, and nothing encrypts them: a target that is reached over TLS is not subscribed to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import zmq

from lb.cache_events.decoder import MAX_BATCH_BYTES
from lb.cache_events.feed import CacheFeed
from lb.config.schema import Target
from policies.routing.block_index import BlockIndex

EVENTS_PORT: Final = 1000
REPLAY_PORT: Final = 2000  # both are added to the port of the target

BLOCKS_AT_ONCE: Final = 4000
AGAIN_AFTER_S: Final = 0.01  # where more has come than that
REPLAY_TIMEOUT_S: Final = 2.0
TRIES: Final = 3
CHECK_EVERY_S: Final = 2.0
_HELD_MESSAGES: Final = 256  # by ZeroMQ, for each socket; more wait at the engine
_HELD_REPLAYED: Final = 1024
_RECONNECT_MS, _MAX_RECONNECT_MS = 100, 2000
FIGURES: Final = ("blocks", "gaps", "restarts", "errors")
_EMPTY: Final = b""
_LAST: Final = (2**64 - 1).to_bytes(8, "big")

_log = logging.getLogger("lb.cache_events.subscriber")


def endpoints(target: Target) -> tuple[str, str] | str:
    """Return where the target publishes and where it replays, or why it cannot be subscribed to."""
    url = urlsplit(target.url)
    if target.tls_name or url.scheme == "https":
        return "it is reached over TLS, and cache events have the tokens of prompts without encryption"
    port = url.port or 80
    if url.hostname is None or port + REPLAY_PORT > 65535:
        return f"its port {port} leaves no room for those of its events: {REPLAY_PORT} above it must be one"
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"tcp://{host}:{port + EVENTS_PORT}", f"tcp://{host}:{port + REPLAY_PORT}"


class _Subscription:
    """One target's events: the socket of what is published, that of what is replayed, and the feed of both."""

    def __init__(self, context: zmq.Context[Any], target: Target, feed: CacheFeed, now: float) -> None:
        found = endpoints(target)
        assert not isinstance(found, str)  # noqa: S101 (the caller has looked)
        self.url = target.url
        self.feed = feed
        self._context = context
        self._replays_at = found[1]
        self._events = self._connected(zmq.SUB, found[0], _HELD_MESSAGES)
        self._events.setsockopt(zmq.SUBSCRIBE, _EMPTY)
        self._replays: zmq.Socket[Any] | None = None
        self._requested: int | None = None
        self._tries = 0
        self._received_at = now

    def _connected(self, kind: int, endpoint: str, held: int) -> zmq.Socket[Any]:
        socket: zmq.Socket[Any] = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, held),
            (zmq.MAXMSGSIZE, MAX_BATCH_BYTES),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS),
            (zmq.IPV6, int("[" in endpoint)),
        ):
            socket.setsockopt(option, value)
        socket.connect(endpoint)
        return socket

    def close(self) -> None:
        self._events.close()
        if self._replays is not None:
            self._replays.close()

    def read(self, now: float, most_blocks: int) -> bool:
        """Apply what has come; True if there may be more."""
        feed, before = self.feed, self.feed.blocks
        while feed.blocks - before < most_blocks:
            parts = _received(self._events)
            if parts is None:
                break
            if len(parts) == 3 and len(parts[1]) == 8:
                self._received_at = now
                feed.live(int.from_bytes(parts[1], "big"), parts[2])
        else:
            return True
        if feed.wants_replay_from is None and now - self._received_at >= CHECK_EVERY_S:
            self._received_at = now
            feed.check()
        return feed.wants_replay_from is not None and self._replay(now, most_blocks)

    def _replay(self, now: float, most_blocks: int) -> bool:
        """Request what is missing, and apply what has come of it; True if there may be more."""
        feed, before = self.feed, self.feed.blocks
        if self._requested is None:
            self._request(now)
        replays = self._replays
        while replays is not None and feed.blocks - before < most_blocks:
            parts = _received(replays)
            if parts is None:
                break
            self._received_at, self._tries = now, 0
            if len(parts) == 4 and parts[2] == _LAST:
                self._requested = None
                feed.replay_ended()
                if feed.wants_replay_from is None:
                    return False
                self._request(now)
            elif len(parts) == 4 and len(parts[2]) == 8:
                feed.replayed(int.from_bytes(parts[2], "big"), parts[3])
        else:
            return True
        if now - self._received_at >= REPLAY_TIMEOUT_S:
            self._timed_out(now)
        return False

    def _request(self, now: float) -> None:
        wanted = self.feed.wants_replay_from
        if wanted is None:
            return
        if self._replays is None:
            self._replays = self._connected(zmq.DEALER, self._replays_at, _HELD_REPLAYED)
        self._requested, self._received_at = wanted, now
        with suppress(zmq.Again):  # which times out
            self._replays.send_multipart((_EMPTY, wanted.to_bytes(8, "big")), zmq.NOBLOCK)

    def _timed_out(self, now: float) -> None:
        """Nothing has come for too long: a new socket has nothing of the old request."""
        if self._replays is not None:
            self._replays.close()
            self._replays = None
        self._requested, self._received_at = None, now
        self._tries += 1
        if self._tries >= TRIES:
            self._tries = 0
            self.feed.replay_failed()
        else:
            self.feed.replay_broke()


def _received(socket: zmq.Socket[Any]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class CacheSubscriber:
    """The subscriptions to the targets of a table. Needs no event loop: what it reads has come already."""

    def __init__(self, index: BlockIndex, clock: Callable[[], float]) -> None:
        self.index = index
        self._clock = clock
        self._context: zmq.Context[Any] = zmq.Context()
        self._subscriptions: dict[str, _Subscription] = {}
        self._refused: dict[str, str] = {}
        self._before = dict.fromkeys(FIGURES, 0)  # of feeds that are over
        self._first = 0  # the subscription that is read first

    def apply(self, targets: Iterable[Target]) -> None:
        """Subscribe to these targets, and to no others."""
        wanted = {target.id: target for target in targets}
        for target_id, subscription in list(self._subscriptions.items()):
            target = wanted.get(target_id)
            if target is None or target.url != subscription.url or isinstance(endpoints(target), str):
                self._drop(target_id)
        self._refused = {one: why for one, why in self._refused.items() if one in wanted}
        for target_id, target in wanted.items():
            if target_id not in self._subscriptions:
                self._add(target)

    def feeds(self) -> Iterable[CacheFeed]:
        """Return the feeds of all targets that are subscribed to."""
        return [one.feed for one in self._subscriptions.values()]

    def counted(self, figure: str) -> int:
        """Return one of FIGURES of all feeds that there have been."""
        every = [one.feed for one in self._subscriptions.values()]
        return self._before[figure] + sum(int(getattr(one, figure)) for one in every)

    def refused(self) -> dict[str, str]:
        """Return why targets are not subscribed to, by their ids."""
        return dict(self._refused)

    def tick(self) -> float | None:
        """Apply what has come. Returns in how many seconds it wants to be called again, if there is more."""
        index = self.index
        if index.tidy_is_due:
            index.tidy()
        every = list(self._subscriptions.values())
        left, now = BLOCKS_AT_ONCE, self._clock()
        for at in range(len(every)):
            one = every[(self._first + at) % len(every)]
            before = one.feed.blocks
            if one.read(now, left):
                self._first = (self._first + at + 1) % len(every)
                return AGAIN_AFTER_S
            left = max(1, left - (one.feed.blocks - before))
        return None

    def close(self) -> None:
        """Subscribe to none any longer. Nothing goes on after this."""
        for target_id in list(self._subscriptions):
            self._drop(target_id)
        self._context.term()

    def _add(self, target: Target) -> None:
        why = endpoints(target)
        if isinstance(why, str):
            if self._refused.get(target.id) != why:
                self._refused[target.id] = why
                _log.warning("no cache events of target=%s: %s", target.id, why)
            return
        self._refused.pop(target.id, None)
        feed = CacheFeed(self.index, target.id)
        self._subscriptions[target.id] = _Subscription(self._context, target, feed, self._clock())

    def _drop(self, target_id: str) -> None:
        subscription = self._subscriptions.pop(target_id)
        subscription.close()
        for figure in FIGURES:
            self._before[figure] += getattr(subscription.feed, figure)
        self.index.forget(target_id)
