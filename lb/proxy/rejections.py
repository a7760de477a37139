"""What connections and requests are refused with before they have a target."""

from __future__ import annotations

from typing import NamedTuple


class Rejection(NamedTuple):
    """An error response of our own to a request that is not let in."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None
    more_lines: bytes = b""  # of the response's head


NO_ROOM = Rejection(503, "out_of_memory", "The load balancer keeps as many bodies as it may; try again.", 1.0)
TINY_CHUNKS = Rejection(400, "tiny_chunks", "The chunks of the body are too small.")
MALFORMED_BODY = Rejection(400, "malformed_body", "The body is not well-formed.")
TOO_MANY_CONNECTIONS = Rejection(
    503, "too_many_connections", "The load balancer has as many connections as it may.", 1.0
)
HTTP_2 = Rejection(
    505, "unsupported_version", "HTTP/1.1 is needed: this load balancer does not speak HTTP/2 or gRPC."
)
HEAD_TIMEOUT = Rejection(408, "head_timeout", "The head of the request did not arrive in time.")
BODY_TIMEOUT = Rejection(408, "body_timeout", "The body did not arrive in time.")


def too_slow(bytes_per_s: int) -> Rejection:
    """Return what the client of a body gets that arrives more slowly than this."""
    option = "load_balancer.min_upload_bytes_per_second"
    return Rejection(
        408, "upload_too_slow", f"The body arrives at less than {bytes_per_s} bytes per second ({option})."
    )
