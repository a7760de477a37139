"""What travels with a forwarded request: written, sent with a head and read again is the same; anything else is rejected."""

from __future__ import annotations

import pytest

from lb.core.hop import HopError, ReportId, RequestHop, credit_line, hop_lines, read_credit, read_hop
from lb.http.messages import Reader

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nX-Request-Id: %d\r\n%b\r\n"
PLAIN = b"age=0.250;left=9.000;weight=1;tenant=ada"


@pytest.mark.parametrize(
    "hop",
    [
        RequestHop(0.25, 9.0),
        RequestHop(0.0, 600.0, 2.5, "a;b=c, d\r\n"),
        RequestHop(1.5, 0.0, 1.0, "ada", frozenset({"eu", "ch;x"}), 3),
        RequestHop(1.5, 0.0, 1.0, "é", frozenset(), 0),
    ],
)
def test_a_hop_arrives_as_it_was_sent(hop: RequestHop) -> None:
    reader = Reader()
    for number in range(3):  # the first head is read, the others are remembered
        sent = hop._replace(age_s=hop.age_s + number)
        head, length = reader.request(HEAD % (number, hop_lines(sent, {})), 128)
        assert head.ours is not None
        assert read_hop(head.ours[b"hop"]) == sent
        assert (head.request_id, length) == (b"%d" % number, 5)


def test_what_the_client_wants_of_the_load_balancer_goes_with_it() -> None:
    lines = hop_lines(RequestHop(0.0, 1.0), {b"session": b"s", b"policy": b"gorgo", b"other": b"o"})
    head, _ = Reader().request(HEAD % (1, lines), 128)
    assert {key: value for key, value in (head.ours or {}).items() if key != b"hop"} == {
        b"session": b"s",
        b"policy": b"gorgo",
    }


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"age=0.250;left=9.000;",
        PLAIN.replace(b"age=0.250", b"age=nan"),
        PLAIN.replace(b"age=0.250", b"age=-1.000"),
        PLAIN.replace(b"left=9.000", b"left=90000.000"),
        PLAIN.replace(b"left=9.000", b"left=inf"),
        PLAIN.replace(b"weight=1", b"weight=0"),
        PLAIN.replace(b"weight=1", b"weight=nan"),
        PLAIN.replace(b"weight=1", b"weight=x"),
        PLAIN.replace(b"ada", b"a" * 513),
        PLAIN + b";zones=" + b",".join(b"z%d" % number for number in range(101)),
        PLAIN + b";breaks=-1",
        PLAIN + b";breaks=x",
    ],
)
def test_a_hop_that_is_malformed_or_out_of_bounds_is_rejected(value: bytes) -> None:
    with pytest.raises(HopError):
        read_hop(value)


@pytest.mark.parametrize(
    ("value", "credit"),
    [
        (b"7-12", ReportId(7, 12)),
        (b"", None),
        (b"7", None),
        (b"7-x", None),
        (b"-1", None),
        (b"1" * 50 + b"-1", None),
    ],
)
def test_credit(value: bytes, credit: ReportId | None) -> None:
    assert read_credit(value) == credit
    if credit is not None:
        assert credit_line(credit) == b"X-SkyServe-Credit: " + value + b"\r\n"
