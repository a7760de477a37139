"""Which resource of one replica a request names, and which ones a response brings."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from lb.stream import resources
from lb.stream.resources import Resource

RESPONSES, BATCHES = b"/v1/responses", b"/v1/batches"


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        (b"/v1/responses/resp_1", Resource("responses", "resp_1")),
        (b"/v1/responses/resp_1/cancel", Resource("responses", "resp_1")),
        (b"/v1/responses/resp_1/input_items", Resource("responses", "resp_1")),
        (b"/v1/conversations/conv_1/items/msg_2", Resource("conversations", "conv_1")),
        (b"/v1/batches/batch_1/cancel", Resource("batches", "batch_1")),
        (b"/v1/files/file-1/content", Resource("files", "file-1")),
        (b"/v1/realtime/calls/rtc_1/hangup", Resource("realtime/calls", "rtc_1")),
        (b"/v1/responses", None),
        (b"/v1/responses/", None),
        (b"/v1/responses/render", None),
        (b"/v1/responses/input_tokens", None),
        (b"/v1/responses/" + b"a" * 200, Resource("responses", "a" * 200)),
        (b"/v1/responses/" + b"a" * 201, None),
        (b"/v1/responses/a%2fb", None),
        (b"/v1/responses/a\xc3\xa4", None),
        (b"/v1/responsesx/resp_1", None),
        (b"/v1/chat/completions", None),
        (b"/x/v1/responses/resp_1", None),
    ],
)
def test_a_path_names_a_resource(path: bytes, resource: Resource | None) -> None:
    assert resources.in_path(path) == resource


@pytest.mark.parametrize(
    ("path", "json", "resource"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, Resource("responses", "resp_1")),
        (RESPONSES, {"previous_response_id": None}, None),
        (RESPONSES, {"previous_response_id": 7}, None),
        (RESPONSES, {"previous_response_id": ""}, None),
        (RESPONSES, {"previous_response_id": "a b"}, None),
        (RESPONSES, {"previous_response_id": "a" * 201}, None),
        (RESPONSES, {"conversation": "conv_1"}, Resource("conversations", "conv_1")),
        (RESPONSES, {"conversation": {"id": "conv_1"}}, Resource("conversations", "conv_1")),
        (RESPONSES, {"conversation": {"id": ["conv_1"]}}, None),
        (RESPONSES, {"input": "hi"}, None),
        (BATCHES, {"input_file_id": "file-1"}, Resource("files", "file-1")),
        (b"/v1/chat/completions", {"previous_response_id": "resp_1"}, None),
    ],
)
def test_a_body_names_a_resource(path: bytes, json: dict[str, Any], resource: Resource | None) -> None:
    assert resources.in_body(path, json) == resource
    if resource is not None:
        assert resources.may_name(path, orjson.dumps(json))


def test_a_body_that_names_none_need_not_be_parsed() -> None:
    assert not resources.may_name(RESPONSES, b'{"input": "hi"}')
    assert not resources.may_name(b"/v1/chat/completions", b'{"previous_response_id": "resp_1"}')


@pytest.mark.parametrize(
    ("path", "makes"),
    [
        (b"/v1/responses", True),
        (b"/v1/responses/resp_1", True),
        (b"/v1/batches", True),
        (b"/v1/batches/batch_1/cancel", True),
        (b"/v1/files", True),
        (b"/v1/files/file-1/content", False),
        (b"/v1/realtime/sessions", True),
        (b"/v1/chat/completions", False),
        (b"/generate", False),
    ],
)
def test_responses_to_some_paths_bring_ids(path: bytes, makes: bool) -> None:
    assert resources.makes_some(path) is makes


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        (b'{"id":"resp_1","output":[]}', ["resp_1"]),
        (b' {\n  "id" : "resp_1"}', ["resp_1"]),
        (b'{"object":"response","id":"resp_1"}', ["resp_1"]),
        (b'{"id":"batch_1","output_file_id":"file-2","error_file_id":null}', ["batch_1", "file-2"]),
        (b'{"object":"list","data":[{"id":"file-1"}]}', []),
        (b'{"error":{"message":"no"}}', []),
        (b'["id"]', []),
        (b"not JSON", []),
        (b'{"id":"a b"}', []),
        (b'{"object":"x","id":7}', []),
    ],
)
def test_a_response_brings_ids(body: bytes, ids: list[str]) -> None:
    assert resources.made(body) == ids


def test_a_long_response_is_not_parsed_for_an_id_that_is_not_its_first_field() -> None:
    text = b'"' + b"a" * 1024 * 1024 + b'"'
    assert resources.made(b'{"text":%b,"id":"resp_1"}' % text) == []
    assert resources.made(b'{"id":"resp_1","text":%b}' % text) == ["resp_1"]


@pytest.mark.parametrize(
    ("begin", "ids"),
    [
        (b'event: response.created\ndata: {"response":{"id":"resp_1","object":"response"}', ["resp_1"]),
        (b'f3\r\ndata: {"type":"response.created","response":{ "id": "resp_1"', ["resp_1"]),
        (b'{"id":"resp_1","output":[', ["resp_1"]),
        (b'data: {"type":"response.created","response":{"id":"resp', []),
        (b": ping\n\n", []),
        (b"x" * 65536 + b'"response":{"id":"resp_1"', []),
    ],
)
def test_a_response_that_has_only_begun_brings_an_id(begin: bytes, ids: list[str]) -> None:
    assert resources.made_at_first(begin) == ids


@pytest.mark.parametrize(
    ("body", "own"),
    [
        (b'{"error":{"message":"Response with id \'x\' not found.","code":404}}', True),
        (b'{"object":"error","message":"not found"}', True),
        (b'{"detail":"Not Found"}', False),
        (b"<html>", False),
        (b"[]", False),
    ],
)
def test_a_404_of_the_api_is_not_one_of_a_server_without_the_path(body: bytes, own: bool) -> None:
    assert resources.is_api_error(body) is own
