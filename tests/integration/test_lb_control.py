"""The admin port over loopback, before an agent without a data port: the real table, metrics, stories and keys."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from benchmarks.table_audit import audit
from lb.agent.admin_api import MAX_PUSH_BYTES, admin_app
from lb.config.key_limits import KeyLimits
from lb.config.options import ApiKey
from lb.config.schema import Readiness, Stats, Table, Target
from lb.config.usage import MOST_ROWS, KeyTotal, UsageReport, UsageTotals
from lb.core.api_keys import Admission, ApiKeyStore, Usage
from lb.core.target_choice import choose
from lb.core.targets import Health, TargetTable
from lb.observe.explain import Explanation, Explanations
from lb.observe.metrics import Metrics
from policies.routing.base import RequestView
from policies.routing.registry import make_policy
from tests.kit.api_keys import api_key

TOKEN = "a-token-for-tests"
REQUEST = RequestView("r", "POST", "/")
A = Target("a", "http://127.0.0.1:1", health_path="/health")
LATER = Target("b", "http://127.0.0.1:2", state=Readiness.DRAINING, drain_deadline_s=3600.0)


class Desk:
    """What the admin port administers, as an agent composes it."""

    def __init__(self, table: Table) -> None:
        self.clock = asyncio.get_running_loop().time
        self.targets = TargetTable(table, self.clock())
        self.explanations = Explanations()
        self.metrics = Metrics(table.service, "eu-1")
        self.metrics.use_table(table)
        self.keyring = ApiKeyStore(table.access, self.clock())
        self.disk_full = False
        self.draining = False
        self.wants_totals = False
        self.totals_taken: list[UsageTotals] = []

    @property
    def table(self) -> Table:
        return self.targets.table

    def apply(self, table: Table) -> object:
        make_policy(table.policy)
        if self.disk_full:
            raise OSError(28, "No space left on device")
        self.keyring.apply(table.access, self.clock())
        return self.targets.apply(table, self.clock())

    def ready(self) -> bool:
        good = (health is Health.GOOD for _, health, _ in self.targets.rows(self.clock()))
        return not self.draining and any(good)

    def drain(self, *, on: bool) -> None:
        self.draining = on

    def stats(self, window_s: float) -> Stats:
        return Stats("chat", "eu-1", self.table.revision, 1.0, window_s, 0, self.targets.in_flight, 0, 0)

    def exposition(self) -> bytes:
        return self.metrics.expose(self.targets, 0, self.clock())

    async def explained(self, explanation: Explanation) -> dict[str, Any]:
        return explanation.to_json()

    def usage(self) -> Iterable[Usage]:
        return self.keyring.usage(self.clock())

    def used_since(self, source: str, mark: int) -> UsageReport:
        return UsageReport("s1", mark, False, ())

    def counted(self, totals: UsageTotals) -> None:
        self.totals_taken.append(totals)


class Admin:
    """A client of the port."""

    def __init__(self, desk: Desk, url: str, http: aiohttp.ClientSession) -> None:
        self.desk = desk
        self._url = url
        self._http = http

    async def request(
        self, method: str, path: str, body: object = None, status: int = 200, token: str | None = TOKEN
    ) -> Any:
        """The response's JSON or text; fails unless it has the status."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        url = URL(self._url + path, encoded=True)
        async with self._http.request(method, url, data=data, headers=headers) as response:
            text = await response.text()
            assert response.status == status, (method, path, response.status, text)
            return json.loads(text) if response.content_type == "application/json" else text

    async def send(self, method: str, path: str, data: AsyncIterator[bytes]) -> int:
        """The status of a response to a body that comes in pieces."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with self._http.request(method, self._url + path, data=data, headers=headers) as response:
            return response.status

    async def refusal(self, method: str, path: str, body: object, status: int) -> str:
        """The message of a refusal; fails unless the table stays what it was."""
        before = self.desk.table
        answer = await self.request(method, path, body, status)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert self.desk.table is before
        return str(answer["error"]["message"])


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    desk = Desk(Table("chat", "1", (A, LATER)))
    runner = web.AppRunner(admin_app(desk, TOKEN), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as http:
        yield Admin(desk, f"http://127.0.0.1:{port}", http)
    assert audit(desk.targets) == []
    await runner.cleanup()


def test_a_port_without_a_token_is_not_opened() -> None:
    with pytest.raises(ValueError, match="token"):
        admin_app(None, "")  # type: ignore[arg-type]


PATHS = [
    ("GET", "/-/live"), ("GET", "/-/ready"), ("GET", "/-/targets"), ("PUT", "/-/targets"), ("GET", "/-/options"),
    ("PATCH", "/-/options"), ("POST", "/-/drain"), ("POST", "/-/undrain"), ("GET", "/-/stats"), ("GET", "/-/metrics"),
    ("GET", "/-/demand"), ("GET", "/-/totals"), ("GET", "/-/usage"), ("POST", "/-/usage/totals"), ("POST", "/-/usage/totals"), ("GET", "/-/regions"),
    ("GET", "/-/keys"), ("GET", "/-/explain"), ("GET", "/-/explain/x"), ("GET", "/workers"), ("POST", "/workers"),
    ("GET", "/workers/a"), ("PUT", "/workers/a"), ("PATCH", "/workers/a"), ("DELETE", "/workers/a"),
    ("POST", "/add_worker?url=http://c"), ("POST", "/remove_worker?url=http://127.0.0.1:1"), ("GET", "/list_workers"),
    ("GET", "/nothing"),
]  # fmt: skip


def test_every_route_is_among_the_paths_that_are_tested_for_the_token() -> None:
    async def routes() -> set[tuple[str, str]]:
        app = admin_app(Desk(Table("chat", "1")), TOKEN)
        return {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}

    tested = {(method, path.split("?")[0].replace("explain/x", "explain/{request_id}").replace("workers/a", "workers/{id}"))
              for method, path in PATHS}  # fmt: skip
    assert {one for one in asyncio.run(routes()) if one[0] != "HEAD"} == tested - {("GET", "/nothing")}


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_every_path_needs_the_token(admin: Admin, method: str, path: str) -> None:
    before = admin.desk.table
    for token in (None, "", "wrong", TOKEN + "é", TOKEN[:-1]):
        answer = await admin.request(method, path, b"{}", 401, token)
        assert answer["error"]["code"] == "unauthorized"
    assert admin.desk.table is before


# --- workers, as SGLang's gateway has them


async def test_a_worker_is_added_seen_changed_and_removed(admin: Admin) -> None:
    added = await admin.request("POST", "/workers", {"url": "http://127.0.0.1:9", "zone": "z"}, 202)
    worker_id = added["worker_id"]
    assert (added["status"], added["url"]) == ("accepted", "http://127.0.0.1:9")
    seen = await admin.request("GET", added["location"])
    assert (seen["id"], seen["zone"], seen["is_healthy"], seen["load"]) == (worker_id, "z", True, 0)
    await admin.request("PATCH", added["location"], {"capacity": 2.0}, 202)
    seen = await admin.request("GET", added["location"])
    assert (seen["capacity"], seen["zone"]) == (2.0, "z")
    await admin.request("PUT", added["location"], {"url": "http://127.0.0.1:9"}, 202)
    seen = await admin.request("GET", added["location"])
    assert (seen["capacity"], seen["zone"]) == (1.0, "")
    await admin.request("DELETE", added["location"], status=202)
    await admin.request("GET", added["location"], status=404)
    assert [target.id for target in admin.desk.table.targets] == ["a", "b"]


async def test_the_list_tells_load_and_health(admin: Admin) -> None:
    booking = admin.desk.targets.book(REQUEST, "a", admin.desk.clock())
    listed = await admin.request("GET", "/workers")
    assert [(one["id"], one["load"], one["is_healthy"]) for one in listed["workers"]] == [
        ("a", 1, True),
        ("b", 0, False),
    ]
    assert listed["total"] == 2
    assert (listed["stats"]["healthy_workers"], listed["stats"]["total_load"]) == (1, 1)
    admin.desk.targets.release(booking, admin.desk.clock())


async def test_an_id_that_is_a_url_can_be_named_in_a_path(admin: Admin) -> None:
    await admin.request("POST", "/add_worker?url=http://127.0.0.1:9/base")
    await admin.request("DELETE", "/workers/http%3A%2F%2F127.0.0.1%3A9%2Fbase", status=202)
    assert (await admin.request("GET", "/list_workers"))["urls"] == [A.url, LATER.url]


async def test_the_older_worker_api_answers_texts(admin: Admin) -> None:
    assert "Successfully added" in await admin.request("POST", "/add_worker?url=http://127.0.0.1:9")
    assert "already exists" in await admin.request("POST", "/add_worker?url=http://127.0.0.1:9", status=400)
    assert "must start" in await admin.request("POST", "/add_worker?url=localhost", status=400)
    assert "must start" in await admin.request("POST", "/add_worker", status=400)
    assert "Successfully removed" in await admin.request("POST", "/remove_worker?url=http://127.0.0.1:9")
    assert "not found" in await admin.request("POST", "/remove_worker?url=http://127.0.0.1:9", status=404)


# --- options, drains


async def test_options_change_at_once_and_only_those_given(admin: Admin) -> None:
    before = await admin.request("GET", "/-/options")
    after = await admin.request("PATCH", "/-/options", {"policy": "round_robin", "limits": {"hold_s": 3}})
    assert after == {**before, "policy": "round_robin", "limits": {**before["limits"], "hold_s": 3.0}}
    assert admin.desk.table.policy == "round_robin"
    assert admin.desk.table.targets[0] == A


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "/-/options", {"limits": {"hold_s": 3}}),
        ("PATCH", "/workers/a", {"zone": "z"}),
        ("PUT", "/workers/a", {"url": A.url}),
        ("POST", "/workers", {"url": "http://127.0.0.1:9"}),
    ],
)
async def test_an_edit_whose_body_comes_slowly_does_not_undo_another(
    admin: Admin, method: str, path: str, body: object
) -> None:
    data = json.dumps(body).encode()
    more = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield data[:3]
        await more.wait()
        yield data[3:]

    slow = asyncio.create_task(admin.send(method, path, slowly()))
    await admin.request("GET", "/-/live")  # its head has arrived by now, or does not matter
    await admin.request("PATCH", "/-/options", {"policy": "round_robin"})
    more.set()
    assert await slow in (200, 202)
    assert admin.desk.table.policy == "round_robin"


async def test_an_edit_does_not_put_off_the_deadline_of_a_drain(admin: Admin) -> None:
    await admin.request("PATCH", "/-/options", {"policy": "round_robin"})
    first = admin.desk.table.targets[1].drain_deadline_s
    await admin.request("PATCH", "/-/options", {"policy": "least_load"})
    second = admin.desk.table.targets[1].drain_deadline_s
    assert first is not None
    assert second is not None
    assert second < first < 3600.0


async def test_a_drained_target_takes_nothing_new_until_it_is_back(admin: Admin) -> None:
    await admin.request("POST", "/-/drain?target=a&deadline_s=30")
    assert choose(admin.desk.targets, REQUEST, admin.desk.clock()) is None
    assert admin.desk.table.targets[0].drain_deadline_s == 30.0
    await admin.request("GET", "/-/ready", status=503)
    await admin.request("POST", "/-/undrain?target=a")
    choice = choose(admin.desk.targets, REQUEST, admin.desk.clock())
    assert choice is not None
    assert choice.target_id == "a"
    assert await admin.request("GET", "/-/ready") == {"ready": True}


async def test_a_draining_agent_is_alive_and_not_ready(admin: Admin) -> None:
    before = admin.desk.table
    await admin.request("POST", "/-/drain")
    assert await admin.request("GET", "/-/ready", status=503) == {"ready": False}
    assert await admin.request("GET", "/-/live") == {"live": True}
    await admin.request("POST", "/-/undrain")
    assert await admin.request("GET", "/-/ready") == {"ready": True}
    assert admin.desk.table is before


# --- looking


async def test_keys_tell_what_was_used_and_never_the_key(admin: Admin) -> None:
    digest = hashlib.sha256(b"sk-alice").hexdigest()
    key = ApiKey("alice", digest, KeyLimits(tokens_per_minute=100)).to_json()
    await admin.request("PATCH", "/-/options", {"access": {"keys": [key]}})
    keys, now = admin.desk.keyring, admin.desk.clock()
    admission = keys.admit_head(((b"x-api-key", b"sk-alice"),), now)
    assert isinstance(admission, Admission)
    keys.settle(admission, 10, 20, now)
    (alice,) = (await admin.request("GET", "/-/keys"))["keys"]
    assert (alice["tenant"], alice["tokens"], alice["requests_left"]) == ("alice", 30, None)
    assert 70.0 <= alice["tokens_left"] <= 100.0
    assert (alice["reserved"], alice["in_flight"]) == (0, 0)
    assert digest not in json.dumps(alice)


async def test_an_agent_with_limits_of_days_wants_totals_and_takes_them(admin: Admin) -> None:
    assert "totals" not in await admin.request("GET", "/-/usage?source=s1&since=3")
    admin.desk.wants_totals = True
    assert UsageReport.from_json(await admin.request("GET", "/-/usage")).totals
    totals = UsageTotals(20_000, (KeyTotal("alice", "m", 1, 2, 3, 4, 5), KeyTotal("bob", "", 1, 2, 3, 4, 5)))
    assert await admin.request("POST", "/-/usage/totals", totals.to_json()) == {"rows": 2}
    assert admin.desk.totals_taken == [totals]


async def test_what_are_no_totals_is_refused(admin: Admin) -> None:
    rows = [[f"k{number:05}", "m", 1, 2, 3, 4, 5] for number in range(MOST_ROWS + 1)]
    problem = await admin.refusal("POST", "/-/usage/totals", {"day": 1, "rows": rows}, 400)
    assert problem == f"rows: more than {MOST_ROWS} rows"
    assert "rows[1]" in await admin.refusal("POST", "/-/usage/totals", {"day": 1, "rows": [rows[0]] * 2}, 400)
    await admin.refusal("POST", "/-/usage/totals", b" " * (MAX_PUSH_BYTES + 1), 413)
    assert admin.desk.totals_taken == []


async def test_keys_tell_what_is_reserved_and_in_flight(admin: Admin) -> None:
    key = api_key("alice", "sk-alice", tokens_per_minute=6).to_json()
    await admin.request("PATCH", "/-/options", {"access": {"keys": [key]}})
    keys, now = admin.desk.keyring, admin.desk.clock()
    admission = keys.admit_head(((b"x-api-key", b"sk-alice"),), now)
    assert isinstance(admission, Admission)
    keys.reserve(admission, "", 1000, 20, now)
    (alice,) = (await admin.request("GET", "/-/keys"))["keys"]
    assert (alice["reserved"], alice["in_flight"], alice["tokens"]) == (1020, 1, 0)
    assert alice["tokens_left"] < 0
    keys.settle(admission, 1000, 3, now)
    (alice,) = (await admin.request("GET", "/-/keys"))["keys"]
    assert (alice["reserved"], alice["in_flight"], alice["tokens"]) == (0, 0, 1003)


async def test_the_latest_stories_are_listed(admin: Admin) -> None:
    for number in range(30):
        admin.desk.explanations.begin(f"r{number}", "GET", "/", 0.0)
    latest = (await admin.request("GET", "/-/explain"))["requests"]
    assert [one["request_id"] for one in latest][:2] == ["r29", "r28"]
    assert len(latest) == 20
    assert len((await admin.request("GET", "/-/explain?limit=3"))["requests"]) == 3
    assert (await admin.request("GET", "/-/explain/r7"))["request_id"] == "r7"
    await admin.request("GET", "/-/explain/r99", status=404)


async def test_metrics_are_prometheus_text(admin: Admin) -> None:
    assert (
        'skyserve_lb_requests_total{policy="least_load",region="eu-1",service="chat"} 0.0'
        in await admin.request("GET", "/-/metrics")
    )


# --- refusals


REFUSED: dict[str, tuple[str, str, object, int, str]] = {
    "table is not json": ("PUT", "/-/targets", b"{", 400, "not JSON"),
    "too deep": ("PUT", "/-/targets", b"[" * 100_000, 400, "not JSON"),
    "not utf-8": ("PUT", "/-/targets", b'"\xff"', 400, "not JSON"),
    "too long": ("PUT", "/-/targets", b" " * (MAX_PUSH_BYTES + 1), 413, "Too Large"),
    "another service": ("PUT", "/-/targets", {"service": "x", "revision": "1"}, 409, "serves 'chat'"),
    "unknown key": ("PUT", "/-/targets", {"service": "chat", "revision": "1", "tragets": []}, 400, "tragets"),
    "unknown policy": ("PATCH", "/-/options", {"policy": "best"}, 400, "least_load"),
    "unknown option": ("PATCH", "/-/options", {"limits": {"hold": 3}}, 400, "limits.hold"),
    "options are not json": ("PATCH", "/-/options", b"policy=x", 400, "not JSON"),
    "unknown target": ("POST", "/-/drain?target=x", None, 404, "x not found"),
    "deadline": ("POST", "/-/drain?target=a&deadline_s=soon", None, 400, "deadline_s"),
    "negative deadline": ("POST", "/-/drain?target=a&deadline_s=-1", None, 400, "deadline_s"),
    "deadline of the agent": ("POST", "/-/drain?deadline_s=3", None, 400, "goes with a target"),
    "window": ("GET", "/-/stats?window_s=nan", None, 400, "window_s"),
    "limit": ("GET", "/-/explain?limit=1000000", None, 400, "limit"),
    "worker twice": ("POST", "/workers", {"url": A.url}, 409, "already exists"),
    "worker with half a surrogate pair": ("POST", "/workers", {"url": "\ud800"}, 400, "Unicode"),
    "key with half a surrogate pair": ("PATCH", "/-/options", {"\udfff": 1}, 400, "Unicode"),
    "worker without url": ("POST", "/workers", {}, 400, "url"),
    "worker of another url": ("PUT", "/workers/a", {"url": "http://c"}, 400, "url: stays"),
    "worker of another id": ("PATCH", "/workers/a", {"id": "c"}, 400, "id"),
    "unknown worker": ("DELETE", "/workers/x", None, 404, "x not found"),
    "unknown worker changed": ("PATCH", "/workers/x", {}, 404, "x not found"),
    "no such path": ("GET", "/nothing", None, 404, "Not Found"),
    "no such method": ("DELETE", "/-/targets", None, 405, "Not Allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_refusal_says_why_and_changes_nothing(admin: Admin, case: str) -> None:
    method, path, body, status, words = REFUSED[case]
    assert words in await admin.refusal(method, path, body, status)


async def test_a_table_that_cannot_be_stored_is_not_in_force(admin: Admin) -> None:
    admin.desk.disk_full = True
    assert "No space left" in await admin.refusal("PATCH", "/-/options", {"policy": "round_robin"}, 500)
