"""Which pages may call through the load balancer, and the header lines that tell browsers so."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lb.config.cors import Cors
from lb.config.decode import WireError
from lb.http.cors import CorsRules

APP = "https://app.example.com"
EXACT = Cors(origins=(APP, "http://localhost:3000"))
PATTERN = Cors(origins=("https://*.example.com",))
ANY = Cors(origins=("*",))
NARROW = Cors(origins=(APP,), methods=("GET", "PATCH"), headers=("Authorization", "Content-Type"))
COOKIES = Cors(origins=(APP,), credentials=True, exposed_headers=())


def headers(lines: bytes) -> dict[str, str]:
    """The lines as a dict; each line must be whole, and each name unique."""
    assert lines == b"" or lines.endswith(b"\r\n")
    pairs = [line.split(": ", 1) for line in lines.decode().split("\r\n")[:-1]]
    assert len(dict(pairs)) == len(pairs)  # type: ignore[arg-type]
    return dict(pairs)  # type: ignore[arg-type]


# Origins


@pytest.mark.parametrize(
    ("cors", "origin", "allowed"),
    [
        pytest.param(EXACT, APP, True, id="a listed origin"),
        pytest.param(EXACT, "http://localhost:3000", True, id="a listed origin with a port"),
        pytest.param(EXACT, "http://localhost:3001", False, id="another port"),
        pytest.param(EXACT, "http://app.example.com", False, id="another scheme"),
        pytest.param(EXACT, "https://app.example.com.evil.org", False, id="a longer host"),
        pytest.param(EXACT, "https://appXexample.com", False, id="a dot is a dot"),
        pytest.param(EXACT, "null", False, id="a sandboxed page"),
        pytest.param(EXACT, "", False, id="an empty header"),
        pytest.param(EXACT, None, False, id="no header"),
        pytest.param(PATTERN, "https://a.example.com", True, id="a subdomain"),
        pytest.param(PATTERN, "https://a.b.example.com", True, id="a subdomain of a subdomain"),
        pytest.param(PATTERN, "https://example.com", False, id="the domain itself is no subdomain"),
        pytest.param(PATTERN, "https://.example.com", False, id="an empty label"),
        pytest.param(PATTERN, "https://evilexample.com", False, id="a domain that ends alike"),
        pytest.param(PATTERN, "https://evil.org/.example.com", False, id="a path in the host's place"),
        pytest.param(PATTERN, "https://evil.org:1.example.com", False, id="a port in the host's place"),
        pytest.param(PATTERN, "https://a.example.com:8443", False, id="a subdomain's other port"),
        pytest.param(PATTERN, "http://a.example.com", False, id="a subdomain by another scheme"),
        pytest.param(PATTERN, "https://a.example.com\n", False, id="a line feed"),
        pytest.param(Cors(), "", False, id="without origins, the empty one"),
        pytest.param(Cors(), APP, False, id="without origins, any"),
    ],
)
def test_which_origins_are_allowed(cors: Cors, origin: str | None, allowed: bool) -> None:
    raw = None if origin is None else origin.encode()
    response = headers(CorsRules(cors)[raw])
    assert response.get("Access-Control-Allow-Origin") == (origin if allowed else None)
    assert ("Access-Control-Expose-Headers" in response) is allowed
    assert response["Vary"] == "Origin", "a cache must not give this response to another origin"
    preflight = CorsRules(cors).decide(b"OPTIONS", raw, b"POST", b"authorization")
    assert preflight.status == (204 if allowed else None if raw is None else 403)
    assert ("Access-Control-Allow-Origin" in headers(preflight.lines)) is allowed


@pytest.mark.parametrize("origin", [None, b"null", b"https://anything.org"])
def test_with_a_star_every_response_has_the_same_lines(origin: bytes | None) -> None:
    assert headers(CorsRules(ANY)[origin]) == {
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
    }


def test_credentials_name_the_origin() -> None:
    rules = CorsRules(COOKIES)
    expected = {"Access-Control-Allow-Origin": APP, "Access-Control-Allow-Credentials": "true"}
    assert headers(rules[APP.encode()]) == {"Vary": "Origin", **expected}
    preflight = headers(rules.decide(b"OPTIONS", APP.encode(), b"GET", None).lines)
    assert {name: preflight[name] for name in expected} == expected
    assert "Access-Control-Allow-Credentials" not in headers(rules[b"https://evil.org"])


# Preflights


def test_an_allowed_preflight_says_all_a_browser_asks() -> None:
    decision = CorsRules(EXACT).decide(b"OPTIONS", APP.encode(), b"POST", b"authorization,content-type")
    assert decision.status == 204
    assert headers(decision.lines) == {
        "Vary": "Origin, Access-Control-Request-Headers",
        "Access-Control-Allow-Origin": APP,
        "Access-Control-Allow-Headers": "authorization,content-type",
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Max-Age": "600",
    }


@pytest.mark.parametrize(
    ("method", "asked_method", "asked_headers", "problem"),
    [
        pytest.param(b"GET", None, None, "", id="a listed method"),
        pytest.param(b"OPTIONS", b"PATCH", b"Authorization", "", id="a listed header"),
        pytest.param(b"OPTIONS", b"PATCH", b"content-type , AUTHORIZATION", "", id="in any case and order"),
        pytest.param(b"OPTIONS", b"POST", None, "", id="a method that needs no preflight"),
        pytest.param(b"OPTIONS", b"GET", b"", "", id="an empty list of headers"),
        pytest.param(b"OPTIONS", b"DELETE", None, "this method is not allowed", id="another method"),
        pytest.param(b"OPTIONS", b"patch", None, "this method is not allowed", id="methods have a case"),
        pytest.param(
            b"OPTIONS", b"GET", b"x-secret", "one of these headers is not allowed", id="another header"
        ),
        pytest.param(
            b"OPTIONS",
            b"GET",
            b"authorization,x-secret",
            "one of these headers is not allowed",
            id="one header of two",
        ),
    ],
)
def test_which_preflights_are_allowed(
    method: bytes, asked_method: bytes | None, asked_headers: bytes | None, problem: str
) -> None:
    decision = CorsRules(NARROW).decide(method, APP.encode(), asked_method, asked_headers)
    assert decision.problem == problem
    assert decision.status == (None if method == b"GET" else 403 if problem else 204)
    # A page whose request is rejected may read why: its origin is allowed.
    assert headers(decision.lines)["Access-Control-Allow-Origin"] == APP


@pytest.mark.parametrize(
    ("method", "origin", "asked_method"),
    [
        pytest.param(b"POST", APP.encode(), None, id="the request itself"),
        pytest.param(b"POST", APP.encode(), b"POST", id="the preflight's header on another method"),
        pytest.param(b"OPTIONS", APP.encode(), None, id="OPTIONS that a page sends"),
        pytest.param(b"OPTIONS", None, b"POST", id="OPTIONS without an origin"),
        pytest.param(b"POST", b"https://evil.org", None, id="a page that may not read the response"),
    ],
)
def test_what_is_no_preflight_goes_on(
    method: bytes, origin: bytes | None, asked_method: bytes | None
) -> None:
    rules = CorsRules(EXACT)
    assert rules.decide(method, origin, asked_method, b"authorization") == (None, rules[origin], "")


@pytest.mark.parametrize("asked", [b"x\r\ny: z", b"x y", b"x,,y", b"caf\xc3\xa9", b",", b"x:", b"(x)"])
def test_what_is_no_list_of_names_is_not_copied(asked: bytes) -> None:
    decision = CorsRules(ANY).decide(b"OPTIONS", APP.encode(), b"POST", asked)
    assert decision.status == 403
    assert "Access-Control-Allow-Headers" not in headers(decision.lines)


@given(st.binary(max_size=30), st.binary(max_size=30), st.binary(max_size=30))
def test_no_request_can_add_a_line(origin: bytes, asked_method: bytes, asked_headers: bytes) -> None:
    for cors in (EXACT, PATTERN, ANY, NARROW, COOKIES):
        decision = CorsRules(cors).decide(b"OPTIONS", origin, asked_method, asked_headers)
        for name in headers(decision.lines):
            assert name == "Vary" or name.startswith("Access-Control-")


# The cache


def test_many_origins_do_not_fill_the_memory() -> None:
    rules = CorsRules(EXACT)
    for number in range(5000):
        assert "Access-Control-Allow-Origin" not in headers(rules[b"https://%d.org" % number])
    assert len(rules) <= 1024
    rules[b"https://" + b"x" * 10_000]
    assert max(len(origin or b"") for origin in rules) < 1000
    assert headers(rules[APP.encode()])["Access-Control-Allow-Origin"] == APP
    assert rules.get(APP.encode()) is rules[APP.encode()]


# Reading the options


@pytest.mark.parametrize("cors", [Cors(), EXACT, PATTERN, ANY, NARROW, COOKIES])
def test_json_there_and_back(cors: Cors) -> None:
    assert Cors.from_json(cors.to_json(), "cors") == cors


def test_what_is_left_out_has_its_default() -> None:
    assert Cors.from_json({"origins": [APP]}) == Cors(origins=(APP,))


@pytest.mark.parametrize(
    ("options", "path", "problem"),
    [
        pytest.param([], "cors", "expected an object", id="no object"),
        pytest.param({"origin": [APP]}, "cors.origin", "not known", id="an unknown key"),
        pytest.param({"origins": APP}, "cors.origins", "expected a list", id="one origin without a list"),
        pytest.param({"origins": [APP, 3]}, "cors.origins[1]", "expected", id="a number"),
        pytest.param({"origins": [APP] * 101}, "cors.origins", "up to 100", id="too many"),
        pytest.param({"origins": ["example.com"]}, "cors.origins[0]", "expected", id="no scheme"),
        pytest.param({"origins": [APP + "/"]}, "cors.origins[0]", "no path", id="a trailing slash"),
        pytest.param({"origins": ["https://Example.com"]}, "cors.origins[0]", "lower case", id="upper case"),
        pytest.param({"origins": [APP + ":443"]}, "cors.origins[0]", "default port", id="443 of https"),
        pytest.param({"origins": ["http://[::1]:80"]}, "cors.origins[0]", "default port", id="80 of http"),
        pytest.param({"origins": ["null"]}, "cors.origins[0]", "expected", id="any sandboxed page is null"),
        pytest.param({"origins": ["https://*"]}, "cors.origins[0]", "expected", id="a star without domain"),
        pytest.param({"origins": ["https://a.*.com"]}, "cors.origins[0]", "expected", id="a star inside"),
        pytest.param({"origins": ["https://a\r\nb"]}, "cors.origins[0]", "expected", id="a line end"),
        pytest.param({"methods": ["*"]}, "cors.methods[0]", "a method", id="all methods"),
        pytest.param({"methods": ["get"]}, "cors.methods[0]", "upper case", id="a method in lower case"),
        pytest.param({"headers": ["X-A", "x a"]}, "cors.headers[1]", "name of a header", id="a space"),
        pytest.param({"exposed_headers": ["a\r\nb: c"]}, "cors.exposed_headers[0]", "name", id="a new line"),
        pytest.param({"max_age_s": -1}, "cors.max_age_s", "between 0 and 86400", id="a negative age"),
        pytest.param({"credentials": 1}, "cors.credentials", "true or false", id="no flag"),
        pytest.param(
            {"origins": [APP, "*"], "credentials": True}, "cors.credentials", "origins", id="cookies for all"
        ),
        pytest.param(
            {"origins": [APP], "exposed_headers": ["*"], "credentials": True},
            "cors.credentials",
            "exposed_headers",
            id="all headers with cookies",
        ),
    ],
)
def test_wrong_options_name_their_path(options: Any, path: str, problem: str) -> None:
    with pytest.raises(WireError, match=problem) as wrong:
        Cors.from_json(options, "cors")
    assert wrong.value.path == path


@pytest.mark.parametrize(
    "origin",
    [
        "http://[::1]:8080",
        "https://a_b.example.com",
        "app://localhost",
        "http://127.0.0.1:5173",
        "https://x:80",
    ],
)
def test_origins_that_browsers_send_can_be_allowed(origin: str) -> None:
    cors = Cors.from_json({"origins": [origin]})
    assert headers(CorsRules(cors)[origin.encode()])["Access-Control-Allow-Origin"] == origin
