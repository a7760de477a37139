"""Where a body ends: the same wherever the network cuts it, and the same for h11."""

from __future__ import annotations

import itertools

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.http.body_framing import (
    MAX_SIZE_LINE,
    MAX_TRAILER_BYTES,
    ChunkedDecoder,
    CloseDelimitedDecoder,
    FramingError,
    LengthDecoder,
    chunk,
    one_chunk,
)

REFUSED = "refused"
GOES_ON = "goes on"


def walk(pieces: list[bytes], keep: bool = True) -> tuple[str | int, bytes]:
    """Where the body ends in all the bytes, and its payload."""
    payloads: list[bytes] | None = [] if keep else None
    decoder = ChunkedDecoder(payloads)
    before = 0
    for piece in pieces:
        try:
            end = decoder.feed(piece)
        except FramingError:
            return REFUSED, b""
        if end >= 0:
            return before + end, b"".join(payloads or [])
        before += len(piece)
    return GOES_ON, b"".join(payloads or [])


def instance_poller(data: bytes) -> tuple[str | int, bytes]:
    """The same by h11."""
    http = h11.Connection(h11.SERVER)
    http.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
    body = b""
    while True:
        try:
            event = http.next_event()
        except h11.RemoteProtocolError:
            return REFUSED, b""
        if isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return len(data) - len(http.trailing_data[0]), body
        elif not isinstance(event, h11.Request):
            return GOES_ON, body


WELL_FORMED = {
    "nothing": b"0\r\n\r\n",
    "one chunk": b"5\r\nhello\r\n0\r\n\r\n",
    "two chunks": b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n",
    "what looks like the end within a chunk": b"9\r\n\r\n0\r\n\r\n\r\n\r\n0\r\n\r\n",
    "hexadecimal, both cases": b"a\r\n0123456789\r\nA\r\n0123456789\r\n0\r\n\r\n",
    "leading zeros": b"0005\r\nhello\r\n000\r\n\r\n",
    "extensions": b'5;a=b\r\nhello\r\n1;c="d e"\r\n!\r\n0;last\r\n\r\n',
    "trailers": b"5\r\nhello\r\n0\r\nX-Sum: abc\r\nY:\r\n\r\n",
    "something behind": b"5\r\nhello\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    "a carriage return at the end of a chunk": b"6\r\nhello\r\r\n0\r\n\r\n",
    "a line end for a payload": b"2\r\n\r\n\r\n0\r\n\r\n",
}

MALFORMED = {
    "0x": b"0x5\r\nhello\r\n0\r\n\r\n",
    "a sign": b"+5\r\nhello\r\n0\r\n\r\n",
    "minus": b"-5\r\nhello\r\n0\r\n\r\n",
    "a space before": b" 5\r\nhello\r\n0\r\n\r\n",
    "a space behind": b"5 \r\nhello\r\n0\r\n\r\n",
    "a space before the extension": b"5 ;a\r\nhello\r\n0\r\n\r\n",
    "an underscore": b"1_0\r\n0123456789abcdef\r\n0\r\n\r\n",
    "no size": b"\r\nhello\r\n0\r\n\r\n",
    "only an extension": b";a\r\nhello\r\n0\r\n\r\n",
    "no hexadecimal": b"g\r\nhello\r\n0\r\n\r\n",
    "huge": b"ffffffffffffffff5\r\nhello\r\n0\r\n\r\n",
    "line feed only": b"5\nhello\n0\n\n\r\n",
    "line feed behind the size": b"5\nhello\r\n0\r\n\r\n",
    "carriage return behind the size": b"5\rhello\r\n0\r\n\r\n",
    "a chunk that is too long": b"5\r\nhelloX\r\n0\r\n\r\n",
    "a chunk that is too short": b"5\r\nhell\r\n0\r\n\r\n",
    "line feed behind a chunk": b"5\r\nhello\n0\r\n\r\n",
    "something and a line feed behind a chunk": b"5\r\nhelloX\n0\r\n\r\n",
    "carriage return and something behind a chunk": b"5\r\nhello\rX0\r\n\r\n",
    "line feed in an extension": b"5;a\nb\r\nhello\r\n0\r\n\r\n",
    "carriage return in an extension": b"5;a\rb\r\nhello\r\n0\r\n\r\n",
    "NUL in an extension": b"5;a\x00b\r\nhello\r\n0\r\n\r\n",
    "a trailer without a colon": b"0\r\nX\r\n\r\n",
    "a trailer without a name": b"0\r\n: x\r\n\r\n",
    "a trailer with a space in its name": b"0\r\nX : x\r\n\r\n",
    "a folded trailer": b"0\r\nX: x\r\n y\r\n\r\n",
    "a line feed in a trailer": b"0\r\nX: x\nY: y\r\n\r\n",
    "a carriage return in a trailer": b"0\r\nX: x\rY: y\r\n\r\n",
    "NUL in a trailer": b"0\r\nX: \x00\r\n\r\n",
    "a request for a trailer": b"0\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "an extension without end": b"5;" + b"a" * MAX_SIZE_LINE + b"\r\nhello\r\n0\r\n\r\n",
    "a trailer without end": b"0\r\nX: " + b"a" * MAX_SIZE_LINE + b"\r\n\r\n",
    "trailers without end": b"0\r\n" + b"X: y\r\n" * (MAX_TRAILER_BYTES // 6 + 1) + b"\r\n",
}


@pytest.mark.parametrize("data", WELL_FORMED.values(), ids=WELL_FORMED.keys())
def test_well_formed_bodies_are_read_as_h11_reads_them(data: bytes) -> None:
    assert walk([data]) == instance_poller(data)
    assert walk([data])[0] != REFUSED


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bodies_are_refused(data: bytes) -> None:
    assert walk([data]) == (REFUSED, b"")


@pytest.mark.parametrize("keep", [True, False], ids=["with payload", "without payload"])
@pytest.mark.parametrize(
    "data", [*WELL_FORMED.values(), *MALFORMED.values()], ids=[*WELL_FORMED.keys(), *MALFORMED.keys()]
)
def test_it_does_not_matter_where_the_network_cuts(data: bytes, keep: bool) -> None:
    whole = walk([data], keep)
    step = 1 if len(data) < 1000 else 97
    assert walk([data[at : at + 1] for at in range(len(data))], keep) == whole
    for cut in range(1, len(data), step):
        assert walk([data[:cut], data[cut:]], keep) == whole, cut


@pytest.mark.parametrize(
    ("data", "is_between"),
    [(b"", True), (b"5\r\nhel", False), (b"5\r\nhello\r\n", True), (b"5", False), (b"0\r\n", False)],
)
def test_where_a_chunk_may_be_added(data: bytes, is_between: bool) -> None:
    decoder = ChunkedDecoder()
    decoder.feed(data)
    assert decoder.between is is_between


@pytest.mark.parametrize("size", [MAX_SIZE_LINE - 3, MAX_SIZE_LINE - 2, MAX_SIZE_LINE - 1])
@pytest.mark.parametrize("prefix", [b"5;", b"0\r\nX:"], ids=["an extension", "a trailer"])
def test_the_bound_of_a_line_does_not_depend_on_cuts(prefix: bytes, size: int) -> None:
    line = prefix + b"a" * size
    data = line + (b"\r\nhello\r\n0\r\n\r\n" if prefix == b"5;" else b"\r\n\r\n")
    whole = walk([data])
    for cut in (len(line) - 1, len(line), len(line) + 1, len(line) + 2):
        assert walk([data[:cut], data[cut:]]) == whole


_PIECES = st.sampled_from(
    [b"0", b"5", b"a", b"F", b"\r\n", b"\r\n", b"\r", b"\n", b";", b";x=y", b" ", b"+", b"0x", b"hello", b"X: y", b":",
     b"5\r\nhello\r\n", b"0\r\n\r\n", b"\x00", b"_"]
)  # fmt: skip


@given(st.lists(_PIECES, max_size=12), st.integers(0, 40))
def test_whatever_we_accept_h11_reads_alike(parts: list[bytes], cut: int) -> None:
    data = b"".join(parts)
    ours = walk([data[:cut], data[cut:]])
    assert walk([data[:cut], data[cut:]], keep=False)[0] == ours[0]
    if ours[0] not in (REFUSED, GOES_ON):
        assert ours == instance_poller(data)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.binary(max_size=9), st.data())
def test_made_bodies_come_back(payloads: list[bytes], rest: bytes, data: st.DataObject) -> None:
    wire = b"".join(map(chunk, payloads)) + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire + rest)), max_size=6)))
    edges = [0, *cuts, len(wire + rest)]
    pieces = [(wire + rest)[a:b] for a, b in itertools.pairwise(edges)]
    assert walk(pieces) == (len(wire), b"".join(payloads))


@given(st.integers(0, 50), st.lists(st.integers(0, 20), max_size=8))
def test_a_body_of_known_length_ends_at_it(length: int, sizes: list[int]) -> None:
    decoder, left = LengthDecoder(length), length
    for size in sizes:
        end = decoder.feed(b"x" * size)
        if size < left:
            assert end == -1
            left -= size
        else:
            assert end == left
            return


def test_a_body_without_length_goes_on() -> None:
    assert CloseDelimitedDecoder().feed(b"0\r\n\r\n") == -1


@pytest.mark.parametrize(
    ("data", "is_one"),
    [
        (b"5\r\nhello\r\n", True),
        (b"0005\r\nhello\r\n", True),
        (b"0\r\n\r\n", False),
        (b"5\r\nhello\r\n0\r\n\r\n", False),
        (b"4\r\nhello\r\n", False),
        (b"6\r\nhello\r\n", False),
        (b"5;a\r\nhello\r\n", False),
        (b"+5\r\nhello\r\n", False),
        (b"\r\nhello\r\n", False),
        (b"5\r\nhelloXX", False),
        (b"", False),
        (b"5", False),
    ],
)
def test_what_is_exactly_one_chunk(data: bytes, is_one: bool) -> None:
    assert one_chunk(data) is is_one
    if is_one:
        assert walk([data])[0] == GOES_ON
