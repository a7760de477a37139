"""What all parts of one agent's data plane share: the loop, its clock, the clients, and whether the agent is leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lb.core.byte_budget import ByteBudget
from lb.http.write_batch import WriteBatcher
from lb.proxy.faults import Faults
from lb.proxy.ports import ClientPort

DEFAULT_BUFFERS_BYTES = 1024 * 1024 * 1024


class Runtime:
    """The surroundings of one agent's requests. `clock` returns seconds and never runs backwards."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        buffers_bytes: int = DEFAULT_BUFFERS_BYTES,
    ) -> None:
        self.loop = loop
        self.clock = clock
        self.faults = Faults(clock)
        self.write_batcher = WriteBatcher(loop)
        self.buffers = ByteBudget(buffers_bytes)  # for the bodies of requests
        self.clients: set[ClientPort] = set()
        self.uploading: set[ClientPort] = set()  # those of which more of a body is to come
        self.closing = False  # no connection is kept alive any longer
        self.draining = False  # serves on, but is not ready

    def drain(self, *, on: bool) -> None:
        """Serve on, but be not ready, until called again with `on` False."""
        self.draining = on

    def close(self) -> None:
        """Keep no connection alive from now on."""
        self.closing = True
