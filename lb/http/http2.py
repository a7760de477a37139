"""The response to a client that speaks HTTP/2 without asking first: it is refused in HTTP/2, with a text that names HTTP/1.1. Pure.

A client with prior knowledge, and every client of gRPC without TLS, begins with `PREFACE`. A response of HTTP/1.1 would be
noise to it. Closing the connection by GOAWAY alone would make clients of gRPC connect again at once and for ever, as their
request was not processed: so the first request gets a response, and then the connection its GOAWAY (RFC 9113 §6.8).
"""

from __future__ import annotations

from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\n"
_PREFACE_BYTES = 24  # with `SM\r\n\r\n`
_HEAD_BYTES = 9  # of a frame
_DATA, _HEADERS, _SETTINGS, _GOAWAY = 0x0, 0x1, 0x4, 0x7
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_NO_ERROR, _HTTP_1_1_REQUIRED = 0x0, 0xD
_GRPC = b"application/grpc"
_GRPC_IN_HUFFMAN_CODE = bytes.fromhex("1d75d0620d263d4c4d6564")  # the same in the code of RFC 7541
_UNIMPLEMENTED = b"12"
# Of HPACK (RFC 7541) only literals without indexing are written, and names of the static table.
_STATUS_200 = b"\x88"
_STATUS_505 = b"\x08\x03505"
_CONTENT_TYPE = b"\x0f\x10"


class Http2Request(NamedTuple):
    """The first request of a connection."""

    stream: int
    is_grpc: bool


def first_request(data: bytes) -> Http2Request | None:
    """Return the first request in what a client has sent from its preface on; None if it is not there yet."""
    at = _PREFACE_BYTES
    while at + _HEAD_BYTES <= len(data):
        end = at + _HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
        if data[at + 3] == _HEADERS and end <= len(data):
            fields = data[at + _HEAD_BYTES : end]
            is_grpc = _GRPC in fields or _GRPC_IN_HUFFMAN_CODE in fields
            return Http2Request(int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF, is_grpc)
        at = end
    return None


def http_1_1_required(request: Http2Request | None, text: str) -> bytes:
    """Return the frames that end the connection, and before that refuse the request if there is one, with a text for people.

    A client of gRPC gets UNIMPLEMENTED with the text as its message, another one status 505 with the text as its body.
    """
    data = text.encode()
    if request is None:
        return _goaway(0, _HTTP_1_1_REQUIRED, data)
    stream, is_grpc = request
    response = _frame(_SETTINGS, _ACK, 0)
    if is_grpc:
        fields = _STATUS_200 + _CONTENT_TYPE + _string(_GRPC)
        fields += _field(b"grpc-status", _UNIMPLEMENTED) + _field(b"grpc-message", data)
        response += _frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, fields)
    else:
        response += _frame(
            _HEADERS, _END_HEADERS, stream, _STATUS_505 + _CONTENT_TYPE + _string(b"text/plain")
        )
        response += _frame(_DATA, _END_STREAM, stream, data)
    return response + _goaway(stream, _NO_ERROR, data)


def _goaway(last: int, code: int, data: bytes) -> bytes:
    return _frame(_GOAWAY, 0, 0, last.to_bytes(4, "big") + code.to_bytes(4, "big") + data)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _field(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    """Return a string of HPACK; its length must be below 127."""
    return bytes((len(text),)) + text


SETTINGS = _frame(_SETTINGS, 0, 0)
"""With which a server begins. Clients of gRPC send no request before it."""
