"""Ties the texts of requests to the blocks of tokens that engines report, after the requests are over.

The engine that served a request tokenizes its conversation. That is done for `per_second` requests at most, AT_ONCE at a time; QUEUED
more wait, and what is beyond that is left out. A prompt that is known as a whole is not tokenized again.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from lb.cache_events.finished import Whole
from lb.cache_events.tokenize import PATH, conversation, text_of, tokens_of
from lb.config.schema import Target
from lb.engines.kinds import Fetched
from lb.http.messages import RequestHead
from policies.routing.base import RequestView
from policies.routing.cached_tree import EngineCaches

AT_ONCE: Final = 4
QUEUED: Final = 64
TIMEOUT_S: Final = 5.0
_BURST_S: Final = 1.0
_PAUSE_S: Final = 30.0  # for an engine that does not tokenize
_CACHED: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,12})\b')

Post = Callable[[Target, str, bytes, float], Awaitable[Fetched]]
"""POSTs a body to a path of a target within a time limit in seconds. Raises OSError or asyncio.TimeoutError."""


class Served(NamedTuple):
    """A request that has its whole response: from `stream`, or as `body`."""

    view: RequestView
    head: RequestHead
    model: str
    request: bytes
    target: Target
    prompt_tokens: int
    stream: Whole | None
    body: bytes | None


class _Waiting(NamedTuple):
    served: Served
    reply: str


class PromptLinker:
    """Takes requests that are over. Needs a running event loop."""

    def __init__(
        self, caches: EngineCaches, post: Post, clock: Callable[[], float], per_second: float
    ) -> None:
        self.linked = self.failed = self.left_out = 0
        self._caches = caches
        self._post = post
        self._clock = clock
        self.per_second = per_second
        self._allowed = 0.0
        self._counted_at = clock()
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused: dict[str, float] = {}  # targets that do not tokenize, until when

    def ended(self, served: Served) -> None:
        """A request has its whole response."""
        usage = (
            served.body if served.body is not None else served.stream.usage_bytes() if served.stream else b""
        )
        found = _CACHED.search(usage, max(0, usage.rfind(b'"usage"')))
        if found is not None:
            self._caches.measured(served.view.id, served.prompt_tokens, int(found[1]))
        if not served.request or not served.view.prompt or self._is_paused(served.target.id):
            return
        if self._caches.is_linked(served.view.scope, served.view.prompt):
            return
        if len(self._waiting) >= QUEUED:
            self.left_out += 1
            return
        self._waiting.append(_Waiting(served._replace(stream=None, body=None), _reply(served)))
        self.tick()

    def tick(self) -> None:
        """Begin with as many of those that wait as may be, once an engine has reported how large its blocks are."""
        if not self._caches.index.block_size:
            return
        now = self._clock()
        earned = (now - self._counted_at) * self.per_second
        self._allowed = min(self._allowed + earned, max(1.0, _BURST_S * self.per_second))
        self._counted_at = now
        while self._waiting and self._allowed >= 1.0 and len(self._tasks) < AT_ONCE:
            self._allowed -= 1.0
            task = asyncio.get_running_loop().create_task(self._link(self._waiting.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def close(self) -> None:
        """Tokenize nothing more."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is None and self._waiting:
            self.tick()

    async def _link(self, waiting: _Waiting) -> None:
        served, reply = waiting
        view = served.view
        asked = conversation(served.head.path.partition(b"?")[0], served.request, view.prompt or b"", reply)
        if asked is None or not asked.body:
            return
        try:
            fetched = await self._post(served.target, PATH, asked.body, TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):  # noqa: UP041 (not the same in 3.10)
            self.failed += 1
            return
        tokens = tokens_of(fetched.body) if fetched.status == 200 else None
        if tokens is None:
            self.failed += 1
            if fetched.status in (404, 405, 501):
                self._paused[served.target.id] = self._clock() + _PAUSE_S
            return
        lora = served.model if self._caches.index.knows_adapter(served.model) else ""
        upto = served.prompt_tokens if 0 < served.prompt_tokens < len(tokens) else len(tokens)
        if upto < len(tokens) or not asked.whole:
            self._caches.link(view.scope, asked.prompt, tokens[:upto], lora)
        if asked.whole:
            self._caches.served(view.scope, asked.whole, served.target.id)
            self._caches.link(view.scope, asked.whole, tokens, lora)
        self.linked += 1

    def _is_paused(self, target_id: str) -> bool:
        until = self._paused.get(target_id)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._paused[target_id]
        return False


def _reply(served: Served) -> str:
    """Return the text of a response to a chat or completion; empty if it is none, or is more than a text."""
    if served.body is None:
        return served.stream.text() if served.stream is not None else ""
    return text_of(served.body)
