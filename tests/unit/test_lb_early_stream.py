"""What a client reads before a target has sent anything."""

from __future__ import annotations

import orjson
import pytest

from lb.stream import early_stream
from lb.stream.dialects import DIALECTS

CHAT, RESPONSES, MESSAGES = b"/v1/chat/completions", b"/v1/responses", b"/v1/messages"


def data_of(event: bytes) -> dict[str, object]:
    assert event.endswith(b"\n\n")
    (line,) = [one for one in event.splitlines() if one.startswith(b"data: ")]
    data: dict[str, object] = orjson.loads(line[6:])
    return data


@pytest.mark.parametrize(
    ("path", "data", "name"),
    [
        (CHAT, {"error": {"message": "no", "type": "server_error", "param": None, "code": "c"}}, b"data: "),
        (
            RESPONSES,
            {"type": "error", "code": "c", "message": "no", "param": None, "sequence_number": 0},
            b"event: error\n",
        ),
        (MESSAGES, {"type": "error", "error": {"type": "api_error", "message": "no"}}, b"event: error\n"),
    ],
)
def test_a_failure_is_an_event_of_the_api(path: bytes, data: dict[str, object], name: bytes) -> None:
    event = DIALECTS[path].error_event("c", "no", None)
    assert data_of(event) == data
    assert event.startswith(name)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b'{"error":{"message":"too long","code":400}}', "400", "too long"),
        (b'{"error":{"message":"too long","code":null}}', "http_status_400", "too long"),
        (b'{"error":"too long"}', "http_status_400", "too long"),
        (b'{"object":"error","message":"too long","code":400}', "400", "too long"),
        (b'{"detail":"Not Found"}', "http_status_400", "Not Found"),
        (b"<html>", "http_status_400", "<html>"),
        (b"[]", "http_status_400", "[]"),
        (b"\xff", "http_status_400", "\ufffd"),
        (b"", "http_status_400", ""),
    ],
)
def test_an_error_of_a_target_becomes_an_event(body: bytes, code: str, message: str) -> None:
    data = data_of(early_stream.failure_of(RESPONSES, 400, body))
    assert (data["code"], data["message"]) == (code, message)


def test_a_response_that_is_no_stream_becomes_one_event() -> None:
    assert early_stream.whole(b'{\n "id": 1}') == b'data: {\ndata:  "id": 1}\n\n'


def test_the_early_head_is_one_of_a_stream_that_is_not_to_be_kept_back() -> None:
    head = early_stream.early_head()
    assert (head.status, head.content_type) == (200, b"text/event-stream; charset=utf-8")
    assert b"X-Accel-Buffering: no" in head.lines
