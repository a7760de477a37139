"""The frames of HTTP/2 that refuse a client, byte by byte (RFC 9113, RFC 7541)."""

from __future__ import annotations

import pytest

from lb.http.http2 import SETTINGS, Http2Request, first_request, http_1_1_required

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW_UPDATE = b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x00\x00\x00\x01"


def headers(stream: int, fields: bytes) -> bytes:
    return len(fields).to_bytes(3, "big") + b"\x01\x05" + stream.to_bytes(4, "big") + fields


@pytest.mark.parametrize(
    ("fields", "is_grpc"),
    [
        (b"\x82\x84\x86", False),
        (b"\x83\x5f\x10application/grpc", True),
        (b"\x83\x5f\x8b\x1d\x75\xd0\x62\x0d\x26\x3d\x4c\x4d\x65\x64", True),
    ],
    ids=["GET /", "gRPC", "gRPC in Huffman code"],
)
def test_the_first_request_is_found_behind_other_frames(fields: bytes, is_grpc: bool) -> None:
    whole = PREFACE + SETTINGS + WINDOW_UPDATE + headers(5, fields)
    assert first_request(whole + headers(7, b"\x82")) == Http2Request(5, is_grpc)
    assert [first_request(whole[:size]) for size in range(len(whole))] == [None] * len(whole)


def test_a_request_is_refused_with_505_and_a_text() -> None:
    assert (
        http_1_1_required(Http2Request(5, False), "no")
        == (
            b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"  # SETTINGS, ACK
            b"\x00\x00\x12\x01\x04\x00\x00\x00\x05\x08\x03505\x0f\x10\x0atext/plain"  # HEADERS: :status, content-type
            b"\x00\x00\x02\x00\x01\x00\x00\x00\x05no"  # DATA, END_STREAM
            b"\x00\x00\x0a\x07\x00\x00\x00\x00\x00\x00\x00\x00\x05\x00\x00\x00\x00no"  # GOAWAY after stream 5
        )
    )


def test_a_call_of_grpc_is_unimplemented() -> None:
    assert http_1_1_required(Http2Request(1, True), "no") == (
        b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"
        b"\x00\x00\x35\x01\x05\x00\x00\x00\x01\x88\x0f\x10\x10application/grpc"
        b"\x00\x0bgrpc-status\x0212\x00\x0cgrpc-message\x02no"
        b"\x00\x00\x0a\x07\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00no"
    )


def test_without_a_request_the_connection_ends_with_http_1_1_required() -> None:
    assert http_1_1_required(None, "no") == (
        b"\x00\x00\x0a\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x0dno"
    )
