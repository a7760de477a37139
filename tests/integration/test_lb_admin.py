"""The admin port, the command line, and an agent's end and return."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from lb.config.schema import Stats, Table
from tests.integration.lb_harness import ROOT, TOKEN, RunningAgent, Seen, World, until, world

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer ", f"bearer {TOKEN}é"]
)
async def test_every_admin_path_needs_the_token(w: World, authorization: str | None) -> None:
    agent = await w.agent()
    headers = {"Authorization": authorization} if authorization else {}
    for method, path in [
        ("GET", "/-/live"), ("GET", "/-/ready"), ("GET", "/-/metrics"), ("GET", "/-/targets"), ("PUT", "/-/targets"),
        ("GET", "/-/stats"), ("GET", "/-/explain/x"), ("POST", "/add_worker?url=http://a"), ("GET", "/list_workers"),
        ("POST", "/remove_worker?url=http://a"), ("GET", "/workers"), ("PATCH", "/-/options"), ("POST", "/-/drain"),
        ("GET", "/nothing"),
    ]:  # fmt: skip
        async with agent.http.request(method, agent.admin + path, headers=headers) as response:
            assert response.status == 401, path
            assert "Bearer" in response.headers["WWW-Authenticate"]
    assert (await agent.request("GET", "/-/targets"))["targets"] == []


async def test_a_push_is_idempotent_and_can_be_read_back(w: World) -> None:
    agent = await w.agent()
    target = await w.target("a")
    assert await agent.push(target.json, revision="7") == {"revision": "7"}
    assert await agent.push(target.json, revision="7") == {"revision": "7"}
    table = Table.from_json(await agent.request("GET", "/-/targets"))
    assert (table.revision, [one.id for one in table.targets]) == ("7", ["a"])
    assert await agent.text() == (200, "a")


async def test_a_table_of_an_earlier_epoch_is_refused(w: World) -> None:
    agent = await w.agent()
    target = await w.target("a")
    assert await agent.push(target.json, revision="2.x", epoch=2) == {"revision": "2.x"}
    earlier = {"service": "default", "revision": "1.y", "epoch": 1}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with agent.http.put(agent.admin + "/-/targets", json=earlier, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (409, "earlier_epoch")
    assert await agent.text() == (200, "a")
    assert await agent.push(revision="2.y", epoch=2) == {"revision": "2.y"}
    assert await agent.push(target.json, revision="3.x", epoch=3) == {"revision": "3.x"}
    assert Table.from_json(await agent.request("GET", "/-/targets")).epoch == 3


async def test_many_malformed_requests_to_the_admin_port_are_one_line_of_the_log(w: World) -> None:
    agent = await w.agent()
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", agent.admin_port)
        writer.write(b"no HTTP\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.")
        writer.close()
    lines = [line for line in agent.log.read_text().splitlines() if "refuse malformed request" in line]
    assert len(lines) == 1
    assert lines[0].endswith("left_out=0")


WRONG_TABLES = {
    "not json": (b"{", 400, "not JSON"),
    "not an object": (b"[]", 400, "expected an object"),
    "unknown key": ({"service": "default", "revision": "2", "tragets": []}, 400, "tragets"),
    "missing revision": ({"service": "default"}, 400, "revision"),
    "another service": ({"service": "other", "revision": "2"}, 409, "serves 'default'"),
    "unknown policy": ({"service": "default", "revision": "2", "policy": "best"}, 400, "least_load"),
    "bad url": (
        {"service": "default", "revision": "2", "targets": [{"id": "a", "url": "ftp://x"}]},
        400,
        "targets[0].url",
    ),
}


@pytest.mark.parametrize("case", WRONG_TABLES)
async def test_a_wrong_table_is_refused_and_changes_nothing(w: World, case: str) -> None:
    body, status, words = WRONG_TABLES[case]
    agent = await w.agent()
    await agent.push((await w.target("a")).json)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with agent.http.put(agent.admin + "/-/targets", data=data, headers=headers) as response:
        assert response.status == status
        assert words in (await response.json())["error"]["message"]
    assert (await agent.request("GET", "/-/targets"))["revision"] == "r1"


async def test_stats_count_demand_and_name_targets(w: World) -> None:
    agent = await w.agent("--region", "eu-1")
    await agent.push((await w.target("a")).json)
    for _ in range(3):
        await agent.text()
    stats = Stats.from_json(await agent.request("GET", "/-/stats?window_s=60"))
    assert (stats.service, stats.region, stats.revision, stats.requests) == ("default", "eu-1", "r1", 3)
    assert [(one.id, one.requests, one.errors, one.in_flight) for one in stats.targets] == [("a", 3, 0, 0)]
    assert stats.targets[0].served_s is not None
    assert stats.build is None
    assert stats.targets[0].health is None
    asked = Stats.from_json(await agent.request("GET", "/-/stats?build=1&health=1"))
    health, build = asked.targets[0].health, asked.build
    assert health is not None
    assert health.worked_s is not None
    assert health.errors == 0
    assert build is not None
    assert build.not_compiled == ""
    assert (
        f"build kind={build.kind.value} fast_path={build.fast_path} workers={build.workers}\n"
        in agent.log.read_text()
    )
    info = f'build_info{{fast_path="{str(build.fast_path).lower()}",kind="{build.kind.value}",region="eu-1",service="default"}} 1.0'
    assert f"skyserve_lb_{info}" in await agent.request("GET", "/-/metrics")
    for window in ("0", "601", "x", "nan"):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with agent.http.get(agent.admin + f"/-/stats?window_s={window}", headers=headers) as response:
            assert response.status == 400


@pytest.mark.long
async def test_stats_tell_how_many_were_ongoing_at_a_time(w: World) -> None:
    agent = await w.agent()
    await agent.push()  # no target: who comes is held
    waiting = [asyncio.create_task(agent.text()) for _ in range(2)]

    async def ongoing_is(number: float) -> bool:
        stats = Stats.from_json(await agent.request("GET", "/-/stats?window_s=1"))
        assert 0.0 <= stats.ongoing < 2.01
        return abs(stats.ongoing - number) < 0.01

    await until(lambda: ongoing_is(2.0))
    await agent.push((await w.target("a")).json)
    assert [await one for one in waiting] == [(200, "a")] * 2
    await until(lambda: ongoing_is(0.0))


async def test_ready_means_a_target_is_there(w: World) -> None:
    agent = await w.agent()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with agent.http.get(agent.admin + "/-/ready", headers=headers) as response:
        assert response.status == 503
    assert await agent.request("GET", "/-/live") == {"live": True}
    await agent.push((await w.target("a")).json)
    assert await agent.request("GET", "/-/ready") == {"ready": True}


async def test_metrics_have_the_promised_names_and_labels_only(w: World) -> None:
    agent = await w.agent("--region", "eu-1")
    target = await w.target("a")
    await agent.push({**target.json, "region": "eu-2", "zone": "eu-2a", "capacity_type": "spot"})
    await agent.text(headers={"X-Request-Id": "secret-id"})
    text = await agent.request("GET", "/-/metrics")
    assert 'skyserve_lb_requests_total{policy="least_load",region="eu-1",service="default"} 1.0' in text
    assert 'skyserve_lb_responses_2xx_total{policy="least_load",region="eu-1",service="default"} 1.0' in text
    target_labels = '{capacity_type="spot",policy="least_load",region="eu-2",service="default",zone="eu-2a"}'
    assert f"skyserve_lb_attempts_total{target_labels} 1.0" in text
    assert f"skyserve_lb_time_to_first_byte_seconds_count{target_labels} 1.0" in text
    for name in (
        "retries_total", "moves_total", "rejected_requests_total", "client_gone_requests_total", "cut_streams_total",
        "held_requests", "in_flight_requests", "good_targets", "targets",
    ):  # fmt: skip
        assert f"skyserve_lb_{name}{{" in text, name
    allowed = {
        "service",
        "region",
        "zone",
        "capacity_type",
        "policy",
        "le",
        "kind",
        "reason",
        "standing",
        "code",
        "key",
        "model",
        "fast_path",
    }
    for line in text.splitlines():
        if line.startswith("skyserve_"):
            labels = line.partition("{")[2].rpartition("}")[0]
            assert {pair.partition("=")[0] for pair in labels.split(",") if pair} <= allowed, line
    assert "secret-id" not in text


async def test_metrics_tell_targets_apart_if_the_table_says_so(w: World) -> None:
    agent = await w.agent()
    targets = await w.targets("a", "b")
    tables = [target.json for target in targets]
    await agent.push(*tables, policy="round_robin", metrics={"target_label": True})
    for _ in range(4):
        await agent.text()
    text = await agent.request("GET", "/-/metrics")
    labels = 'capacity_type="",policy="round_robin",region="",service="default"'
    for target in targets:
        assert f'skyserve_lb_attempts_total{{{labels},target="{target.json["id"]}",zone=""}} 2.0' in text
    await agent.push(*tables, policy="round_robin", revision="r2")
    assert 'target="' not in await agent.request("GET", "/-/metrics")


async def test_metrics_of_keys_tell_requests_tokens_and_refusals_and_never_the_key(w: World) -> None:
    async def behave(seen: Seen) -> None:
        await seen.answer(b'{"usage": {"prompt_tokens": 7, "completion_tokens": 5}}')

    agent = await w.agent()
    target = await w.target("a", behave)
    digest = hashlib.sha256(b"of-alice").hexdigest()
    key = {"name": "alice", "sha256": digest, "requests_per_minute": 2}
    access = {"keys": [key]}
    limits = {"hold_s": 0.0}
    await agent.push(target.json, access=access, limits=limits)
    chat = {
        "method": "POST",
        "json": {"model": "m", "messages": []},
        "headers": {"Authorization": "Bearer of-alice"},
    }
    assert (await agent.text("/v1/chat/completions", **chat))[0] == 200
    await agent.push(access=access, limits=limits, revision="r2")
    assert (await agent.text("/v1/chat/completions", **chat))[0] == 503
    assert (await agent.text("/v1/chat/completions", **chat))[0] == 429
    text = await agent.request("GET", "/-/metrics")
    of_model = 'key="alice",model="m",region="",service="default"'
    for line in (
        f"key_requests_total{{{of_model}}} 2.0",
        f"key_input_tokens_total{{{of_model}}} 7.0",
        f"key_output_tokens_total{{{of_model}}} 5.0",
        'key_refusals_total{key="alice",reason="no_target_ready",region="",service="default"} 1.0',
        'key_refusals_total{key="alice",reason="requests_per_minute",region="",service="default"} 1.0',
    ):
        assert f"skyserve_lb_{line}\n" in text
    assert "of-alice" not in text
    assert digest not in text


async def test_explain_tells_candidates_terms_and_the_retry(w: World) -> None:
    async def die(seen: Seen) -> None:
        seen.die()

    agent = await w.agent()
    dying, well = await w.target("dying", die), await w.target("well")
    await agent.push(dying.json, well.json)
    await agent.text("/v1/chat?key=hush", headers={"X-Request-Id": "why", "Idempotency-Key": "1"})
    story = await agent.request("GET", "/-/explain/why")
    assert (story["method"], story["path"]) == ("POST", "/v1/chat")
    assert [(step["event"], step["target"]) for step in story["steps"]] == [
        ("chose", "dying"), ("failed", "dying"), ("chose", "well"), ("answered", "well"),
    ]  # fmt: skip
    candidates = story["steps"][0]["candidates"]
    assert {one["target"] for one in candidates} == {"dying", "well"}
    assert candidates[0]["terms"]["in_flight"] == 0
    assert "hush" not in json.dumps(story)


async def test_workers_can_be_added_and_removed_as_with_sglang(w: World) -> None:
    agent = await w.agent()
    target = await w.target("a")
    assert "Successfully added" in await agent.request("POST", f"/add_worker?url={target.url}")
    assert await agent.request("GET", "/list_workers") == {"urls": [target.url]}
    assert await agent.text() == (200, "a")
    assert "Successfully removed" in await agent.request("POST", f"/remove_worker?url={target.url}")
    assert await agent.request("GET", "/list_workers") == {"urls": []}


async def test_a_worker_of_the_rest_api_serves_at_once_and_leaves_at_once(w: World) -> None:
    agent = await w.agent()
    target = await w.target("a")
    async with agent.http.post(
        agent.admin + "/workers", json={"url": target.url}, headers={"Authorization": f"Bearer {TOKEN}"}
    ) as response:
        assert response.status == 202
        location = (await response.json())["location"]
    assert await agent.text() == (200, "a")
    assert (await agent.request("GET", location))["is_healthy"]
    async with agent.http.delete(
        agent.admin + location, headers={"Authorization": f"Bearer {TOKEN}"}
    ) as response:
        assert response.status == 202
    assert await agent.request("GET", "/list_workers") == {"urls": []}


async def test_options_are_reloaded_without_a_restart_and_outlive_one(w: World, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    first = await w.agent("--table-file", str(file), clean_exit=False)
    await first.push((await w.target("a")).json)
    changed = await first.request(
        "PATCH", "/-/options", json={"policy": "round_robin", "limits": {"max_body_bytes": 3}}
    )
    assert (changed["policy"], changed["limits"]["max_body_bytes"]) == ("round_robin", 3)
    assert (await first.text("/v1/completions", data=b"{  }"))[0] == 413
    assert await first.text("/v1/completions", data=b"{ }") == (200, "a")
    assert 'policy="round_robin"' in await first.request("GET", "/-/metrics")
    first.process.send_signal(signal.SIGKILL)
    await first.process.wait()
    again = await w.agent("--table-file", str(file))
    assert (await again.request("GET", "/-/options"))["limits"]["max_body_bytes"] == 3


async def test_a_target_is_drained_and_comes_back(w: World) -> None:
    agent = await w.agent()
    await agent.push((await w.target("a")).json, (await w.target("b")).json)
    await agent.request("POST", "/-/drain?target=a&deadline_s=600")
    assert {(await agent.text())[1] for _ in range(6)} == {"b"}
    await agent.request("POST", "/-/undrain?target=a")
    assert {(await agent.text())[1] for _ in range(6)} == {"a", "b"}


async def test_a_draining_agent_is_not_ready_and_goes_on_serving(w: World) -> None:
    agent = await w.agent()
    await agent.push((await w.target("a")).json)
    await agent.request("POST", "/-/drain")
    async with agent.http.get(
        agent.admin + "/-/ready", headers={"Authorization": f"Bearer {TOKEN}"}
    ) as response:
        assert response.status == 503
    assert await agent.request("GET", "/-/live") == {"live": True}
    assert await agent.text() == (200, "a")


async def test_with_keys_only_their_owners_are_served_as_often_as_they_may(w: World) -> None:
    agent = await w.agent()
    target = await w.target("a")
    keys = [
        {
            "name": name,
            "sha256": hashlib.sha256(f"sk-{name}".encode()).hexdigest(),
            "requests_per_minute": limit,
        }
        for name, limit in (("alice", 1), ("bob", 0))
    ]
    await agent.push(target.json, access={"keys": keys})
    alice, bob = ({"Authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))
    for headers in ({}, {"Authorization": "Bearer sk-mallory"}):
        status, text = await agent.text(headers=headers)
        assert (status, json.loads(text)["error"]["type"]) == (401, "authentication_error")
    assert await agent.text(headers=alice) == (200, "a")
    async with agent.http.post(agent.url, headers=alice) as response:
        assert response.status == 429
        assert 50 <= int(response.headers["Retry-After"]) <= 61
        assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
    for _ in range(3):
        assert await agent.text(headers=bob) == (200, "a")
    assert len(target.seen) == 4
    assert all(seen.header("Authorization") is None for seen in target.seen), "keys end here"
    text = await agent.request("GET", "/-/metrics")
    labels = '{policy="least_load",region="",service="default"}'
    assert f"skyserve_lb_unauthorized_requests_total{labels} 2.0" in text
    assert f"skyserve_lb_limited_requests_total{labels} 1.0" in text
    usage = {one["tenant"]: one for one in (await agent.request("GET", "/-/keys"))["keys"]}
    assert (usage["alice"]["admitted"], usage["alice"]["limited"], usage["bob"]["admitted"]) == (1, 1, 3)


async def test_without_keys_the_authorization_is_the_targets(w: World) -> None:
    agent = await w.agent()
    target = await w.target("a")
    await agent.push(target.json)
    await agent.text(headers={"Authorization": "Bearer for-the-engine"})
    assert target.seen[0].header("Authorization") == "Bearer for-the-engine"


async def test_the_latest_stories_can_be_listed(w: World) -> None:
    agent = await w.agent()
    await agent.push((await w.target("a")).json)
    for name in ("first", "second"):
        await agent.text(headers={"X-Request-Id": name})
    latest = (await agent.request("GET", "/-/explain?limit=1"))["requests"]
    assert [story["request_id"] for story in latest] == ["second"]


async def test_the_access_log_is_one_line_per_request_without_secrets(w: World) -> None:
    agent = await w.agent("--access-log")
    await agent.push((await w.target("a")).json)
    await agent.text(
        "/v1/x?key=hush", headers={"X-Request-Id": "r1", "Authorization": "Bearer hush"}, data=b"hush"
    )

    async def logged() -> bool:
        return '"id":"r1"' in agent.log.read_text()

    await until(logged)
    (line,) = [line for line in agent.log.read_text().splitlines() if '"id":"r1"' in line]
    story = json.loads(line[line.index("{") :])
    assert (story["method"], story["path"], story["status"], story["attempts"]) == ("POST", "/v1/x", 200, 1)
    assert (story["target"], story["bytes"]) == ("a", 1)
    assert "hush" not in agent.log.read_text()


async def test_killed_and_started_again_it_has_its_table(w: World, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    target = await w.target("a")
    first = await w.agent("--table-file", str(file), clean_exit=False)
    await first.push(target.json, revision="42", policy="round_robin")
    first.process.send_signal(signal.SIGKILL)
    await first.process.wait()
    again = await w.agent("--table-file", str(file), "--port", str(first.port))
    assert again.port == first.port
    table = await again.request("GET", "/-/targets")
    assert (table["revision"], table["policy"]) == ("42", "round_robin")
    assert await again.text() == (200, "a")


@pytest.mark.parametrize(
    "content", ["", "{", '{"service": "other", "revision": "1"}'], ids=["empty", "cut", "other service"]
)
async def test_an_unusable_table_file_does_not_stop_it(w: World, tmp_path: Path, content: str) -> None:
    file = tmp_path / "table.json"
    file.write_text(content)
    agent = await w.agent("--table-file", str(file))
    assert (await agent.request("GET", "/-/targets"))["targets"] == []
    assert "ignore table_file" in agent.log.read_text()


async def test_sigterm_lets_a_stream_end_and_exits_0(w: World) -> None:
    go = asyncio.Event()

    async def stream(seen: Seen) -> None:
        await seen.begin_stream()
        await seen.chunk(b"first ")
        await go.wait()
        await seen.chunk(b"last")
        await seen.send(b"0\r\n\r\n")

    async def refused() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", agent.port)
        except ConnectionError:  # refused, or reset: it was still in the backlog when the port was closed
            return True
        writer.close()
        return False

    agent = await w.agent("--target", (await w.target("a", stream)).url)
    async with agent.http.get(agent.url) as response:
        assert await response.content.readany() == b"first "
        agent.process.send_signal(signal.SIGTERM)
        await until(refused)
        go.set()
        assert await response.content.read() == b"last"
    assert await asyncio.wait_for(agent.process.wait(), 20) == 0


@pytest.mark.long
async def test_sigterm_turns_away_who_is_held(w: World) -> None:
    agent = await w.agent()
    held = asyncio.create_task(agent.text(data=b"x"))

    async def is_held() -> bool:
        return (await agent.stats())["queued"] == 1

    await until(is_held)
    agent.process.send_signal(signal.SIGTERM)
    assert (await held)[0] == 503
    assert await asyncio.wait_for(agent.process.wait(), 20) == 0


async def test_without_a_token_there_is_no_admin_port(w: World, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    agent = await w.agent("--target", (await w.target("a")).url, "--ready-file", str(ready), token=None)
    assert agent.admin_port is None
    assert await agent.text() == (200, "a")
    assert json.loads(ready.read_text())["pid"] == agent.pid


async def test_the_token_can_come_from_a_file_and_never_shows_in_the_arguments(
    w: World, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(stat.S_IRUSR)
    agent = await w.agent("--admin-token-file", str(file), token=None)
    assert await agent.request("GET", "/-/live") == {"live": True}
    assert TOKEN not in " ".join(psutil.Process(agent.pid).cmdline())


WRONG_ARGUMENTS = {
    "port": (["--port", "70000"], "not a port"),
    "policy": (["--policy", "best"], "least_load"),
    "target": (["--target", "localhost:8000"], "must start with http"),
    "target twice": (["--target", "http://a", "--target", "http://a"], "given twice"),
    "time": (["--time-to-first-byte", "0"], "seconds"),
    "attempts": (["--max-attempts", "0"], "1 to 100"),
    "admin without token": (["--admin-port", "0"], "token"),
    "token file": (["--admin-token-file", "/nonexistent/token"], "cannot be read"),
    "certificate": (["--tls-certfile", "/nonexistent/cert"], "no file"),
    "key alone": (["--tls-keyfile", "/nonexistent/key"], "--tls-certfile"),
    "folder": (["--table-file", "/nonexistent/table"], "no folder"),
    "health path": (["--target", "http://a", "--health-path", "health"], "start with '/'"),
    "unknown": (["--tragets", "x"], "--tragets"),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_arguments_are_one_sentence_and_exit_code_2(case: str) -> None:
    arguments, words = WRONG_ARGUMENTS[case]
    environment = {key: value for key, value in os.environ.items() if key != "SKYSERVE_LB_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-m", "lb", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=30,
    )
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


async def test_a_taken_port_is_one_sentence_and_exit_code_1(w: World) -> None:
    agent = await w.agent()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lb", "--port", str(agent.port), stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{agent.port}" in stderr.decode().splitlines()[-1]


async def test_open_probes_need_no_token_and_everything_else_does(w: World) -> None:
    agent = await w.agent("--open-probes")
    for method, path, status in [
        ("GET", "/-/live", 200), ("GET", "/-/ready", 503), ("GET", "/-/ready?table=1", 503), ("POST", "/-/ready", 401),
        ("GET", "/-/targets", 401), ("GET", "/-/live/", 401), ("POST", "/-/drain", 401),
    ]:  # fmt: skip
        async with agent.http.request(method, agent.admin + path) as response:
            assert response.status == status, path


async def test_a_table_makes_an_agent_ready_for_its_service_before_there_is_a_target(w: World) -> None:
    agent = await w.agent("--open-probes")

    async def ready(path: str = "/-/ready?table=1") -> int:
        async with agent.http.get(agent.admin + path) as response:
            return response.status

    assert await ready() == 503
    await agent.push(revision="1")
    assert (await ready(), await ready("/-/ready")) == (200, 503)
    await agent.request("POST", "/-/drain")
    assert await ready() == 503
    await agent.request("POST", "/-/undrain")
    assert await ready() == 200


async def farewell_of(agent: RunningAgent, folder: Path, *more: str) -> asyncio.subprocess.Process:
    token = folder / "token"
    token.write_text(TOKEN)
    words = ["--port", str(agent.admin_port), "--token-file", str(token), *more]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lb.agent.farewell", *words, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


async def test_a_farewell_waits_until_those_who_are_held_have_a_target(w: World, tmp_path: Path) -> None:
    agent = await w.agent()
    await agent.push(revision="1")
    held = asyncio.create_task(agent.text())

    async def is_queued() -> bool:
        return bool((await agent.stats())["queued"] == 1)

    await until(is_queued)
    farewell = await farewell_of(agent, tmp_path, "--least", "0.1", "--most", "60")

    async def is_drained() -> bool:
        async with agent.http.get(agent.admin + "/-/ready?table=1", headers=AUTHORIZED) as response:
            return response.status == 503

    await until(is_drained)
    assert farewell.returncode is None
    target = await w.target("a")
    await agent.push(target.json, revision="2")
    assert await held == (200, "a")
    assert await farewell.wait() == 0


async def test_a_farewell_of_an_agent_that_does_not_respond_ends(w: World, tmp_path: Path) -> None:
    agent = await w.agent(clean_exit=False)
    agent.process.kill()
    await agent.process.wait()
    farewell = await farewell_of(agent, tmp_path, "--least", "0")
    assert await farewell.wait() == 0
