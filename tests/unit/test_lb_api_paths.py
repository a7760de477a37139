"""What an engine will understand a path as is what is decided about it, and what the engine gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.http.api_paths import CHAT, Work, for_model, names_a_model, plain_path, work_of
from lb.http.request_head import read_request


@pytest.mark.parametrize(
    "spelled",
    [
        b"/v1/chat/completions",
        b"/v1/chat/completion%73",
        b"/v1%2Fchat%2fcompletions",
        b"/v1/chat/completion%2573",
        b"/v1/chat/completions/",
        b"//v1///chat/completions",
        b"/v1/./chat/completions",
        b"/v1/x/../chat/completions",
        b"/v1/x/%2e%2e/chat/completions",
        b"/../v1/chat/completions",
        b"/v1/Chat/COMPLETIONS",
        b"/v1/chat/completions;jsessionid=1",
        b"/v1;x/chat;y/completions",
        b"/v1\\chat\\completions",
        b"/v1/chat/completions%20",
    ],
)
def test_spellings_of_a_path_of_an_api_are_one(spelled: bytes) -> None:
    assert plain_path(spelled) == CHAT
    head = read_request(b"POST %b?a=%%73 HTTP/1.1\r\nHost: x\r\n\r\n" % spelled, 10)
    assert (head.path, head.target, head.path_text) == (CHAT, CHAT + b"?a=%73", CHAT.decode())


@pytest.mark.parametrize(
    "path",
    [
        b"/",
        b"/files/a%2Fb",
        b"/a//b/",
        b"/v1/chat",
        b"/v1/chat/completions/x",
        b"/V1/Files/X",
        b"/v1/%zz",
        b"/%",
    ],
)
def test_any_other_path_stays_as_it_is(path: bytes) -> None:
    head = read_request(b"GET %b?x HTTP/1.1\r\nHost: x\r\n\r\n" % path, 10)
    assert (head.path, head.target) == (path, path + b"?x")


@given(st.binary(max_size=40))
def test_a_plain_path_is_the_path_or_that_of_an_api(path: bytes) -> None:
    plain = plain_path(b"/" + path)
    assert plain == b"/" + path or names_a_model(plain)
    assert plain_path(plain) == plain


@pytest.mark.parametrize(
    ("path", "work"),
    [
        (b"/v1/chat/completions", Work.GENERATES),
        (b"/api/generate", Work.GENERATES),
        (b"/v1/embeddings", Work.READS),
        (b"/rerank", Work.READS),
        (b"/v1/audio/transcriptions", Work.MEDIA),
        (b"/tokenize", Work.NONE),
        (b"/v1/responses/compact", Work.GENERATES),  # it is no id
        (b"/v1/responses/resp_1", Work.NONE),
        (b"/v1/responses/resp_1/cancel", Work.NONE),
        (b"/v1/files", Work.NONE),
        (b"/v1/batches/b/cancel", Work.NONE),
        (b"/v1/batches", None),
        (b"/v1/responses/resp_1/other", None),
        (b"/v1/realtime", None),
        (b"/", None),
    ],
)
def test_the_work_of_a_path(path: bytes, work: Work | None) -> None:
    assert work_of(path) is work
    assert for_model(path) is (work in (Work.GENERATES, Work.READS))
