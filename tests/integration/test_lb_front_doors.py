"""What the data port does for browsers, and for the load balancers and supervisors that stand before it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from lb.config.options import Access, ApiKey
from lb.config.schema import Table, Target
from tests.integration.lb_wires import Bench, Got, run, settle

KEYS = Access((ApiKey("page", hashlib.sha256(b"sk-page").hexdigest()),))
TARGET = Target("t", "http://192.0.2.9:8000")


def a_table(*targets: Target, **options: Any) -> Table:
    return Table("service", "r1", targets or (TARGET,), policy="round_robin", **options)


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


async def ask(bench: Bench, method: str, path: str, *lines: str, body: bytes = b"") -> Got:
    """The response to one request on a connection of its own."""
    client = bench.client()
    length = (f"Content-Length: {len(body)}",) if body else ()
    client.send(head(method, path, *lines, *length) + body)
    await settle()
    (got,) = client.answers(method.encode())
    return got


# --- health


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_needs_no_key_and_is_no_demand(method: str) -> None:
    async def story() -> None:
        bench = Bench(table=a_table(access=KEYS))
        for path in ("/-/healthz", "/-/ready", "/-/ready?verbose=1"):
            got = await ask(bench, method, path)
            assert (got.status, got.body) == (200, b"ok\n" if method == "GET" else b"")
            assert got.values(b"content-length") == [b"3"]
        assert (await ask(bench, method, "/")).status == 401
        assert bench.proxy.metrics.counts.requests == 1
        assert bench.proxy.arrivals.count(bench.proxy.clock(), 60.0) == 1
        assert bench.seen == []
        bench.check()

    run(story())


def test_ready_is_that_a_target_would_take_a_request() -> None:
    async def story() -> None:
        bench = Bench(targets=0)
        assert [(await ask(bench, "GET", f"/-/{one}")).status for one in ("healthz", "ready")] == [200, 503]
        bench = Bench()
        assert (await ask(bench, "GET", "/-/ready")).status == 200
        bench.proxy.draining = True
        assert [(await ask(bench, "GET", f"/-/{one}")).status for one in ("healthz", "ready")] == [200, 503]
        bench.check()

    run(story())


def test_health_over_a_kept_connection_goes_on_until_the_agent_closes() -> None:
    async def story() -> None:
        bench = Bench()
        client = bench.client()
        client.send(head("GET", "/-/healthz") * 3)
        await settle()
        assert [got.status for got in client.answers(*[b"GET"] * 3)] == [200] * 3
        bench.proxy.closing = True
        client.send(head("GET", "/-/ready"))
        await settle()
        (got,) = client.answers(b"GET")
        assert (got.status, got.values(b"connection")) == (503, [b"close"])
        assert client.wire.closed
        bench.check()

    run(story())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/-/healthz", 405),
        ("GET", "/-/healthz/", 404),
        ("GET", "/-/metrics", 404),
        ("GET", "/-", 404),
    ],
)
def test_nothing_else_is_served_below_the_dash(method: str, path: str, status: int) -> None:
    async def story() -> None:
        bench = Bench()
        assert (await ask(bench, method, path)).status == status
        assert bench.seen == []
        bench.check()

    run(story())
