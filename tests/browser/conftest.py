"""A service on the local cloud, and its page in Debian's Chromium, which playwright drives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, Error, Page, Response, expect, sync_playwright

from tests.e2e.conftest import Serve, living_in

#: Nothing here measures time: a busy machine only takes longer.
PATIENCE_MS = 60_000
CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",  # a sandbox cannot be made by root or in most containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP *.test 127.0.0.1",  # names of other sites, which lead here
]

#: Chromium ends every connection, those on loopback too, when an interface appears. Tests beside these ones make some.
NETWORK_CHANGED = "ERR_NETWORK_CHANGED"
#: The other two: a connection to a controller that was killed.
NOT_OF_THE_PAGE = ("ERR_CONNECTION", "ERR_INCOMPLETE", NETWORK_CHANGED)

FILE = """
name: small
service: {readiness_probe: /health, replicas: 2}
resources: {infra: local, use_spot: true}
run: |
  echo "<script>document.title='taken'</script> begins"
  serve engine --speed 20 --port $SKYSERVE_REPLICA_PORT
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.nodeid.startswith("tests/browser/"):
            continue
        item.add_marker(pytest.mark.long)
        if CHROMIUM is None:
            item.add_marker(pytest.mark.skip(reason="needs Chromium (on Debian the package chromium)"))


@dataclass
class Shown:
    """A page, and everything that a good page never has."""

    page: Page
    base: str
    problems: list[str] = field(default_factory=list)

    def watch(self) -> None:
        here = urlsplit(self.base).netloc
        self.page.on("console", lambda m: self._told(m.type, m.text))
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on(
            "request",
            lambda r: (
                None if urlsplit(r.url).netloc in (here, "") else self.problems.append(f"request: {r.url}")
            ),
        )

    def _told(self, kind: str, text: str) -> None:
        """A browser reports on its console what violates the policy, and what is no problem of the page."""
        if kind in ("error", "warning") and not any(each in text for each in NOT_OF_THE_PAGE):
            self.problems.append(f"{kind}: {text}")

    def go(self, path: str) -> None:
        goto(self.page, self.base + path)


def goto(page: Page, url: str) -> Response | None:
    """As `Page.goto`; once more if another test has just changed the machine's network."""
    try:
        return page.goto(url)
    except Error as error:
        if NETWORK_CHANGED not in error.message:
            raise
        return page.goto(url)


def address(serve: Any) -> str:
    """Of the page, with a new code."""
    return str(json.loads(serve.ok("dashboard", "-o", "json").out)["url"])


@pytest.fixture(scope="module")  # it runs an event loop, which must be gone before other modules
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    with sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("profile")), executable_path=CHROMIUM, args=FLAGS, bypass_csp=False
        )
        context.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        yield context
        context.close()


@pytest.fixture(scope="module")  # it runs an event loop, which must be gone before other modules
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """The service is up, for all tests here."""
    folder = tmp_path_factory.mktemp("serve")
    life = living_in(folder)
    serve = next(life)
    (folder / "service.yaml").write_text(FILE)
    serve.ok("up", folder / "service.yaml", "-y")
    yield serve
    next(life, None)


@pytest.fixture
def shown(up: Serve, context: BrowserContext) -> Iterator[Shown]:
    """A new tab with a session."""
    url = address(up)
    found = Shown(context.new_page(), url.split("/#")[0])
    found.watch()
    goto(found.page, url)
    found.page.get_by_role("link", name="small").wait_for()
    yield found
    found.page.close()
    assert found.problems == []
