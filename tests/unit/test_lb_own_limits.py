"""What the load balancer's own host lacks, and the frames of tunnels."""

from __future__ import annotations

import errno
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.agent.descriptors import Shares, shares
from lb.core.failures import BLAME, Failure, described, is_local
from lb.core.target_state import Blame
from lb.http.websocket import GOING_AWAY, FrameTracker, close_frame


@pytest.mark.parametrize(
    ("error", "local"),
    [
        (OSError(errno.EMFILE, "too many open files"), True),
        (OSError(errno.EADDRNOTAVAIL, "no port is left"), True),
        (OSError(errno.ENOBUFS, "no buffer is left"), True),
        (socket.gaierror(socket.EAI_AGAIN, "the name server does not respond"), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False),
        (OSError(errno.EHOSTUNREACH, "no route"), False),
        (TimeoutError(), False),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else str(one),
)
def test_what_is_lacking_here_is_not_the_targets_fault(error: Exception, local: bool) -> None:
    assert is_local(error) is local


def test_a_local_failure_blames_no_target() -> None:
    assert BLAME[Failure.LOCAL] is Blame.NONE
    assert described(OSError(errno.EMFILE, "x")) == f"OSError errno={errno.EMFILE}"


@pytest.mark.parametrize(
    ("limit", "tls_ports", "expected"),
    [
        (96, 0, Shares(28, 14)),
        (96, 1, Shares(21, 14)),
        (96, 2, Shares(14, 14)),
        (1024, 0, Shares(492, 246)),
        (1024, 1, Shares(369, 246)),
        (1 << 20, 2, Shares(((1 << 20) - 40 - 2048) // 2, 1024)),
        (10, 2, Shares(1, 1)),
    ],
)
def test_descriptors_are_left_for_targets(limit: int, tls_ports: int, expected: Shares) -> None:
    assert shares(limit, tls_ports) == expected
    if limit > 50:
        assert 2 * expected.clients + tls_ports * expected.handshakes <= limit - 40


def frame(payload: bytes, masked: bool) -> bytes:
    size, bit = len(payload), 0x80 if masked else 0
    if size < 126:
        head = bytes((0x82, bit | size))
    elif size < 65536:
        head = bytes((0x82, bit | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x82, bit | 127)) + size.to_bytes(8, "big")
    return head + (b"\0\0\0\0" if masked else b"") + payload


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 125, 126, 300, 70_000]), st.booleans()), min_size=1, max_size=5
    ),
    st.lists(st.integers(0, 100_000), max_size=8),
)
def test_the_ends_of_frames_are_found_however_they_are_cut(
    frames: list[tuple[int, bool]], cuts: list[int]
) -> None:
    pieces = [frame(b"x" * size, masked) for size, masked in frames]
    data = b"".join(pieces)
    ends = {sum(map(len, pieces[:count])) for count in range(len(pieces) + 1)}
    tracker = FrameTracker()
    at = 0
    for cut in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        tracker.feed(data[at:cut])
        at = cut
        assert tracker.between is (cut in ends)


@pytest.mark.parametrize("masked", [False, True])
def test_a_close_frame_is_a_whole_frame(masked: bool) -> None:
    tracker = FrameTracker()
    tracker.feed(close_frame(GOING_AWAY, masked=masked))
    assert tracker.between
    assert close_frame(GOING_AWAY, masked=masked).endswith(b"\x03\xe9")
