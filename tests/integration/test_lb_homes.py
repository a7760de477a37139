"""Requests for what one target has: conversations go on where they began, by every policy and through drains."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import orjson
import pytest

from lb.config.options import Access, ApiKey, Pushing, PushMode
from lb.config.schema import Readiness, Table, Target
from lb.engines.kinds import Fetched
from lb.http.upstream import TargetConnection
from policies.routing.registry import POLICIES
from tests.integration.lb_wires import DIES, Bench, Got, Peer, Seen, plainly, run
from tests.integration.test_lb_front_doors import head

NAMES = ("t0", "t1", "t2")
TARGETS = tuple(Target(name, f"http://192.0.2.9:{8000 + number}") for number, name in enumerate(NAMES))
NOT_FOUND = (
    b'{"error":{"message":"Response with id \'x\' not found.","type":"invalid_request_error","code":404}}'
)


def a_table(policy: str = "round_robin", **options: Any) -> Table:
    return Table("service", "r1", TARGETS, policy=policy, **options)


class Fleet(Bench):
    """Targets that store responses, each its own. Streams come in two pieces."""

    def __init__(self, table: Table) -> None:
        super().__init__(self.respond, table=table)
        self.stored = {name: set() for name in NAMES}
        self.served: list[str] = []
        self.made = 0
        self.looked: Fetched | None = None  # what any look comes back with; None: with what is stored
        self.silent = False  # no look comes back

    async def look(self, target: Target, path: str, timeout_s: float, lines: bytes) -> Fetched:
        if self.silent:
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        return self.looked or await super().look(target, path, timeout_s, lines)

    def on_request(self, peer: Peer, seen: Seen) -> None:
        connection = peer.wire.protocol
        assert isinstance(connection, TargetConnection)
        self.served.append(NAMES[int(connection.pool.address[-1:])])
        super().on_request(peer, seen)

    def respond(self, seen: Seen) -> list[bytes]:
        name = self.served[-1]
        paths = self.stored[name]
        if seen.method == b"GET":
            return (
                [plainly(b"{}")]
                if seen.target.decode() in paths
                else [plainly(NOT_FOUND, status=b"404 Not Found")]
            )
        json = orjson.loads(seen.body)
        previous = json.get("previous_response_id")
        if previous is not None and f"/v1/responses/{previous}" not in paths:
            return [plainly(NOT_FOUND, status=b"404 Not Found")]
        self.made += 1
        made = f"resp_{self.made}"
        paths.add(f"/v1/responses/{made}")
        if not json.get("stream"):
            return [plainly(b'{"id":"%b","output":[]}' % made.encode())]
        event = (
            b'event: response.created\ndata: {"response":{"id":"%b"},"type":"response.created"}\n\n'
            % made.encode()
        )
        begin = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        last = b'event: response.completed\ndata: {"type":"response.completed","response":{"output":[]}}\n\n'
        return [begin, *(b"%x\r\n%b\r\n" % (len(one), one) for one in (event, last)), b"0\r\n\r\n"]

    async def ask(self, json: dict[str, Any], *lines: str) -> Got:
        return await self.send("POST", "/v1/responses", orjson.dumps(json), *lines)

    async def send(self, method: str, path: str, body: bytes = b"", *lines: str) -> Got:
        client = self.client()
        length = (f"Content-Length: {len(body)}",) if body else ()
        client.send(head(method, path, *lines, *length) + body)
        await asyncio.sleep(0.6)
        (got,) = client.answers(method.encode())
        return got

    def push(self, *targets: Target, policy: str = "round_robin") -> None:
        self.table.apply(Table("service", "r2", targets, policy=policy), self.runtime.clock())
        self.intake.applied()

    def made_elsewhere(self, target_id: str, made: str) -> str:
        """A response that passed another agent."""
        self.stored[target_id].add(f"/v1/responses/{made}")
        return made


def id_of(got: Got) -> str:
    text = got.body.decode()
    return text[text.index("resp_") :].split('"')[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_conversations_go_on_where_they_began_through_a_drain(policy: str, stream: bool) -> None:
    async def story() -> None:
        fleet = Fleet(a_table(policy))
        last = [id_of(await fleet.ask({"input": f"question {one}", "stream": stream})) for one in range(9)]
        began = list(fleet.served)
        assert len(set(began)) > 1
        drained = began[0]
        for turn in range(3):
            if turn == 1:
                states = [
                    replace(one, state=Readiness.DRAINING) if one.id == drained else one for one in TARGETS
                ]
                fleet.push(*states, policy=policy)
            fleet.served.clear()
            for number, previous in enumerate(last):
                got = await fleet.ask({"input": "more", "previous_response_id": previous, "stream": stream})
                assert got.status == 200
                last[number] = id_of(got)
                assert (await fleet.send("GET", f"/v1/responses/{last[number]}")).status == 200
            assert fleet.served[::2] == fleet.served[1::2] == began
        assert fleet.looks == []
        fleet.check()

    run(story())


def test_what_was_not_learned_is_looked_for_once() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        made = [fleet.made_elsewhere(name, f"resp_of_{name}") for name in NAMES]
        for one in made:
            for _ in range(2):
                assert (await fleet.ask({"previous_response_id": one})).status == 200
        assert len(fleet.looks) == 3 * 3
        fleet.check()

    run(story())


def test_requests_at_the_same_time_share_one_look() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        made = fleet.made_elsewhere("t1", "resp_old")
        got = await asyncio.gather(*(fleet.ask({"previous_response_id": made}) for _ in range(5)))
        assert [one.status for one in got] == [200] * 5
        assert len(fleet.looks) == 3
        fleet.check()

    run(story())


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_what_no_target_has_is_the_apis_error(method: str) -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        if method == "POST":
            got = await fleet.ask({"previous_response_id": "resp_7"})
        else:
            got = await fleet.send(method, "/v1/responses/resp_7")
        assert got.status == 404
        error = orjson.loads(got.body)["error"]
        assert error["message"] == "Response with id 'resp_7' not found."
        assert error["type"] == "invalid_request_error"
        assert fleet.served == []
        fleet.check()

    run(story())


def test_when_its_target_has_left_it_is_the_apis_error() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        made = id_of(await fleet.ask({"input": "hi"}))
        fleet.push(*(one for one in TARGETS if one.id != fleet.served[0]))
        assert (await fleet.ask({"previous_response_id": made})).status == 404
        assert fleet.looks == []
        fleet.check()

    run(story())


def test_when_its_target_refuses_connections_it_is_the_apis_error_and_no_other_is_tried() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        made = id_of(await fleet.ask({"input": "hi"}))
        (served,) = fleet.served
        fleet.refuses, fleet.behave = True, lambda seen: [DIES]  # idle connections are closed
        del fleet.stored[served]  # and looks
        for _ in range(3):
            assert (await fleet.ask({"previous_response_id": made})).status == 404
        assert set(fleet.served) == {served}
        fleet.check()

    run(story())


def test_when_its_target_dies_on_it_the_request_ends_here() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        made = id_of(await fleet.ask({"input": "hi"}))
        fleet.behave = lambda seen: [DIES]
        got = await fleet.ask({"previous_response_id": made})
        assert (got.status, orjson.loads(got.body)["error"]["code"]) == (502, "no_target_answered")
        assert set(fleet.served) == {fleet.served[0]}
        assert len(fleet.seen) == 3  # once more on a new connection, in case the idle one had gone stale
        fleet.check()

    run(story())


def test_an_error_of_its_target_is_passed_on() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        made = id_of(await fleet.ask({"input": "hi"}))
        fleet.behave = lambda seen: [plainly(b"busy", status=b"503 Service Unavailable")]
        got = await fleet.ask({"previous_response_id": made})
        assert (got.status, got.body) == (503, b"busy")
        assert len(fleet.seen) == 2
        fleet.check()

    run(story())


def test_it_waits_for_its_target_while_others_have_room_and_ends_when_that_leaves() -> None:
    async def story() -> None:
        fleet = Fleet(a_table(pushing=Pushing(PushMode.FIXED_CAP, 1)))
        made = id_of(await fleet.ask({"input": "hi"}))
        (home,) = fleet.served
        fleet.behave = lambda seen: []  # thinks
        clients = [fleet.client() for _ in range(2)]
        body = orjson.dumps({"previous_response_id": made})
        for client in clients:
            client.send(head("POST", "/v1/responses", f"Content-Length: {len(body)}") + body)
        await asyncio.sleep(1.0)
        assert len(fleet.seen) == 2
        assert fleet.registry.queued == 1
        fleet.push(*(one for one in TARGETS if one.id != home))
        await asyncio.sleep(0.1)
        (waited,) = clients[1].answers(b"POST")
        assert waited.status == 404
        assert fleet.registry.queued == 0

    run(story())


def test_an_engine_without_the_path_decides_itself() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        fleet.looked = Fetched(404, b'{"detail":"Not Found"}')
        got = await fleet.ask({"previous_response_id": "resp_7"})
        assert (got.status, got.body) == (404, NOT_FOUND)
        assert len(fleet.served) == 1
        fleet.check()

    run(story())


def test_a_target_that_does_not_respond_may_have_it() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        fleet.silent = True
        got = await fleet.ask({"previous_response_id": "resp_7"})
        assert (got.status, orjson.loads(got.body)["error"]["code"]) == (503, "replica_not_responding")
        assert got.values(b"retry-after")
        fleet.check()

    run(story())


def test_a_client_that_leaves_during_a_look_leaves_nothing() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        client = fleet.client()
        client.send(head("GET", "/v1/responses/resp_7"))
        await asyncio.sleep(0.001)
        client.wire.feed(DIES)
        await asyncio.sleep(1.0)
        assert fleet.served == []
        fleet.check()

    run(story())


def test_looks_have_the_credentials_that_targets_get_and_not_ours() -> None:
    async def story() -> None:
        fleet = Fleet(a_table())
        await fleet.send("GET", "/v1/responses/resp_7", b"", "Authorization: Bearer engine")
        assert {lines for _, _, lines in fleet.looks} == {b"authorization: Bearer engine\r\n"}
        key = ApiKey("research", "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683")  # "key"
        fleet = Fleet(a_table(access=Access((key,))))
        await fleet.send("GET", "/v1/responses/resp_7", b"", "Authorization: Bearer key")
        assert {lines for _, _, lines in fleet.looks} <= {b""}

    run(story())
