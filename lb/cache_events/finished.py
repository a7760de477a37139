"""A request that is over, as those see it who learn from it what engines have cached."""

from __future__ import annotations

from typing import Protocol

from lb.http.messages import RequestHead
from policies.routing.base import RequestView


class Whole(Protocol):
    """A response, as far as it matters here."""

    def usage_bytes(self) -> bytes:
        """Return the end of a stream, where its usage is."""
        ...

    def text(self) -> str:
        """Return the text of a stream that is kept; empty if it is not."""
        ...


class Arrived(Protocol):
    """A request as it came."""

    @property
    def view(self) -> RequestView: ...
    @property
    def head(self) -> RequestHead: ...
    @property
    def model(self) -> str: ...


class Over(Protocol):
    """A request that is over."""

    @property
    def arrival(self) -> Arrived: ...
    @property
    def body(self) -> bytes: ...
    @property
    def relay(self) -> Whole | None: ...
