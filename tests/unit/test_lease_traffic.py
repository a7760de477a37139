"""What counts as traffic on a machine: at TLS in front of the replica, at a load balancer, and by connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from lb.agent.traffic_file import TrafficNotes
from provisioners.remote.host_agent import daemon, lease
from provisioners.remote.host_agent.tls_proxy import TrafficWatch

OK, CREATED, MOVED = (f"HTTP/1.1 {status} X\r\n\r\n".encode() for status in (200, 201, 302))
UPGRADED, REFUSED, BROKEN = (f"HTTP/1.1 {status} X\r\n\r\n".encode() for status in (101, 404, 503))


def request(line: str = "POST /v1/chat/completions", agent: str = "curl/8") -> bytes:
    return f"{line} HTTP/1.1\r\nHost: x\r\nUser-Agent: {agent}\r\nAccept: */*\r\n\r\n".encode()


def noted(*passed: tuple[bytes, bytes]) -> list[str]:
    """What a connection notes on which these requests and responses pass, each a minute after the one before."""
    TrafficWatch.noted_at = float("-inf")
    notes: list[str] = []
    now = 0.0
    watch = TrafficWatch(lambda: notes.append("traffic"), lambda: notes.append("served"), lambda: now)
    for sent, received in passed:
        now += 60
        if sent:
            watch.request(sent)
        watch.response(received)
    return notes


@pytest.mark.parametrize(
    ("passed", "expected"),
    [
        pytest.param([(request(), OK)], ["traffic"], id="a request that is served"),
        pytest.param([(request(), OK), (request(), CREATED)], ["traffic"] * 2, id="two of them"),
        pytest.param([(request(), MOVED)], ["traffic"], id="a redirection is a response"),
        pytest.param(
            [(request(), UPGRADED), (b"\x81\x05hello", b"\x81\x05hello")], ["traffic"] * 2, id="a websocket"
        ),
        pytest.param([(request(), REFUSED)], [], id="a scanner that finds nothing"),
        pytest.param([(request(), BROKEN), (b"", b"more of it")], [], id="a failing replica"),
        pytest.param(
            [(request(), OK), (b"", b"data: 1\n\n"), (b"", b"data: 2\n\n")], ["traffic"] * 3, id="a stream"
        ),
        pytest.param([(request(agent="skyserve"), OK)] * 2, ["served"], id="the controller's probes"),
        pytest.param([(request(agent="skyserve-lb"), OK)] * 2, ["served"], id="the load balancer's polls"),
        pytest.param([(request(agent="skyserve"), BROKEN)], [], id="a probe that fails"),
        pytest.param(
            [(request(agent="skyserve"), OK), (request(), OK)], ["served", "traffic"], id="both in turn"
        ),
        pytest.param([(b"\x00\x01binary", b"\x00\x02binary")], ["traffic"], id="another protocol"),
    ],
)
def test_what_passes_through_tls(passed: list[tuple[bytes, bytes]], expected: list[str]) -> None:
    assert noted(*passed) == expected


def test_a_busy_front_notes_traffic_once_in_a_while() -> None:
    TrafficWatch.noted_at = float("-inf")
    notes: list[float] = []
    now = 0.0
    watches = [TrafficWatch(lambda: notes.append(now), now=lambda: now) for _ in range(3)]
    for step in range(600):
        now = step / 10
        watches[step % 3].response(OK)
    assert notes == [0.0, 20.0, 40.0]


HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def table(folder: Path, *connections: tuple[str, str, str]) -> tuple[Path, ...]:
    path = folder / "tcp"
    lines = [f"   0: {local} {remote} {state} 00000000:00000000" for local, remote, state in connections]
    path.write_text(HEADER + "\n".join(lines) + "\n")
    return (path, folder / "missing")


@pytest.mark.parametrize(
    ("connection", "port", "peers", "expected"),
    [
        # 0A400005:1F40 is 5.0.64.10, port 8000, as a little-endian kernel writes it
        pytest.param(("0500400A:1F40", "0600400A:A000", "01"), 8000, [], True, id="to our port"),
        pytest.param(("0500400A:1F40", "0600400A:A000", "06"), 8000, [], False, id="which is closing"),
        pytest.param(("0500400A:0016", "0600400A:A000", "01"), 8000, [], False, id="to another port"),
        pytest.param(("0100007F:1F40", "0100007F:A000", "01"), 8000, [], False, id="from the machine itself"),
        pytest.param(("0500400A:B000", "0600400A:6FFF", "01"), None, ["10.64.0.6"], True, id="to the head"),
        pytest.param(
            ("0500400A:B000", "0700400A:6FFF", "01"), None, ["10.64.0.6"], False, id="to a stranger"
        ),
        pytest.param(
            (f"{'0' * 16}FFFF00000500400A:1F40", f"{'0' * 16}FFFF00000600400A:A000", "01"),
            8000,
            [],
            True,
            id="to our port by a socket of both families",
        ),
        pytest.param(
            (f"{'0' * 16}FFFF00000100007F:1F40", f"{'0' * 16}FFFF00000100007F:A000", "01"),
            8000,
            [],
            False,
            id="the same from the machine itself",
        ),
        pytest.param(("0500400A:B000", "0600400A:6FFF", "01"), None, ["no address"], False, id="no address"),
        pytest.param(
            ("0500400A:B000", "0600400A:6FFF", "01"),
            None,
            ["10.64.0.x", "10.64.0.300"],
            False,
            id="nor these",
        ),
    ],
)
def test_connections(
    tmp_path: Path, connection: tuple[str, str, str], port: int | None, peers: list[str], expected: bool
) -> None:
    assert lease.is_connected(port, frozenset(peers), table(tmp_path, connection)) is expected


def order(**facts: object) -> dict[str, object]:
    env = {
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYSERVE_REPLICA_PORT": "8000",
    }
    return {"env": env, "front": None, "role": "replica", **facts}


def test_whose_connections_count() -> None:
    assert daemon.connected_port(order()) == 8000
    assert daemon.connected_port(order(front={"port": 8443, "to": 8000})) is None
    assert daemon.connected_port(order(role="load_balancer")) is None
    worker = order()
    worker["env"]["SKYPILOT_NODE_RANK"] = "1"  # type: ignore[index]
    assert daemon.connected_port(worker) is None
    assert lease.peers_of(worker) == {"10.0.0.1"}
    assert lease.peers_of(order()) == frozenset()


def test_a_load_balancer_notes_what_it_has_served(tmp_path: Path) -> None:
    file, state = tmp_path / "traffic", {"served": 5, "in flight": 0}
    notes = TrafficNotes(file, lambda: state["served"], lambda: state["in flight"])
    seen = []
    for served, in_flight in [(5, 0), (6, 0), (6, 0), (6, 1), (6, 0)]:  # at the end of each period
        state.update({"served": served, "in flight": in_flight})
        notes.note()
        seen.append(file.exists())
        file.unlink(missing_ok=True)
    assert seen == [False, True, False, True, False]


def test_without_a_lease_a_load_balancer_notes_nothing(tmp_path: Path) -> None:
    TrafficNotes(tmp_path / "none" / "traffic", lambda: 1, lambda: 1).note()
    assert not (tmp_path / "none").exists()
