"""The session that a body or a query names."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from lb.stream.session_fields import SessionFields

FIELDS = SessionFields(("session_hash", "metadata.session_id", "user"))


@pytest.mark.parametrize(
    ("json", "session"),
    [
        ({"session_hash": "abc"}, "abc"),
        ({"user": "u", "session_hash": "abc"}, "abc"),
        ({"user": "u", "metadata": {"session_id": "m"}}, "m"),
        ({"user": "u", "metadata": {"session_id": None}}, "u"),
        ({"user": "u", "metadata": "session_id"}, "u"),
        ({"user": "u", "metadata": {"session_id": {"a": 1}}}, "u"),
        ({"session_hash": 17}, "17"),
        ({"session_hash": True}, ""),
        ({"session_hash": ""}, ""),
        ({"session_hash": ["abc"]}, ""),
        ({"session_id": "not in metadata"}, ""),
        ({"user": "x" * 1000}, "x" * 256),
        ({}, ""),
    ],
)
def test_the_first_field_that_is_there_names_it(json: dict[str, Any], session: str) -> None:
    assert FIELDS.in_json(json) == session
    if session:
        assert FIELDS.may_be_in(orjson.dumps(json))


@pytest.mark.parametrize(
    ("target", "session"),
    [
        (b"/queue/data?session_hash=abc", "abc"),
        (b"/queue/data?a=1&session_hash=a%20b&user=u", "a b"),
        (b"/queue/data?metadata.session_id=m", "m"),
        (b"/queue/data?metadataXsession_id=m", ""),
        (b"/queue/data?my_session_hash=abc", ""),
        (b"/queue/data?session_hash=", ""),
        (b"/queue/data", ""),
        (b"/session_hash=abc", ""),
        (b"/queue/data?user=" + b"x" * 1000, "x" * 256),
        (b"/queue/data?user=%ff", "\ufffd"),
    ],
)
def test_a_query_names_it(target: bytes, session: str) -> None:
    assert FIELDS.in_query(target) == session


@pytest.mark.parametrize(
    ("body", "session"),
    [
        (b'{"input": "... {"session_hash" : "abc", "inp', "abc"),
        (b'{"session_hash":17}', "17"),
        (b'{"text": "\\"session_hash\\": \\"x\\"", "user": "u"}', "u"),
        (b'{"metadata": {"session_id": "m"}}', ""),
        (b'{"session_hash": "ab', ""),
        (b"", ""),
    ],
)
def test_a_body_that_is_not_parsed_names_it(body: bytes, session: str) -> None:
    assert FIELDS.in_text(body) == session


def test_a_body_without_any_of_the_names_need_not_be_parsed() -> None:
    assert not FIELDS.may_be_in(b'{"input": "the session_hash", "metadata": {}}')


def test_without_fields_there_is_nothing_to_read() -> None:
    none = SessionFields(())
    assert not none
    assert (none.in_query(b"/?user=u"), none.in_json({"user": "u"}), none.in_text(b'{"user":"u"}')) == (
        "",
        "",
        "",
    )
