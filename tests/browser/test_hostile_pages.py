"""What a browser with an open session does for others: pages of other sites, and text that others have written.

Nothing runs (a mark of the window stays unset, no dialog opens), nothing is changed, and nothing leaves: a listener on loopback, whose
address is in every payload, counts no request. The first test shows that payloads and listener would tell.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, Response, expect

from tests.browser.conftest import Shown, address, goto
from tests.e2e.conftest import Serve, living_in

OTHER_SITE, REBOUND = "evil.test", "rebound.test"


class Listener(ThreadingHTTPServer):
    """Serves `page` at /page, and counts all other requests."""

    daemon_threads = True

    def __init__(self) -> None:
        self.page = ""
        self.hits: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, host: str) -> str:
        return f"http://{host}:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        is_page = self.path == "/page"
        if not is_page and self.path != "/favicon.ico":
            self.server.hits.append(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.server.page.encode() if is_page else b"")

    do_POST = do_GET

    def log_message(self, *_values: object) -> None:
        pass


@dataclass
class Attack:
    """`payload` runs and calls the listener wherever it is taken for HTML."""

    serve: Serve
    listener: Listener
    dialogs: list[str] = field(default_factory=list)

    @property
    def payload(self) -> str:
        return payload(self.listener)

    @property
    def model(self) -> str:
        """What fits into a name that load balancers count."""
        return f"<img src={self.listener.url('127.0.0.1')}/model onerror=window.taken=1>"

    def watch(self, page: Page) -> None:
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))

    def is_harmless_in(self, page: Page) -> None:
        assert page.evaluate("window.taken") is None
        assert (self.listener.hits, self.dialogs) == ([], [])

    def replicas(self) -> list[int]:
        return sorted(one["id"] for one in self.serve.view("hostile")["replicas"])


def payload(listener: Listener) -> str:
    to = f"{listener.url('127.0.0.1')}/taken"
    return (
        f"\"'><img src={to} onerror=window.taken=1><script>window.taken=1;fetch('{to}');alert(1)</script>"
        f"<svg onload=window.taken=1><iframe src={to}></iframe><a href=javascript:window.taken=1>x</a>"
    )


def service_file(name: str, text: str, more: str, run: str) -> str:
    return f"""
name: {name}
service: {{readiness_probe: /health, replicas: 1}}
resources: {{infra: local}}
envs: {{HOSTILE: {json.dumps(text)}}}
{more}
run: |
  printf '%s\\n' "$HOSTILE"
  {run}
"""


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attack]:
    """A page that may act, over a service whose log, model and failures are hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    life = living_in(folder)
    serve = next(life)
    with (serve.home / "config.yaml").open("a") as config:
        config.write("dashboard: {actions: true}\n")
    listener = Listener()
    attack, text = Attack(serve, listener), payload(listener)
    run = f"serve engine --speed 20 --model '{attack.model}' --port $SKYSERVE_REPLICA_PORT"
    (folder / "hostile.yaml").write_text(service_file("hostile", text, "", run))
    serve.ok("up", folder / "hostile.yaml", "-y")
    fails = """setup: printf '%s\\n' "$HOSTILE"; exit 1"""
    (folder / "broken.yaml").write_text(service_file("broken", text, fails, "true"))
    assert serve("up", folder / "broken.yaml", "-y").code == 1
    yield attack
    listener.shutdown()
    listener.server_close()
    next(life, None)


@pytest.fixture
def dashboard(attack: Attack, context: BrowserContext) -> Iterator[Shown]:
    """A tab with a session, in which nothing hostile may show."""
    url = address(attack.serve)
    found = Shown(context.new_page(), url.split("/#")[0])
    found.watch()
    attack.watch(found.page)
    attack.listener.hits.clear()
    goto(found.page, url)
    found.page.get_by_role("link", name="hostile").wait_for()
    yield found
    attack.is_harmless_in(found.page)
    found.page.close()
    assert found.problems == []


@pytest.fixture
def elsewhere(attack: Attack, context: BrowserContext) -> Iterator[Page]:
    """A tab of another page, in the browser that has a session."""
    page = context.new_page()
    attack.watch(page)
    yield page
    page.close()


def test_the_payload_runs_and_calls_where_it_is_html(attack: Attack, elsewhere: Page) -> None:
    attack.listener.page = f"<p>{attack.payload}"
    goto(elsewhere, attack.listener.url(OTHER_SITE) + "/page")
    elsewhere.wait_for_function("window.taken === 1")
    assert attack.dialogs == ["1"]
    assert attack.listener.hits
    attack.listener.hits.clear()
    attack.dialogs.clear()


# --- text that others have written ------------------------------------------------------------------------------


def ask(attack: Attack) -> None:
    """A request of the hostile model, whose path is hostile, too."""
    endpoint = attack.serve.view("hostile")["endpoint"]
    body = {
        "model": attack.model,
        "messages": [{"role": "user", "content": attack.payload}],
        "max_tokens": 4,
    }
    request = urllib.request.Request(
        f"{endpoint}/v1/chat/completions?{quote(attack.payload, safe='<>=/:;()')}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": "<img src=x onerror=window.taken=1>"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        response.read()


def test_the_log_of_a_replica_is_text(attack: Attack, dashboard: Shown) -> None:
    (number,) = attack.replicas()
    dashboard.go(f"/s/hostile/r/{number}")
    expect(dashboard.page.locator("#log")).to_contain_text(attack.payload)
    attack.is_harmless_in(dashboard.page)


def test_messages_of_replicas_and_events_are_text(attack: Attack, dashboard: Shown) -> None:
    mark = "<script>window.taken=1"
    for path in ("/", "/s/broken", "/events"):
        dashboard.go(path)
        expect(dashboard.page.get_by_text(mark).first).to_be_visible()
        attack.is_harmless_in(dashboard.page)
    assert mark in attack.serve.ok("events", "broken").out


def test_names_of_models_and_paths_of_requests_are_text(attack: Attack, dashboard: Shown) -> None:
    ask(attack)
    attack.serve.eventually(lambda: attack.serve.ok("usage", "hostile", "-o", "json").json()["rows"])
    dashboard.go("/s/hostile")
    expect(dashboard.page.get_by_role("cell", name=attack.model).first).to_be_visible()
    attack.is_harmless_in(dashboard.page)
    dashboard.go("/s/hostile/explain")
    for each in dashboard.page.locator("summary", has_text="/v1/chat/completions").all():
        each.click()
    attack.is_harmless_in(dashboard.page)


def test_an_address_of_a_page_is_text(attack: Attack, dashboard: Shown) -> None:
    for path in ("/s/", "/s/hostile/r/", "/"):
        dashboard.go(path + quote(attack.payload, safe=""))
        dashboard.page.locator("h1").wait_for()
        attack.is_harmless_in(dashboard.page)
    dashboard.problems[:] = [each for each in dashboard.problems if "404" not in each]


def test_no_service_has_a_name_that_is_html(attack: Attack, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("service: {}\nresources: {infra: local}\nrun: x\n")
    said = attack.serve("up", file, "-n", "<img src=x>", "-y")
    assert said.code == 2
    assert "name" in said.err


# --- pages of others --------------------------------------------------------------------------------------------

#: Every way in which a page can send a request to another: of each the result is what it could read.
SEND = """async ([base, paths]) => {
  const seen = [];
  const attempt = async (send) => { try { seen.push(await send()); } catch (error) { seen.push("blocked"); } };
  for (const path of paths) {
    const body = JSON.stringify({ messages: [], purge: true, code: "x" });
    for (const mode of ["cors", "no-cors"]) {
      const options = { mode, credentials: "include" };
      await attempt(async () => (await fetch(base + path, options)).text());
      await attempt(async () => (await fetch(base + path, { ...options, method: "POST", body })).text());
    }
    const headers = { "Content-Type": "application/json", "X-Skyserve-Action": "x" };
    await attempt(async () => (await fetch(base + path, { method: "POST", body, headers, credentials: "include" })).text());
    navigator.sendBeacon(base + path, body);
    const frame = document.createElement("iframe");
    frame.name = "sent" + seen.length;
    document.body.append(frame);
    for (const enctype of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
      const form = Object.assign(document.createElement("form"), { method: "POST", action: base + path, target: frame.name, enctype });
      form.append(Object.assign(document.createElement("input"), { name: '{"purge":true,"x":"', value: '"}' }));
      document.body.append(form);
      form.submit();
      await new Promise((done) => frame.addEventListener("load", done, { once: true }));
    }
  }
  return [...new Set(seen)].sort();
}"""


@pytest.mark.parametrize("host", [OTHER_SITE, "127.0.0.1"], ids=["another site", "another port of this host"])
def test_a_page_of_others_reads_and_changes_nothing(
    attack: Attack, dashboard: Shown, elsewhere: Page, host: str
) -> None:
    """Another port of the same host is the same site, so the browser sends the cookie of the session."""
    before = attack.replicas()
    attack.listener.page = "<p>a page of others"
    goto(elsewhere, attack.listener.url(host) + "/page")
    refused: set[tuple[str, int]] = set()
    sent = urlsplit(dashboard.base).netloc

    def see(response: Response) -> None:
        found = urlsplit(response.url)
        if response.request.method == "POST" and found.netloc == sent:
            refused.add((found.path, response.status))

    elsewhere.on("response", see)
    number = before[0]
    paths = [
        "/session",
        "/v1/services/hostile/chat",
        f"/v1/services/hostile/replicas/{number}/down",
        "/v1/services/hostile/down",
        "/v1/services",
    ]
    assert elsewhere.evaluate(SEND, [dashboard.base, paths]) in (["", "blocked"], ["blocked"])
    for _ in range(100):  # the browser reports a response some time after the page has it
        if len(refused) >= len(paths):
            break
        elsewhere.wait_for_timeout(100)
    assert refused == {(path, 403) for path in paths}, (
        "those of forms; the browser hides the responses to scripts"
    )
    view = attack.serve.view("hostile")
    assert (view["status"], attack.replicas()) == ("READY", before)


def test_the_page_itself_may_act(attack: Attack, dashboard: Shown) -> None:
    """So what the others were refused is what they are, not what they requested."""
    (number,) = attack.replicas()
    act = """async (path) => {
      const { token } = await (await fetch("/session")).json();
      const headers = { "Content-Type": "application/json", "X-Skyserve-Action": token };
      return (await fetch(path, { method: "POST", body: "{}", headers })).status;
    }"""
    assert dashboard.page.evaluate(act, f"/v1/services/hostile/replicas/{number}/down") == 200
    attack.serve.eventually(
        lambda: number not in attack.replicas() and attack.serve.view("hostile")["ready"] == 1
    )


def test_the_page_is_in_no_frame_and_has_no_opener(
    attack: Attack, dashboard: Shown, elsewhere: Page, context: BrowserContext
) -> None:
    attack.listener.page = f'<iframe src="{dashboard.base}/"></iframe>'
    for host in (OTHER_SITE, "127.0.0.1"):
        goto(elsewhere, attack.listener.url(host) + "/page")
        (frame,) = elsewhere.frames[1:]
        assert frame.locator("#main").count() == 0, frame.url
    with context.expect_page() as opened:
        elsewhere.evaluate("url => { window.other = window.open(url); }", dashboard.base)
    opened.value.locator("#main").wait_for()
    assert opened.value.evaluate("window.opener") is None
    assert elsewhere.evaluate("window.other.closed") is True
    opened.value.close()


def test_a_name_of_others_that_leads_here_is_not_served(
    attack: Attack, dashboard: Shown, elsewhere: Page
) -> None:
    """DNS rebinding: to the browser everything here is then of that other site, and of one origin."""
    port = urlsplit(dashboard.base).port
    base = f"http://{REBOUND}:{port}"
    for path in ("/", "/app.js", "/session", "/v1/services", "/v1/stream"):
        response = goto(elsewhere, base + path)
        assert response is not None
        assert response.status == 421
        assert "not served under that name" in response.text()
    code = address(attack.serve).rpartition("#")[2]
    enter = """async (code) => {
      const options = { method: "POST", body: JSON.stringify({ code }), headers: { "Content-Type": "application/json" } };
      return (await fetch("/session", options)).status;
    }"""
    assert elsewhere.evaluate(enter, code) == 421
    assert [one for one in context_cookies(elsewhere) if one["domain"].endswith(".test")] == []


def context_cookies(page: Page) -> list[Any]:
    return [*page.context.cookies()]
