"""The dashboard in a browser: what a user sees, and that it is seen without a reload."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Route, expect

from skyserve_cli.controller.api.client import ControllerClient
from skyserve_cli.controller.dashboard.change_stream import POLL_S
from skyserve_cli.controller.dashboard.endpoint import FOLDER
from skyserve_cli.home import Home
from tests.browser.conftest import Shown, address, goto
from tests.clouds.schedules import only_long
from tests.e2e.test_cli_series import call

PATHS = ["/", "/s/small", "/s/small/r/1", "/s/small/explain", "/zones", "/events", "/doctor"]


def client(serve: Any) -> ControllerClient:
    return ControllerClient(Home.from_environment(serve.environment))


def controller_of(serve: Any) -> psutil.Process:
    return psutil.Process(json.loads((serve.home / "controller.json").read_text())["pid"])


def test_a_code_in_the_address_is_used_once_and_leaves_the_address(up: Any, context: BrowserContext) -> None:
    url = address(up)
    page = context.new_page()
    page.on("requestfailed", lambda request: print(request.url, request.failure))  # shown if this fails
    page.on("pageerror", lambda error: print("error:", error))
    goto(page, url)
    page.get_by_role("link", name="small").wait_for()
    assert "#" not in page.url
    context.clear_cookies()
    goto(page, "about:blank")
    goto(page, url)
    expect(page.get_by_role("heading", level=1)).to_have_text("No session")
    page.close()


def test_a_script_that_could_not_be_loaded_is_loaded_again(up: Any, context: BrowserContext) -> None:
    page = context.new_page()
    lost: list[str] = []

    def lose_once(route: Route) -> None:
        if lost:
            route.continue_()
        else:
            lost.append(route.request.url)
            route.abort()

    page.route("**/pages/zones.js", lose_once)
    goto(page, address(up))
    page.get_by_role("link", name="small").wait_for()
    assert len(lost) == 1
    assert "#" not in page.url
    page.close()


#: Records when more preemptions than `many` are drawn first, in UNIX seconds.
WATCH_MARKS = """many => {
  window.sameDocument = true;
  const look = () => {
    const mark = document.querySelector("svg.timeline path.preempted");
    if (mark && Number(mark.dataset.preemptions) > many) { window.drawnAt ??= Date.now() / 1000; observer.disconnect(); }
  };
  const observer = new MutationObserver(look);
  observer.observe(document.getElementById("main"), { subtree: true, childList: true });
}"""


def preempted(serve: Any) -> list[dict[str, Any]]:
    return [each for each in client(serve).history("small")["replicas"] if each["end_reason"] == "PREEMPTED"]


def test_a_change_waits_less_than_two_seconds_for_the_page() -> None:
    """The longest waits between a commit and a request of the page: of the stream, and of a page that has just refreshed."""
    pause = re.search(r"LEAST_PAUSE_MS = (\d+);", (FOLDER / "app.js").read_text())
    assert pause is not None
    assert POLL_S + int(pause[1]) / 1000 < 2.0


def test_a_preemption_appears_without_a_reload(up: Any, shown: Shown) -> None:
    shown.go("/s/small")
    shown.page.locator("svg.timeline path.f-READY").first.wait_for()
    before = len(preempted(up))
    requested: list[str] = []
    shown.page.on("request", lambda request: requested.append(request.url))
    shown.page.evaluate(WATCH_MARKS, before)
    victim = next(each["id"] for each in up.view("small")["replicas"] if each["state"] == "READY")
    up.ok("local", "preempt", f"small/{victim}")
    shown.page.locator(f'svg.timeline path.preempted[data-preemptions="{before + 1}"]').wait_for(
        state="attached"
    )
    ended_at = next(each["ended_at"] for each in preempted(up) if each["id"] == victim)
    print(f"drawn {shown.page.evaluate('window.drawnAt') - ended_at:.2f} s after the controller stored it")
    assert shown.page.evaluate("window.sameDocument") is True
    assert not [url for url in requested if urlsplit(url).path.endswith((".js", ".css", ".html"))]
    up.eventually(lambda: up.view("small")["ready"] == 2)
    expect(shown.page.get_by_text("2 of 2")).to_be_visible()


def test_the_log_follows_and_stays_text(up: Any, shown: Shown) -> None:
    one = next(each["id"] for each in up.view("small")["replicas"] if each["state"] == "READY")
    shown.go(f"/s/small/r/{one}")
    log = shown.page.locator("#log")
    expect(log).to_contain_text("<script>document.title='taken'</script> begins")
    before = log.inner_text()
    call(up.view("small")["endpoint"], 3)
    size = len(client(up).log(f"replica/small/{one}")[0])
    assert len(before.encode()) <= size
    expect(shown.page).to_have_title(re.compile("Replica"))


def test_the_last_requests_are_explained(up: Any, shown: Shown) -> None:
    call(up.view("small")["endpoint"], 2)
    shown.go("/s/small/explain")
    first = shown.page.locator("summary", has_text="/v1/chat/completions").first
    first.click()
    expect(shown.page.get_by_role("cell", name="chose", exact=True).first).to_be_visible()


def test_a_chat_streams_and_says_which_replica_answered(up: Any, shown: Shown) -> None:
    shown.go("/s/small")
    shown.page.get_by_label("Message", exact=True).fill("<b>hello</b>")
    shown.page.get_by_role("button", name="Send").click()
    said = shown.page.get_by_role("log", name="Chat")
    expect(said).to_contain_text(re.compile(r"replica \d+; first token after \d"))
    question, reply, _ = (part.text_content() for part in said.locator("p").all())
    assert question == "<b>hello</b>"
    assert reply
    up.ok(
        "local",
        "preempt",
        f"small/{next(r['id'] for r in up.view('small')['replicas'] if r['state'] == 'READY')}",
    )
    up.eventually(lambda: up.view("small")["ready"] == 2)
    expect(said.locator("p")).to_have_count(3)  # the page was drawn again, and what was said is still there


#: One replica at a pace that leaves time to preempt it within a response.
SLOW = """
name: slow
service: {readiness_probe: /health, replicas: 1}
resources: {infra: local, use_spot: true}
run: serve engine --profile l4-8b --speed 0.2 --port $SKYSERVE_REPLICA_PORT
"""


def test_a_chat_goes_on_when_its_replica_is_preempted(up: Any, shown: Shown, tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text(SLOW)
    up.ok("up", tmp_path / "slow.yaml", "-y")
    first = next(r["id"] for r in up.view("slow")["replicas"] if r["state"] == "READY")
    shown.go("/s/slow")
    shown.page.get_by_label("Message", exact=True).fill("Tell me a saga of a machine that did not last.")
    shown.page.get_by_role("button", name="Send").click()
    said = shown.page.get_by_role("log", name="Chat")
    expect(said.locator("p").nth(1)).not_to_be_empty()
    up.ok("local", "preempt", f"slow/{first}")
    expect(said).to_contain_text(
        re.compile(rf"replica {first}, then \d+; first token after"), timeout=180_000
    )
    shown.go("/")
    shown.page.get_by_role("link", name="slow").wait_for()
    up.ok("down", "slow", "--purge", "-y")
    expect(shown.page.get_by_role("link", name="slow")).to_have_count(0)


@pytest.mark.parametrize(
    ("path", "name", "width", "height", "scheme"),
    [
        ("/", "services", 1100, 300, "light"),
        ("/s/small", "service", 1100, 960, "light"),
        ("/s/small", "service-dark", 1100, 960, "dark"),
        ("/s/small", "service-phone", 390, 844, "light"),
    ],
)
def test_pictures_for_the_documentation(
    up: Any, shown: Shown, tmp_path: Path, path: str, name: str, width: int, height: int, scheme: Any
) -> None:
    """Those of docs/pictures are these: $SKYSERVE_PICTURES=docs/pictures writes them there."""
    folder = Path(os.environ.get("SKYSERVE_PICTURES", tmp_path))
    call(up.view("small")["endpoint"], 20)
    shown.page.emulate_media(color_scheme=scheme)
    shown.page.set_viewport_size({"width": width, "height": height})
    shown.go(path)
    expect(shown.page.get_by_text("2 of 2").first).to_be_visible()
    file = folder / f"dashboard-{name}.png"
    shown.page.screenshot(path=file, animations="disabled")
    assert file.stat().st_size > 10_000
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width


def test_no_two_marks_of_an_axis_read_the_same(shown: Shown) -> None:
    shown.go("/")
    found = shown.page.evaluate(
        """async () => {
            const { different, usd, percent, seconds } = await import("/format.js");
            return [different([0, 0.5, 1], usd), different([0, 0.005, 0.01, 0.015], usd), different([0.99, 0.9902], percent), different([1, 1], seconds)];
        }"""
    )
    assert found == [
        ["$0.00", "$0.50", "$1.00"],
        ["$0.000", "$0.005", "$0.010", "$0.015"],
        ["99.00%", "99.02%"],
        ["1.00 s", "1.00 s"],
    ]


def test_figures_are_those_of_serve_report(up: Any, shown: Shown) -> None:
    """The page is drawn between two reports, and everything is ready: what it shows lies between theirs."""

    def told() -> dict[str, float]:
        found: dict[str, float] = up.ok("report", "small", "--since", "2h", "-o", "json").json()
        return found

    up.eventually(lambda: up.view("small")["ready"] == 2 and up("report", "small", "-o", "json").code == 0)
    before = told()
    shown.go("/s/small")
    shown.page.locator("[data-figure=usd]").wait_for()
    names = ("usd", "usd_on_demand", "availability")
    texts = {name: shown.page.locator(f"[data-figure={name}]").inner_text() for name in names}
    after = told()
    for name, slack in (("usd", 0.01), ("usd_on_demand", 0.01)):
        assert before[name] - slack <= float(texts[name].strip("$")) <= after[name] + slack
    share = float(texts["availability"].strip("%"))
    assert 100 * before["availability"] - 0.01 <= share <= 100 * after["availability"] + 0.01


def test_hostile_messages_stay_text(up: Any, shown: Shown) -> None:
    """The API's response is replaced on its way to the page: names and messages that are scripts, and 10 KB long."""
    hostile = (
        "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>" + "x" * 10_000
    )

    def swap(route: Any) -> None:
        asked = {k: v for k, v in route.request.headers.items() if k != "if-none-match"}
        response = route.fetch(headers=asked)
        body = response.json()
        body["notes"] = hostile
        body["replicas"][0]["zone"] = hostile
        route.fulfill(response=response, json=body)

    shown.page.route(re.compile(r"/v1/services/small$"), swap)
    shown.go("/s/small")
    expect(shown.page.locator("#notes")).to_contain_text("<script>")
    assert shown.page.locator("main img, main script").count() == 0
    assert "taken" not in shown.page.title()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=only_long)])
@pytest.mark.parametrize("path", PATHS)
def test_pages_are_accessible_and_fit_a_phone(shown: Shown, path: str, scheme: Any) -> None:
    shown.page.emulate_media(color_scheme=scheme)
    shown.page.set_viewport_size({"width": 360, "height": 740})
    shown.go(path)
    shown.page.get_by_text("live", exact=True).wait_for()
    shown.page.locator("main table, main details, main p").first.wait_for()
    found = Axe().run(shown.page).response["violations"]
    serious = [
        (v["id"], [n["html"][:200] for n in v["nodes"]])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert serious == []
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_keyboard_is_enough(shown: Shown) -> None:
    shown.go("/")
    shown.page.get_by_role("link", name="small").wait_for()
    for _ in range(12):
        shown.page.keyboard.press("Tab")
        if shown.page.evaluate("document.activeElement.textContent") == "small":
            break
    shown.page.keyboard.press("Enter")
    expect(shown.page.get_by_role("heading", level=1)).to_have_text("small")
    shown.page.go_back()
    expect(shown.page.get_by_role("heading", level=1)).to_have_text("Services")


def test_a_thousand_replicas_are_drawn_in_a_second(shown: Shown) -> None:
    """10,000 changes; the median of five draws, by the browser's own clock."""
    took = shown.page.evaluate(
        """async () => {
          const { timeline } = await import("/timeline.js");
          const replicas = [], changes = [];
          for (let id = 1; id <= 1000; id++) {
            const created_at = 1000 + id * 50, ended_at = id % 3 ? created_at + 9000 : null;
            replicas.push({ id, cloud: "local", zone: `z${id % 9}`, state: "READY", capacity_type: id % 5 ? "spot" : "on_demand",
              created_at, launched_at: created_at, ended_at, end_reason: ended_at ? "PREEMPTED" : null });
            for (let n = 0; n < 10; n++) changes.push({ at: created_at + n * 200, replica_id: id, state: n % 2 ? "READY" : "NOT_READY" });
          }
          const history = { replicas, changes };
          const times = [];
          for (let n = 0; n < 5; n++) {
            const begin = performance.now();
            const drawn = timeline(history, 1000, 70000);
            document.getElementById("main").replaceChildren(drawn);
            drawn.getBoundingClientRect();
            times.push(performance.now() - begin);
          }
          return times.sort((a, b) => a - b)[2];
        }"""
    )
    print(f"drawn in {took:.0f} ms")
    assert shown.page.locator("svg.timeline path").count() > 9


def test_regions_and_the_slo_are_drawn_from_the_view_of_a_service(shown: Shown) -> None:
    shown.page.evaluate(
        """async () => {
          const { regions, slo } = await import("/regions.js");
          const peer = { forwarded_out: 3, forwarded_in: 4, trouble: "", rtt_ms: 12.34 };
          const agent = { cloud: "local", state: "READY", alive: true, synced: true, ready_targets: 2, message: "<script>x</script>" };
          const load_balancers = [
            { ...agent, id: 1, region: "eu", owned: ["eu"], peers: [{ ...peer, id: "2", region: "us" }] },
            { ...agent, id: 2, region: "us", owned: null, peers: [] },
          ];
          const kept = { attainment_asked: 0.99, ttft_ms: 2000, tpot_ms: null, attainment: 0.985, budget_left: -0.5, headroom: 1.2,
            cold_start_s: 240, would_want: null, requests_per_min: 60, forecast_per_min: 90, forecast_most_per_min: null, capacity_qps: 2 };
          const parts = [regions({ load_balancers }), slo({ slo: kept, ready: 2 })];
          document.getElementById("main").replaceChildren(...parts.flat().filter(Boolean));
        }"""
    )
    main = shown.page.locator("main")
    expect(main.get_by_role("img", name="eu and us: 12.3 ms")).to_be_visible()
    expect(main.get_by_text("<script>x</script>")).to_have_count(2)
    expect(main.get_by_text("99.00% of requests: first token within 2000 ms")).to_be_visible()
    for text in ("98.50%", "-50%", "4 min", "60/min", "90/min", "240/min"):
        expect(main.get_by_text(text, exact=True)).to_be_visible()
    assert [
        v["id"]
        for v in Axe().run(shown.page).response["violations"]
        if v["impact"] in ("serious", "critical")
    ] == []


def test_the_page_goes_on_after_the_controller_was_killed(up: Any, shown: Shown) -> None:
    shown.go("/s/small")
    shown.page.get_by_text("live", exact=True).wait_for()
    controller_of(up).kill()
    expect(shown.page.locator("#link")).to_contain_text("does not respond")
    expect(shown.page.locator("#link")).to_have_text("live")
    shown.page.reload()
    expect(shown.page.get_by_text("2 of 2")).to_be_visible()
