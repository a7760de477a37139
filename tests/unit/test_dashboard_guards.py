"""A code works once, a session ends, and no page of another site gets anything."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path

import pytest

from skyserve_cli.controller.dashboard.endpoint import (
    CODE_S,
    FOLDER,
    MOST_CODES,
    MOST_SESSIONS,
    SESSION_S,
    Session,
    Sessions,
    action_token,
)
from skyserve_cli.controller.dashboard.guards import HEADERS, refusal

PAGES = sorted(
    path for path in FOLDER.rglob("*") if path.suffix in (".html", ".js") and "vendor" not in path.parts
)


def sessions(kept: dict[str, Session] | None = None) -> Sessions:
    numbers = itertools.count()
    return Sessions(lambda: f"secret{next(numbers)}", kept)


def test_a_code_works_once_and_for_a_minute() -> None:
    found = sessions()
    code, late = found.new_code("owner", 0.0), found.new_code("owner", 0.0)
    assert found.enter("guessed", 1.0) is None
    secret = found.enter(code, CODE_S)
    assert secret is not None
    assert found.enter(code, CODE_S) is None
    assert found.enter(late, CODE_S + 0.1) is None


def test_a_session_outlives_the_controller_and_ends() -> None:
    before = sessions()
    secret = before.enter(before.new_code("owner", 0.0), 0.0)
    assert secret is not None
    assert secret not in json.dumps(before.kept())
    after = sessions(before.kept())
    assert after.name_of(secret, SESSION_S - 1) == "owner"
    assert after.name_of(secret, SESSION_S) is None
    assert after.name_of("", 1.0) is None


def test_codes_and_sessions_are_bounded() -> None:
    found = sessions()
    codes = [found.new_code("owner", 0.0) for _ in range(MOST_CODES + 1)]
    assert found.enter(codes[0], 1.0) is None
    secrets = [found.enter(found.new_code("owner", at), at) for at in map(float, range(MOST_SESSIONS + 5))]
    assert len(found.kept()) == MOST_SESSIONS
    assert found.name_of(str(secrets[0]), 1.0) is None
    assert found.name_of(str(secrets[-1]), 100.0) == "owner"


def test_the_token_of_actions_is_of_one_session() -> None:
    assert action_token("a") != action_token("b")


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        pytest.param("GET", {"Host": "127.0.0.1:8000"}, None, id="loopback"),
        pytest.param("GET", {"Host": "LOCALHOST:9"}, None, id="by name, over a forward"),
        pytest.param("GET", {"Host": "[::1]:9"}, None, id="IPv6"),
        pytest.param("GET", {"Host": "page.example"}, None, id="a configured name"),
        pytest.param("GET", {"Host": "evil.example:8000"}, 421, id="DNS rebinding"),
        pytest.param("GET", {"Host": "127.0.0.1.evil.example"}, 421, id="a name that begins with ours"),
        pytest.param("GET", {}, 421, id="no Host"),
        pytest.param("POST", {"Host": "127.0.0.1:1"}, 403, id="a POST of no browser"),
        pytest.param("POST", {"Host": "127.0.0.1:1", "Sec-Fetch-Site": "cross-site"}, 403, id="another site"),
        pytest.param("POST", {"Host": "127.0.0.1:1", "Sec-Fetch-Site": "same-site"}, 403, id="another port"),
        pytest.param("POST", {"Host": "127.0.0.1:1", "Sec-Fetch-Site": "same-origin"}, None, id="the page"),
    ],
)
def test_requests_that_are_refused(method: str, headers: dict[str, str], status: int | None) -> None:
    found = refusal(method, headers, {"page.example"})
    assert (None if found is None else found[0]) == status


def test_no_script_may_be_inline_or_from_elsewhere() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == (
        "'none'",
        "'self'",
        "'self'",
    )
    assert "unsafe" not in HEADERS["Content-Security-Policy"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_writes_text_only_as_text(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.search(r"https?://(?!www\.w3\.org)", text)


def test_vendored_files_are_those_of_the_registry() -> None:
    for source in FOLDER.glob("vendor/*/SOURCE.json"):
        told = json.loads(source.read_text())
        names = {path.name for path in source.parent.iterdir()} - {"SOURCE.json"}
        assert names == set(told["sha256"])
        assert "LICENSE" in names
        for name, digest in told["sha256"].items():
            assert hashlib.sha256((source.parent / name).read_bytes()).hexdigest() == digest
    assert list(FOLDER.glob("vendor/*/SOURCE.json"))
