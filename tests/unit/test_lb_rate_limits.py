"""Header lines and errors by which a client knows its limits."""

from __future__ import annotations

import json

import pytest

from lb.core.quota import Limited
from lb.http.error_responses import raw_error
from lb.http.rate_limits import duration, lines_of


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(-1, "0ms"), (0, "0ms"), (0.0204, "20ms"), (1, "1s"), (1.5, "1.5s"), (59.94, "59.9s"), (60, "1m0s"), (361, "6m1s")],
)  # fmt: skip
def test_times_are_written_as_openai_does(seconds: float, written: str) -> None:
    assert duration(seconds) == written


def test_what_is_left_and_when_it_is_full_again() -> None:
    lines = lines_of(60.0, 59.4, 1000.0, -500.0)
    assert lines.decode().split("\r\n") == [
        "x-ratelimit-limit-requests: 60",
        "x-ratelimit-remaining-requests: 59",
        "x-ratelimit-reset-requests: 600ms",
        "x-ratelimit-limit-tokens: 1000",
        "x-ratelimit-remaining-tokens: 0",
        "x-ratelimit-reset-tokens: 1m30s",
        "",
    ]
    assert lines_of(60.0, 59.4, 0.0, 0.0) + lines_of(0.0, 0.0, 1000.0, -500.0) == lines
    assert lines_of(0.0, 0.0, 0.0, 0.0) == b""


def test_what_is_left_of_a_limit_that_is_used_up() -> None:
    assert Limited("a", "tokens", 60, 13.0).left[2:] == (60, pytest.approx(-12.0))
    assert Limited("a", "requests", 60, 13.0).left[:2] == (60, pytest.approx(-12.0))
    for limit in (
        Limited("a", "concurrent requests", 2, 1.0),
        Limited("a", "tokens", 60, 1.0, "day"),
        Limited("a", "output tokens", 60, 1.0),
    ):
        assert lines_of(*limit.left) == b""


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_of_the_messages_api_are_of_its_form(status: int, kind: str) -> None:
    body = raw_error(status, "code", "No.", path=b"/v1/messages").partition(b"\r\n\r\n")[2]
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "No."}}
    body = raw_error(status, "code", "No.", path=b"/v1/completions").partition(b"\r\n\r\n")[2]
    assert json.loads(body)["error"]["code"] == "code"


@pytest.mark.parametrize(("after_s", "forbidden"), [(None, False), (1, False), (60, False), (61, True)])
def test_clients_must_not_try_again_before_it_makes_sense(after_s: int | None, forbidden: bool) -> None:
    head = raw_error(429, "code", "No.", retry_after_s=after_s)
    assert (b"X-Should-Retry: false\r\n" in head) is forbidden
