"""Links between agents over real TLS: who is let in, beats both ways, and connections that are half open."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from lb.core.beats import without_room
from lb.core.peers import RegionReport
from lb.regions.identity import BEATS, REQUESTS, Identity
from lb.regions.region_links import OwnCertificate
from tests.integration.region_links import Node, identity

REPORT = RegionReport(2, 5, 1, 0.5, 0.00001, 0.02)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 (the condition is not ours to announce)
        await asyncio.sleep(0.01)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    us, eu = (Node(name, identity(tmp_path / name, name), REPORT) for name in ("us", "eu"))
    await us.open()
    await eu.open()
    yield us, eu
    await us.close()
    await eu.close()


async def test_beats_go_both_ways_and_measure_the_round_trip(nodes: tuple[Node, Node]) -> None:
    us, eu = nodes
    us.link("eu", eu.number)
    eu.link("us", us.number)
    await until(lambda: us.states["eu"].rtt_s is not None and eu.states["us"].rtt_s is not None)
    assert eu.received[0][0] == "us"
    assert eu.received[0][1].report == REPORT
    assert (us.states["eu"].rtt_s or 9.0) < 1.0


async def test_both_ends_use_tls_1_3_and_requests_have_connections_of_their_own(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    us, eu = nodes
    eu.link("us", us.number)
    known = identity(tmp_path / "us", "us")
    _, writer = await asyncio.open_connection(
        "127.0.0.1", eu.number, ssl=known.client(REQUESTS), server_hostname="eu"
    )
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await until(lambda: eu.forwarded)
    assert eu.forwarded == [b"GET / HTTP/1.1\r\n\r\n"]
    writer.close()


def _bare(known: Identity) -> ssl.SSLContext:
    """Of a client that shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(known.authority)
    context.set_alpn_protocols([BEATS])
    return context


@pytest.mark.parametrize(
    ("what", "counted"),
    [
        ("nothing", "no_certificate"),
        ("other service", "not_by_our_authority"),
        ("unknown name", "unknown_agent"),
    ],
)
async def test_who_is_no_peer_is_refused_and_counted(
    nodes: tuple[Node, Node], tmp_path: Path, what: str, counted: str
) -> None:
    us, eu = nodes
    eu.link("us", us.number)
    if what == "nothing":
        tls = _bare(identity(tmp_path / "no", "us"))
    elif what == "other service":
        tls = identity(tmp_path / "no", "us", service="other").client(BEATS)
    else:
        tls = identity(tmp_path / "no", "mars").client(BEATS)
    with suppress(ssl.SSLError, ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", eu.number, ssl=tls, server_hostname="eu")
        assert await reader.read() == b""  # closed without a word
        writer.close()
    await until(lambda: eu.port.refused)
    assert dict(eu.port.refused) == {counted: 1}
    assert eu.received == []


async def test_many_strangers_are_one_line_of_the_log(
    nodes: tuple[Node, Node], caplog: pytest.LogCaptureFixture
) -> None:
    _, eu = nodes
    with caplog.at_level("INFO"):
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", eu.number)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            writer.close()
        await until(lambda: eu.port.refused.total() == 20)
    assert eu.port.refused == {"handshake": 20}
    assert [one.getMessage() for one in caplog.records] == ["refuse connection why=handshake left_out=0"]


async def test_an_agent_that_is_not_the_one_of_the_table_gets_no_beat(nodes: tuple[Node, Node]) -> None:
    us, eu = nodes
    sender = us.link("asia", eu.number)
    await until(lambda: sender.trouble)
    assert "asia" in sender.trouble
    assert sender.connections == 0


async def test_a_certificate_serves_twenty_days_without_a_controller(tmp_path: Path) -> None:
    us = Node("us", identity(tmp_path / "us", "us", age_days=20), REPORT)
    eu = Node("eu", identity(tmp_path / "eu", "eu", age_days=20), REPORT)
    await us.open()
    await eu.open()
    us.link("eu", eu.number)
    eu.link("us", us.number)
    await until(lambda: us.received and eu.received)
    await us.close()
    await eu.close()


@pytest.mark.parametrize("expired", [("us",), ("us", "eu")], ids=["one", "all"])
async def test_agents_whose_certificates_have_expired_hear_that_they_live_and_nothing_else(
    tmp_path: Path, expired: tuple[str, ...]
) -> None:
    nodes = [
        Node(name, identity(tmp_path / name, name, age_days=41 * (name in expired)), REPORT)
        for name in ("us", "eu")
    ]
    us, eu = nodes
    for one in nodes:
        await one.open()
    of_eu, of_us = us.link("eu", eu.number), eu.link("us", us.number)
    await until(lambda: us.states["eu"].rtt_s is not None and eu.states["us"].rtt_s is not None)
    assert of_us.validity is not None
    assert of_us.validity.lapse(time.time()) == "expired"
    assert of_eu.validity is not None
    assert of_eu.validity.lapse(time.time()) == ("expired" if "eu" in expired else "")
    assert {beat.report for _, beat in eu.received} == {without_room(REPORT)}
    assert {beat.report for _, beat in us.received} == {without_room(REPORT) if "eu" in expired else REPORT}
    assert eu.port.refused == {"expired": 1}
    for one in nodes:
        await one.close()


async def test_a_certificate_that_expires_on_an_open_link_is_noticed_there(tmp_path: Path) -> None:
    unix_time_s = time.time()
    us, eu = [
        Node(name, replace(identity(tmp_path / name, name), unix_time_s=lambda: unix_time_s), REPORT)
        for name in ("us", "eu")
    ]
    await eu.open()
    eu.link("us", 1)
    us.link("eu", eu.number)
    await until(lambda: eu.received)
    assert {beat.report for _, beat in eu.received} == {REPORT}
    unix_time_s += 41 * 86400
    eu.received.clear()
    await until(lambda: eu.received)
    assert {beat.report for _, beat in eu.received} == {without_room(REPORT)}
    assert eu.port.refused == {}
    await us.close()
    await eu.close()


@pytest.mark.parametrize("whose", ["of the client", "of the server"])
async def test_a_request_is_neither_taken_from_nor_sent_to_an_agent_whose_certificate_has_expired(
    tmp_path: Path, whose: str
) -> None:
    ages = {"us": 41 * (whose == "of the client"), "eu": 41 * (whose == "of the server")}
    eu = Node("eu", identity(tmp_path / "eu", "eu", age_days=ages["eu"]), REPORT)
    await eu.open()
    eu.link("us", 1)
    tls = identity(tmp_path / "us", "us", age_days=ages["us"]).client(REQUESTS)
    with suppress(ssl.SSLError, ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", eu.number, ssl=tls, server_hostname="eu")
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
    await until(lambda: eu.port.refused)
    assert eu.forwarded == []
    await eu.close()


@pytest.mark.parametrize(
    ("left_days", "state", "lines"), [(10.5, "", 0), (9.5, "expiring", 1), (-0.5, "expired", 1)]
)
def test_an_agent_logs_once_a_day_that_its_certificate_expires(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left_days: float, state: str, lines: int
) -> None:
    known = identity(tmp_path, "us")
    expires_at = known.expires_at()
    assert expires_at is not None
    own = OwnCertificate(replace(known, unix_time_s=lambda: expires_at - 86400 * left_days))
    assert (own.state, own.left_s) == (state, 86400 * left_days)
    for hour in range(24):
        own.look(3600.0 * hour)
    assert len(caplog.records) == lines


def test_when_a_certificate_of_another_authority_expires_is_not_known(tmp_path: Path) -> None:
    assert OwnCertificate(identity(tmp_path, "us", service="other")).left_s is None


async def test_a_connection_on_which_nothing_arrives_any_longer_is_made_again(
    nodes: tuple[Node, Node],
) -> None:
    """A relay between the two forgets one connection: bytes are taken and lost, and neither end is closed."""
    us, eu = nodes
    lost = asyncio.Event()
    passed = 0
    writers: list[asyncio.StreamWriter] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal passed
        passed += 1
        is_first = passed == 1
        back, on = await asyncio.open_connection("127.0.0.1", eu.number)
        writers.extend((writer, on))

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                if not (is_first and lost.is_set()):
                    sink.write(data)

        await asyncio.gather(pump(reader, on), pump(back, writer), return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    sender = us.link("eu", server.sockets[0].getsockname()[1])
    eu.link("us", us.number)
    await until(lambda: us.states["eu"].rtt_s is not None)
    lost.set()
    await until(lambda: sender.connections == 2)
    before = len(eu.received)
    await until(lambda: len(eu.received) > before + 2)
    server.close()
    for writer in writers:
        writer.transport.abort()


async def test_what_is_no_beat_closes_the_link(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    us, eu = nodes
    eu.link("us", us.number)
    known = identity(tmp_path / "us", "us")
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", eu.number, ssl=known.client(BEATS), server_hostname="eu"
    )
    writer.write(b"{}\n")
    with suppress(ConnectionError):
        assert await reader.read() == b""
    assert eu.port.refused["malformed_beat"] == 1
    writer.close()
