"""The nearest endpoint of a service whose load balancers stand in several regions. Needs the standard library only.

    from skyserve.nearest import Nearest

    chat = Nearest("http://192.0.2.1:8000", "http://198.51.100.7:8000")     # some of the endpoints; the others are found
    answer = chat.call(lambda url: requests.post(f"{url}/v1/chat/completions", json=body, timeout=60))

It asks a load balancer for all of them (`GET /.well-known/skyserve`), times a TCP connect to each, and stays with the nearest. A call
that fails without a response is made again at the next one, which is kept until the failed one has had FAILED_FOR_S. The list
is read again every REFRESH_S. Where one DNS name leads clients to the nearest region, that takes a minute or more after a death.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import urlopen

PATH = "/.well-known/skyserve"
REFRESH_S = 60.0
FAILED_FOR_S = 30.0
CONNECT_S = 2.0
_TRIES = 3  # of a connect: the shortest counts
_LONGEST_LIST = 1_000_000
_PORTS = {"http": 80, "https": 443}

T = TypeVar("T")


class NoEndpointError(ConnectionError):
    """No endpoint can be reached."""


class Nearest:
    """May be used by several threads. `urls` are endpoints to begin with, `clock` counts seconds."""

    def __init__(self, *urls: str, clock: Callable[[], float] = time.monotonic) -> None:  # noqa: TID251 (of a client)
        if not urls:
            raise ValueError("give one endpoint at least")
        self._given = tuple(url.rstrip("/") for url in urls)
        self._clock = clock
        self._lock = threading.Lock()
        self._by_distance: list[str] = []
        self._failed_at: dict[str, float] = {}
        self._read_at = float("-inf")

    @property
    def url(self) -> str:
        """Return the endpoint to use now. Raises NoEndpointError."""
        with self._lock:
            now = self._clock()
            if now - self._read_at >= REFRESH_S or not self._by_distance:
                self._refresh(now)
            usable = [
                one for one in self._by_distance if now - self._failed_at.get(one, -1e9) >= FAILED_FOR_S
            ]
            if not usable:
                raise NoEndpointError(f"no endpoint can be reached of {', '.join(self._known())}")
            return usable[0]

    def failed(self, url: str) -> None:
        """Use another endpoint for a while: a request there had no response."""
        with self._lock:
            self._failed_at[url.rstrip("/")] = self._clock()

    def call(self, send: Callable[[str], T]) -> T:
        """Call `send` with the nearest endpoint, and with the next ones as long as it raises OSError.

        What libraries raise for a connection that failed is an OSError in most of them (`requests`, `urllib`, `aiohttp`). Raises the
        last one. Only requests that may be made twice belong here: a load balancer may die while it has one.
        """
        last: OSError | None = None
        for _ in range(1 + len(self._known())):
            try:
                url = self.url
            except NoEndpointError as error:
                raise last or error from None
            try:
                return send(url)
            except OSError as error:
                last = error
                self.failed(url)
        raise last or NoEndpointError("no endpoint has responded")

    # --- inside

    def _known(self) -> list[str]:
        return list(dict.fromkeys((*self._by_distance, *self._given)))

    def _refresh(self, now: float) -> None:
        found = list(self._given)
        for url in self._known():
            listed = endpoints_of(url)
            if listed:
                found = listed
                break
        with ThreadPoolExecutor(max_workers=len(found)) as threads:
            distances = dict(zip(found, threads.map(distance_s, found), strict=True))
        reached = [url for url in found if distances[url] is not None]
        self._by_distance = sorted(reached, key=lambda url: distances[url] or 0.0)
        self._read_at = now


def endpoints_of(url: str) -> list[str]:
    """Return the endpoints that a load balancer lists; none if it does not respond, or lists none."""
    try:
        with urlopen(url + PATH, timeout=CONNECT_S) as response:  # noqa: S310 (the scheme is the caller's)
            rows = json.loads(response.read(_LONGEST_LIST))["endpoints"]
        return list(_urls(rows))
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _urls(rows: Iterable[dict[str, str]]) -> Iterable[str]:
    return (row["url"].rstrip("/") for row in rows)


def distance_s(url: str) -> float | None:
    """Return the shortest of some TCP connects in seconds; None if none succeeds."""
    parts = urlsplit(url)
    address = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 80)
    best: float | None = None
    for _ in range(_TRIES):
        since = time.monotonic()  # noqa: TID251 (a connect takes real time)
        try:
            socket.create_connection(address, timeout=CONNECT_S).close()
        except OSError:
            break
        took_s = time.monotonic() - since  # noqa: TID251 (as above)
        best = took_s if best is None else min(best, took_s)
    return best
