"""`serve test`: the table, JSON and exit codes, of an engine and of servers that serve badly or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

NAMES = ["models", "chat", "stream", "tools", "latency"]
CALL = {"tool_calls": [{"function": {"name": "get_weather", "arguments": "{}"}}]}


class Server(ThreadingHTTPServer):
    """A server whose behaviour is a word: `broken` (500), `locked` (401 without a key), `chatless`, `silent`, `cut`, `tools`, `web`."""

    daemon_threads = True

    def __init__(self, behaviour: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = behaviour
        self.over = threading.Event()
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def respond(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        behaviour = self.server.behaviour
        if behaviour == "broken":
            self.respond(500, {"error": {"message": "CUDA out of memory"}})
        elif behaviour == "locked" and self.headers["Authorization"] != "Bearer sk-right":
            self.respond(401, {"error": {"message": "no key"}})
        elif behaviour == "web":
            self.respond(200, b"<html>hello</html>", "text/html")
        else:
            self.respond(200, {"data": [{"id": "m"}, {"id": "n"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        behaviour = self.server.behaviour
        if behaviour == "chatless":
            return self.respond(500, {"error": "no slot"})
        if behaviour == "silent":
            self.server.over.wait(60)
            return None
        if body.get("stream"):
            events = b"".join(
                b'data: {"choices": [{"delta": {"content": "%d "}}]}\n\n' % number for number in range(3)
            )
            return self.respond(
                200, events + (b"" if behaviour == "cut" else b"data: [DONE]\n\n"), "text/event-stream"
            )
        if body.get("tools") and behaviour == "notools":
            return self.respond(400, {"error": {"message": "tools need --enable-auto-tool-choice"}})
        message = CALL if body.get("tools") and behaviour == "tools" else {"content": "Hello."}
        return self.respond(200, {"choices": [{"message": message}], "usage": {"completion_tokens": 2}})


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_engine_serves(serve: Any, engine: str) -> None:
    said = serve.ok("test", engine)
    rows = [line.strip().split(maxsplit=2) for line in said.out.splitlines()]
    assert rows[0] == ["CHECK", "RESULT", "FOUND"]
    assert [row[:2] for row in rows[1:]] == [
        ["models", "ok"], ["chat", "ok"], ["stream", "ok"], ["tools", "note"], ["latency", "ok"],
    ]  # fmt: skip
    assert "first token after" in rows[3][2]
    assert "10 small requests: median" in rows[5][2]


def test_json_has_the_figures(serve: Any, engine: str) -> None:
    found = serve.ok("test", f"{engine}/v1/", "-o", "json").json()
    assert (found["endpoint"], found["serves"]) == (f"{engine}/v1/", True)
    assert [check["check"] for check in found["checks"]] == NAMES
    figures = {check["check"]: check["figures"] for check in found["checks"]}
    assert figures["stream"]["first_token_ms"] > 0
    assert figures["stream"]["between_tokens_ms"] >= 0
    assert figures["latency"]["requests"] == 10
    assert 0 < figures["latency"]["median_ms"] <= figures["latency"]["worst_ms"]


FAILURES = {
    "broken": (["failed", "skipped", "skipped", "skipped", "skipped"], "models: HTTP 500: CUDA out of memory"),
    "locked": (["failed", "skipped", "skipped", "skipped", "skipped"], "models: HTTP 401: no key"),
    "web": (["failed", "skipped", "skipped", "skipped", "skipped"], "models: the response is no JSON object"),
    "chatless": (["ok", "failed", "skipped", "skipped", "skipped"], "chat: HTTP 500: no slot"),
    "silent": (["ok", "failed", "skipped", "skipped", "skipped"], "chat: no response within the 1 s of --max-time"),
    "cut": (["ok", "ok", "failed", "note", "ok"], "stream: the stream broke off after 3 events"),
}  # fmt: skip


@pytest.mark.parametrize("server", FAILURES, indirect=True)
def test_what_does_not_serve_ends_with_1(serve: Any, server: Server) -> None:
    results, why = FAILURES[server.behaviour]
    said = serve(
        "test", server.url, "-o", "json", *(["--max-time", "1s"] if server.behaviour == "silent" else [])
    )
    assert said.code == 1, said
    found = said.json()
    assert not found["serves"]
    assert [check["result"] for check in found["checks"]] == results
    assert f"{server.url} does not serve: {why}" in said.err


def test_a_server_that_is_down(serve: Any) -> None:
    said = serve("test", "http://127.0.0.1:1")
    assert said.code == 1
    assert "models   failed" in said.out
    assert "does not serve: models: cannot connect to 127.0.0.1:1" in said.err


@pytest.mark.parametrize(
    ("server", "result", "detail"),
    [("tools", "ok", "calls get_weather"), ("notools", "note", "rejected: HTTP 400: tools need")],
    indirect=["server"],
)
def test_tools(serve: Any, server: Server, result: str, detail: str) -> None:
    found = serve.ok("test", server.url, "-o", "json").json()["checks"]
    assert (found[3]["result"], found[3]["found"][: len(detail)]) == (result, detail)


@pytest.mark.parametrize("server", ["locked"], indirect=True)
def test_the_key_is_of_a_file_or_of_the_environment(serve: Any, server: Server, tmp_path: Any) -> None:
    file = tmp_path / "key"
    file.write_text("sk-right\n")
    assert serve("test", server.url, "--api-key-file", file).code == 0
    assert serve("test", server.url, env={"SKYSERVE_API_KEY": "sk-right"}).code == 0
    assert serve("test", server.url, env={"SKYSERVE_API_KEY": "sk-wrong"}).code == 1


@pytest.mark.parametrize("server", ["tools"], indirect=True)
def test_another_model_is_requested(serve: Any, server: Server) -> None:
    assert serve.ok("test", server.url, "--model", "n")
    assert {body["model"] for body in server.bodies} == {"n"}
    found = serve.ok("test", server.url, "--model", "x", "-o", "json").json()["checks"]
    assert (found[0]["result"], found[0]["found"]) == ("note", "x is not among m, n")


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["http://127.0.0.1:1", "--max-time", "0"], 2, "--max-time must be above 0"),
        (["http://127.0.0.1:1", "--max-time", "soon"], 2, "--max-time"),
        (["http://127.0.0.1:1", "--api-key-file", "nothing"], 2, "--api-key-file: cannot read nothing"),
        (["chat"], 1, "The controller is not running"),
    ],
)
def test_what_makes_no_sense_is_rejected(serve: Any, words: list[str], code: int, complaint: str) -> None:
    said = serve("test", *words)
    assert said.code == code, said
    assert complaint in said.err
    assert "Traceback" not in said.err
