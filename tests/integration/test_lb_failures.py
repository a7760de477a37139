"""Targets that are dead, frozen, dying or gone: what a client sees, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from tests.integration.lb_harness import RunningAgent, Seen, ToyTarget, World, until, world


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


def refusing_url() -> str:
    """A port no one listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def many(agent: RunningAgent, count: int, at_once: int = 8) -> Counter[tuple[int, str]]:
    gate = asyncio.Semaphore(at_once)

    async def one() -> tuple[int, str]:
        async with gate:
            return await agent.text("/v1/chat/completions", data=b"{}")

    return Counter(await asyncio.gather(*(one() for _ in range(count))))


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
async def test_a_dead_target_still_listed_fails_no_request(w: World, policy: str) -> None:
    alive = await w.targets("a", "b", "c", "d")
    agent = await w.agent("--policy", policy, "--target", refusing_url(), *flags(alive))
    answers = await many(agent, 200)
    assert sum(answers.values()) == 200
    assert set(answers) == {(200, "a"), (200, "b"), (200, "c"), (200, "d")}


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
async def test_a_frozen_target_is_left_for_the_others(w: World, policy: str) -> None:
    frozen, *alive = await w.targets("frozen", "a", "b", "c", "d")
    frozen.frozen = True
    agent = await w.agent()
    await agent.push(
        frozen.json, *(one.json for one in alive), policy=policy,
        limits={"suspect_after_s": 0.2, "probe_timeout_s": 0.2},
    )  # fmt: skip
    answers = await many(agent, 60)
    assert set(answers) == {(200, "a"), (200, "b"), (200, "c"), (200, "d")}
    stats = {one["id"]: one for one in (await agent.stats())["targets"]}
    assert stats["frozen"]["ejected"]


async def test_a_slow_target_that_answers_its_health_path_is_left_alone(w: World) -> None:
    go = asyncio.Event()
    slow, other = await w.targets("slow", "other")

    async def wait(seen: Seen) -> None:
        await go.wait()
        await seen.answer(b"slow")

    async def probed_often() -> bool:
        return slow.probes >= 3

    slow.behave = wait
    agent = await w.agent()
    await agent.push(slow.json, limits={"suspect_after_s": 0.05, "probe_timeout_s": 5})
    request = asyncio.create_task(agent.text())
    await slow.arrived.wait()
    await agent.push(
        slow.json, other.json, revision="r2", limits={"suspect_after_s": 0.05, "probe_timeout_s": 5}
    )
    await until(probed_often)
    assert not request.done()
    go.set()
    assert await request == (200, "slow")
    assert not other.seen


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_target_that_dies_before_its_head_is_not_tried_again(w: World, method: str) -> None:
    async def die(seen: Seen) -> None:
        seen.die()

    dying, well = await w.target("dying", die), await w.target("well")
    agent = await w.agent(*flags([dying, well]))
    for _ in range(4):  # whichever is first, the response is that of the live one
        assert await agent.text(method=method) == (200, "well")
    per_request = Counter(seen.header("X-Request-Id") for seen in dying.seen)
    assert per_request
    assert set(per_request.values()) == {1}


async def test_a_small_answer_cut_in_its_body_is_retried_whole(w: World) -> None:
    async def half(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n12345")
        seen.die()

    dying, well = await w.target("dying", half), await w.target("well")
    agent = await w.agent(*flags([dying, well]))
    for _ in range(4):
        assert await agent.text(data=b"x") == (200, "well")
    assert dying.seen


async def test_a_stream_that_dies_between_head_and_first_byte_is_retried(w: World) -> None:
    async def head_only(seen: Seen) -> None:
        await seen.begin_stream()
        seen.die()

    dying, well = await w.target("dying", head_only), await w.target("well")
    agent = await w.agent(*flags([dying, well]))
    for _ in range(4):
        assert await agent.text(data=b"x") == (200, "well")
    assert dying.seen


async def test_a_stream_cut_in_its_midst_is_an_error_to_the_client_not_a_clean_end(w: World) -> None:
    async def cut(seen: Seen) -> None:
        await seen.begin_stream()
        await seen.chunk(b"data: 1\n\n")
        seen.die()

    agent = await w.agent(*flags([await w.target("cutting", cut)]))
    async with agent.http.post(agent.url) as response:
        assert response.status == 200
        assert await response.content.readexactly(9) == b"data: 1\n\n"
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    assert "skyserve_lb_cut_streams_total{" in await agent.request("GET", "/-/metrics")


async def test_a_malformed_chunk_is_the_end_of_a_stream_at_once(w: World) -> None:
    begun = asyncio.Event()

    async def babble(seen: Seen) -> None:
        await seen.begin_stream()
        await seen.chunk(b"data: 1\n\n")
        await begun.wait()
        await seen.send(b"no chunk size\r\n")
        await seen.gone()

    agent = await w.agent("--idle-timeout", "3600", *flags([await w.target("babbling", babble)]))
    async with agent.http.post(agent.url) as response:
        assert await response.content.readexactly(9) == b"data: 1\n\n"
        begun.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_a_stream_that_falls_silent_is_ended_by_the_idle_timeout(w: World) -> None:
    async def stall(seen: Seen) -> None:
        await seen.begin_stream()
        await seen.chunk(b"data: 1\n\n")
        await seen.gone()

    agent = await w.agent("--idle-timeout", "0.3", *flags([await w.target("stalling", stall)]))
    async with agent.http.post(agent.url) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"])
async def test_a_refusal_goes_to_another_target_and_the_last_one_is_passed_on(w: World, status: str) -> None:
    async def refuse(seen: Seen) -> None:
        await seen.answer(b"busy", status, "X-Why: load")

    refusing, well = await w.target("refusing", refuse), await w.target("well")
    agent = await w.agent(*flags([refusing, well]))
    for _ in range(4):
        assert await agent.text(data=b"x") == (200, "well")
    assert refusing.seen
    well.behave = refuse
    async with agent.http.post(agent.url, data=b"x") as response:
        assert (response.status, await response.text()) == (int(status[:3]), "busy")
        assert response.headers["X-Why"] == "load"


async def test_an_application_error_is_passed_on_and_not_repeated(w: World) -> None:
    async def fail(seen: Seen) -> None:
        await seen.answer(b"bug", "500 Internal Server Error")

    failing = await w.target("failing", fail)
    agent = await w.agent(*flags([failing]))
    assert await agent.text(data=b"x") == (500, "bug")
    assert len(failing.seen) == 1


async def test_a_request_is_begun_at_most_max_attempts_times(w: World) -> None:
    async def talk_nonsense(seen: Seen) -> None:
        await seen.send(b"SSH-2.0-x\r\n\r\n")

    strange = [await w.target(name, talk_nonsense) for name in "abcde"]
    agent = await w.agent("--max-attempts", "3", *flags(strange))
    status, text = await agent.text(data=b"x")
    assert (status, "no_target_answered" in text) == (502, True)
    assert sum(len(target.seen) for target in strange) == 3


async def test_a_request_on_which_two_targets_died_is_not_given_a_third(w: World) -> None:
    async def die(seen: Seen) -> None:
        seen.die()

    dying = [await w.target(name, die) for name in "abcde"]
    agent = await w.agent("--max-attempts", "5", *flags(dying))
    status, text = await agent.text(data=b"x")
    assert (status, "request_kills_engines" in text) == (502, True)
    assert sum(len(target.seen) for target in dying) == 2
    stats = await agent.request("GET", "/-/stats")
    assert sum(target["ejected"] for target in stats["targets"]) == 1, "the second one is not to blame"


@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH", "PUT"])
async def test_what_may_not_run_twice_is_sent_once(w: World, method: str) -> None:
    async def die(seen: Seen) -> None:
        seen.die()

    dying, well = await w.target("dying", die), await w.target("well")
    agent = await w.agent(*flags([dying, well]))
    outcomes = [await agent.text("/v1/files", method=method, headers={}) for _ in range(4)]
    assert 502 in [status for status, _ in outcomes]
    ids = [seen.header("X-Request-Id") for target in (dying, well) for seen in target.seen]
    assert len(ids) == len(set(ids)) == 4


async def test_targets_that_refuse_the_connection_do_not_use_up_the_attempts(w: World) -> None:
    well = await w.target("well")
    dead = [flag for _ in range(6) for flag in ("--target", refusing_url())]
    agent = await w.agent("--max-attempts", "1", *dead, *flags([well]))
    assert set(await many(agent, 20)) == {(200, "well")}


async def test_a_push_that_removes_a_target_moves_who_waits_on_it(w: World) -> None:
    silent, well = await w.target("silent", Seen.gone), await w.target("well")
    agent = await w.agent()
    await agent.push(silent.json)
    request = asyncio.create_task(agent.text(data=b"x"))
    await silent.arrived.wait()
    await agent.push(well.json, revision="r2")
    assert await request == (200, "well")


async def test_a_push_that_leaves_no_target_holds_the_request_until_one_comes(w: World) -> None:
    silent, well = await w.target("silent", Seen.gone), await w.target("well")
    agent = await w.agent()
    await agent.push(silent.json)
    request = asyncio.create_task(agent.text(data=b"x"))
    await silent.arrived.wait()
    await agent.push(revision="r2")
    await until(lambda: queued(agent))
    await agent.push(well.json, revision="r3")
    assert await request == (200, "well")


async def test_an_unhealthy_mark_moves_who_waits_only_if_another_is_well(w: World) -> None:
    go = asyncio.Event()

    async def wait(seen: Seen) -> None:
        await go.wait()
        await seen.answer(b"doubted")

    doubted, well = await w.target("doubted", wait), await w.target("well")
    agent = await w.agent()
    await agent.push(doubted.json)
    request = asyncio.create_task(agent.text(data=b"x"))
    await doubted.arrived.wait()
    await agent.push({**doubted.json, "state": "unhealthy"}, revision="r2")
    assert (await agent.stats())["in_flight"] == 1
    await agent.push({**doubted.json, "state": "unhealthy"}, well.json, revision="r3")
    assert await request == (200, "well")


async def test_doubt_moves_a_request_at_most_max_attempts_less_one_times(w: World) -> None:
    go = asyncio.Event()

    async def wait(seen: Seen) -> None:
        await go.wait()
        await seen.answer(b"at last")

    targets = [await w.target(name, wait) for name in "abc"]
    agent = await w.agent()

    async def begun() -> list[ToyTarget]:
        return [target for target in targets if target.seen]

    async def two_begun() -> bool:
        return len(await begun()) == 2

    async def doubt(doubted: list[ToyTarget], revision: str) -> None:
        states = [{**t.json, "state": "unhealthy"} if t in doubted else t.json for t in targets]
        await agent.push(*states, revision=revision, retries={"max_total_retries": 1})

    await doubt([], "r1")
    request = asyncio.create_task(agent.text(data=b"x"))
    await until(begun)
    await doubt(await begun(), "r2")
    await until(two_begun)
    await doubt(await begun(), "r3")
    assert (await agent.stats())["in_flight"] == 1
    go.set()
    assert await request == (200, "at last")
    assert sum(len(target.seen) for target in targets) == 2


async def test_time_to_first_byte_ends_in_504_and_ejects_who_was_silent(w: World) -> None:
    silent = await w.target("silent")
    silent.frozen = True
    agent = await w.agent("--time-to-first-byte", "0.4", *flags([silent]))
    async with agent.http.post(agent.url, data=b"x") as response:
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "time_to_first_byte"
        assert response.headers["Retry-After"]
    (stats,) = (await agent.stats())["targets"]
    assert stats["errors"] == 1
    assert "skyserve_lb_ejections_total{" in await agent.request("GET", "/-/metrics")


async def test_draining_takes_nothing_new_and_lets_the_stream_end(w: World) -> None:
    go = asyncio.Event()

    async def stream(seen: Seen) -> None:
        await seen.begin_stream()
        await seen.chunk(b"first ")
        await go.wait()
        await seen.chunk(b"last")
        await seen.send(b"0\r\n\r\n")

    leaving, staying = await w.target("leaving", stream), await w.target("staying")
    agent = await w.agent()
    await agent.push(leaving.json)
    async with agent.http.post(agent.url, data=b"x") as response:
        assert await response.content.readany() == b"first "
        await agent.push(
            {**leaving.json, "state": "draining", "drain_deadline_s": 0.0}, staying.json, revision="r2"
        )
        assert set(await many(agent, 10)) == {(200, "staying")}
        await agent.push(staying.json, revision="r3")  # even removed, it is not cut
        stats = {one["id"]: one["in_flight"] for one in (await agent.stats())["targets"]}
        assert stats == {"leaving": 1, "staying": 0}
        go.set()
        assert await response.content.read() == b"last"
    await until(lambda: only_staying(agent))


async def test_draining_lets_a_waiting_unary_request_end(w: World) -> None:
    go = asyncio.Event()

    async def wait(seen: Seen) -> None:
        await go.wait()
        await seen.answer(b"leaving")

    leaving, staying = await w.target("leaving", wait), await w.target("staying")
    agent = await w.agent()
    await agent.push(leaving.json)
    request = asyncio.create_task(agent.text(data=b"x"))
    await leaving.arrived.wait()
    await agent.push({**leaving.json, "state": "draining"}, staying.json, revision="r2")
    go.set()
    assert await request == (200, "leaving")


@pytest.mark.parametrize("streaming", [True, False], ids=["in a stream", "before the first byte"])
async def test_a_client_that_leaves_is_noticed_by_the_target(w: World, streaming: bool) -> None:
    left = asyncio.Event()

    async def notice(seen: Seen) -> None:
        if streaming:
            await seen.begin_stream()
            await seen.chunk(b"data: 1\n\n")
        await seen.gone()
        left.set()

    target = await w.target("target", notice)
    agent = await w.agent(*flags([target]))
    reader, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
    if streaming:
        await reader.readuntil(b"data: 1\n\n")
    await target.arrived.wait()
    writer.close()
    await asyncio.wait_for(left.wait(), 10)
    assert await until(lambda: counted(agent, "skyserve_lb_client_gone_requests_total", 1.0))


async def test_a_client_that_leaves_in_its_body_is_counted_and_is_no_error(w: World) -> None:
    agent = await w.agent(*flags(await w.targets("a")))  # whose log must hold no error at its end
    _, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
    await until(lambda: arrived(agent))
    writer.transport.abort()

    async def counted() -> bool:
        lines = (await agent.request("GET", "/-/metrics")).splitlines()
        (gone,) = (line for line in lines if line.startswith("skyserve_lb_client_gone_requests_total{"))
        return gone.endswith(" 1.0")

    await until(counted)


async def arrived(agent: RunningAgent) -> bool:
    return (await agent.stats())["requests"] == 1


async def test_nobody_there_is_503_with_retry_after_and_is_demand(w: World) -> None:
    agent = await w.agent("--hold", "0.1")
    async with agent.http.post(agent.url, data=b"x") as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert (await response.json())["error"]["code"] == "no_target_ready"
    stats = await agent.stats()
    assert (stats["requests"], stats["rejected"], stats["queued"]) == (1, 1, 0)


async def test_the_waiting_room_is_bounded(w: World) -> None:
    agent = await w.agent()
    await agent.push(limits={"max_held": 1, "hold_s": 30})
    held = asyncio.create_task(agent.text(data=b"x"))
    await until(lambda: queued(agent))
    assert (await agent.text(data=b"x"))[0] == 429
    await agent.push((await w.target("late")).json, revision="r2")
    assert await held == (200, "late")


async def test_a_client_that_leaves_while_held_gives_its_place_up(w: World) -> None:
    agent = await w.agent()
    held = asyncio.create_task(agent.text(data=b"x"))
    await until(lambda: queued(agent))
    held.cancel()

    async def room() -> bool:
        return not await queued(agent)

    await until(room)
    assert await until(lambda: counted(agent, "skyserve_lb_client_gone_requests_total", 1.0))


async def test_a_held_request_returns_to_a_target_that_has_come_back(w: World) -> None:
    target = await w.target("phoenix")
    agent = await w.agent(*flags([target]))
    await target.stop()
    request = asyncio.create_task(agent.text(data=b"x"))
    await until(lambda: queued(agent))
    await target.start()
    assert await request == (200, "phoenix")


async def test_a_quick_probe_does_not_leave_the_held_waiting_for_a_target_that_is_back(w: World) -> None:
    target = await w.target("phoenix")
    agent = await w.agent()
    await agent.push(target.json, limits={"probe_timeout_s": 0.1, "hold_s": 3600.0})
    await target.stop()
    request = asyncio.create_task(agent.text(data=b"x"))
    await until(lambda: queued(agent))
    await until(lambda: ejected_twice(agent))  # the first ejection is over, and was renewed
    await target.start()
    assert await asyncio.wait_for(request, 20) == (200, "phoenix")


async def ejected_twice(agent: RunningAgent) -> bool:
    lines = (await agent.request("GET", "/-/metrics")).splitlines()
    return (
        sum(float(line.split()[-1]) for line in lines if line.startswith("skyserve_lb_ejections_total")) >= 2
    )


async def test_a_stale_connection_is_no_failure_even_if_the_target_is_the_only_one(w: World) -> None:
    served: Counter[int] = Counter()

    async def once_per_connection(seen: Seen) -> None:
        served[id(seen.writer)] += 1
        if served[id(seen.writer)] > 1:
            seen.die()  # as a server whose keep-alive time ran out at just this moment
        else:
            await seen.answer(b"ok")

    target = await w.target("target", once_per_connection)
    agent = await w.agent(*flags([target]))
    for _ in range(3):
        assert await agent.text(data=b"x") == (200, "ok")
    (stats,) = (await agent.stats())["targets"]
    assert (stats["errors"], stats["ejected"]) == (0, False)


async def test_stale_connections_to_all_targets_at_once_fail_no_request(w: World) -> None:
    async def once_per_connection(seen: Seen) -> None:
        if seen.writer in used:
            seen.die()
            return
        used.add(seen.writer)
        await seen.answer(b"ok")

    used: set[asyncio.StreamWriter] = set()
    targets = await w.targets("a", "b", "c", "d")
    for target in targets:
        target.behave = once_per_connection
    agent = await w.agent("--policy", "round_robin", "--max-attempts", "2", *flags(targets))
    for _ in range(3 * len(targets)):
        assert await agent.text(data=b"x") == (200, "ok")


async def test_a_burst_over_a_target_killed_in_its_midst_fails_nowhere(w: World) -> None:
    targets = await w.targets("a", "b", "c", "d")
    for target in targets:
        target.behave = slowly(target)
    agent = await w.agent(*flags(targets))
    burst = asyncio.create_task(many(agent, 120, at_once=16))
    await targets[0].arrived.wait()
    await targets[0].stop()
    answers = await burst
    assert {status for status, _ in answers} == {200}


async def test_who_has_lost_its_target_goes_before_those_who_came_later(w: World) -> None:
    first, second = await w.targets("first", "second")

    async def never(seen: Seen) -> None:
        await seen.gone()

    first.behave = never
    rules = {"pushing": {"mode": "fixed_cap", "cap": 1}, "limits": {"max_held": 2}}
    agent = await w.agent()
    await agent.push(first.json, **rules)

    def held(count: int) -> Callable[[], Awaitable[bool]]:
        async def look() -> bool:
            return (await agent.stats())["queued"] == count

        return look

    asking = [asyncio.create_task(agent.text("/0"))]
    await first.arrived.wait()
    for number in (1, 2):
        asking.append(asyncio.create_task(agent.text(f"/{number}")))
        await until(held(number))
    await first.stop()
    await until(held(3))  # the room has two places, and as many again for who comes back
    await agent.push(second.json, revision="r2", **rules)
    assert await asyncio.wait_for(asyncio.gather(*asking), 20) == [(200, "second")] * 3
    assert [seen.path for seen in second.seen] == ["/0", "/1", "/2"]


async def test_all_who_were_on_a_target_that_died_go_elsewhere_whatever_the_budget(w: World) -> None:
    full, well = await w.targets("full", "well")

    async def never(seen: Seen) -> None:
        await seen.gone()

    full.behave = never
    rules = {"retries": {"budget_ratio": 0.0, "budget_floor_per_s": 0.0}, "pushing": {"mode": "blind"}}
    agent = await w.agent()
    await agent.push(full.json, **rules)
    asking = asyncio.create_task(many(agent, 40, at_once=40))

    async def all_there() -> bool:
        return len(full.seen) == 40

    await until(all_there)
    await agent.push(full.json, well.json, revision="r2", **rules)
    await full.stop()
    assert await asyncio.wait_for(asking, 20) == {(200, "well"): 40}


def slowly(target: ToyTarget):
    async def behave(seen: Seen) -> None:
        await asyncio.sleep(0.02)
        await seen.answer(target.name.encode())

    return behave


def flags(targets: list[ToyTarget]) -> list[str]:
    return [flag for target in targets for flag in ("--target", target.url)]


async def queued(agent: RunningAgent) -> bool:
    return bool((await agent.stats())["queued"])


async def only_staying(agent: RunningAgent) -> bool:
    return [one["id"] for one in (await agent.stats())["targets"]] == ["staying"]


async def counted(agent: RunningAgent, name: str, value: float) -> bool:
    lines = (await agent.request("GET", "/-/metrics")).splitlines()
    return any(line.startswith(name + "{") and float(line.rsplit(" ", 1)[1]) == value for line in lines)
