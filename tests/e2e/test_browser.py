"""A web page of another origin calls an endpoint from a real browser: headless Chromium, with its own CORS rules.

The page sends the results of its calls to the server that it came from, so the test needs no driver and no protocol to
look into the browser.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

import pytest

from lb.config import file as config_file
from lb.config.cors import Cors
from lb.config.options import Access, ApiKey
from lb.config.schema import Table, Target

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian the package chromium)"),
]

FLAGS = [
    "--headless",
    "--no-sandbox",  # a sandbox cannot be made by root or in most containers
    "--disable-gpu",
    "--disable-dev-shm-usage",  # /dev/shm of containers is small
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-proxy-server",
    "--enable-logging=stderr",  # the page's console, for the message of a test that fails
]
BROWSER_TIMEOUT_S = 90
KEY = "sk-page"
MODEL = "lake"
TOKENS = 100

PAGE = """<!doctype html>
<meta charset="utf-8">
<link rel="icon" href="data:,">
<script type="module">
const {base, key, model, tokens} = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const authorization = {Authorization: `Bearer ${key}`};

function chat(options) {
  const question = {messages: [{role: "user", content: "What is a lake?"}], ignore_eos: true};
  return fetch(`${base}/v1/chat/completions`, {
    method: "POST",
    headers: {...authorization, "Content-Type": "application/json", "X-Request-Id": "of-the-page"},
    body: JSON.stringify({model, max_tokens: Number(tokens), ...question, ...options}),
  });
}

const calls = {
  async models() {
    const response = await fetch(`${base}/v1/models`, {headers: authorization});
    return {status: response.status, type: response.type, models: (await response.json()).data.map(one => one.id)};
  },
  async whole() {
    const response = await chat({});
    const body = await response.json();
    return {
      status: response.status,
      requestId: response.headers.get("x-request-id"),
      text: body.choices[0].message.content,
      tokens: body.usage.completion_tokens,
    };
  },
  async stream() {
    const response = await chat({stream: true});
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let body = "", reads = 0;
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      body += part.value;
      reads += 1;
    }
    const events = body.trimEnd().split("\\n\\n").map(event => event.replace(/^data: /, ""));
    const last = events.pop();
    const text = events.map(event => JSON.parse(event).choices[0].delta.content).join("");
    return {status: response.status, reads, last, text};
  },
  async error() {
    const response = await chat({model: "another"});
    return {status: response.status, code: (await response.json()).error.code};
  },
};

const results = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    results[name] = await call();
  } catch (error) {
    results[name] = {thrown: error.name};
  }
}
await fetch("/results", {method: "POST", body: JSON.stringify(results)});
</script>
"""

Results = dict[str, dict[str, Any]]


class Site:
    """A web server with the page, on an origin of its own."""

    def __init__(self) -> None:
        results = self._results = queue.Queue[Results]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._respond(200, PAGE.encode())

            def do_POST(self) -> None:
                results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._respond(200, b"")

            def _respond(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_port}"

    def visit(self, base_url: str, profile: Path) -> Results:
        """Open the page in a new browser and wait for what its calls to `base_url` gave."""
        fragment = urlencode({"base": base_url, "key": KEY, "model": MODEL, "tokens": TOKENS})
        log = profile.with_suffix(".log")
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", f"{self.origin}/#{fragment}"]
        with log.open("wb") as stderr:
            browser = subprocess.Popen(command, stdout=stderr, stderr=stderr, start_new_session=True)
        try:
            return self._results.get(timeout=BROWSER_TIMEOUT_S)
        except queue.Empty:
            raise AssertionError(f"the page has sent nothing: {log.read_text()[-4000:]}") from None
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait()


@contextmanager
def site() -> Iterator[Site]:
    one = Site()
    thread = threading.Thread(target=one.server.serve_forever)
    thread.start()
    try:
        yield one
    finally:
        one.server.shutdown()
        thread.join()
        one.server.server_close()


# The functions under test: each starts an endpoint that serves MODEL to pages of `origin` and accepts KEY.


@contextmanager
def engine(origin: str) -> Iterator[str]:
    """`serve engine` on its own port."""
    options = ["--port", "0", "--model", MODEL, "--speed", "10", "--cors", origin]
    command = [sys.executable, "-m", "skyserve_cli", "engine", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stderr.read()
        yield found.group()
    finally:
        process.kill()
        process.communicate()


@contextmanager
def load_balancer(origin: str) -> Iterator[str]:
    """`python -m lb` before an engine that knows nothing of web pages."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    with engine("https://elsewhere.example") as engine_url, TemporaryDirectory() as folder:
        table = Table(
            "chat",
            "1",
            (Target("engine", engine_url, health_path="/health"),),
            access=Access((ApiKey("page", digest),)),
            cors=Cors((origin,)),
        )
        file = Path(folder, "table.json")
        config_file.save(file, table)
        options = ["--service", "chat", "--port", "0", "--table-file", str(file)]
        process = subprocess.Popen([sys.executable, "-m", "lb", *options], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        finally:
            process.kill()
            process.communicate()


Endpoint = Callable[[str], AbstractContextManager[str]]
ENDPOINTS = [
    pytest.param(engine, id="the engine"),
    pytest.param(load_balancer, id="the load balancer"),
]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_page_of_an_allowed_origin_calls_with_its_key(endpoint: Endpoint, tmp_path: Path) -> None:
    with site() as page, endpoint(page.origin) as base_url:
        results = page.visit(base_url, tmp_path / "profile")
    assert results["models"] == {"status": 200, "type": "cors", "models": [MODEL]}
    whole, stream = results["whole"], results["stream"]
    assert whole["text"]
    assert whole == {
        "status": 200,
        "requestId": "of-the-page",
        "text": whole["text"],
        "tokens": TOKENS,
    }
    assert stream["reads"] > 1, "the body came at once"
    assert stream == {"status": 200, "reads": stream["reads"], "last": "[DONE]", "text": whole["text"]}
    assert results["error"] == {"status": 404, "code": "model_not_found"}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_page_of_another_origin_reads_nothing(endpoint: Endpoint, tmp_path: Path) -> None:
    with site() as page, site() as other, endpoint(other.origin) as base_url:
        results = page.visit(base_url, tmp_path / "profile")
    assert results == {name: {"thrown": "TypeError"} for name in ("models", "whole", "stream", "error")}
