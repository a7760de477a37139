"""A replica of two nodes, from the file to the loss of one of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from provisioners.local import process_tree as local_process
from provisioners.local.store import InstanceFolder, LocalStore

pytestmark = pytest.mark.long

PAIR = Path(__file__).parents[2] / "examples" / "06-two-nodes" / "service.yaml"


def nodes(serve: Any, replica_id: int) -> list[InstanceFolder]:
    folders = LocalStore(serve.home).folders()
    (folder,) = [f for f in folders if (record := f.record()) and record.replica_id == replica_id]
    return folder.nodes()


def processes(serve: Any, replica_id: int) -> list[list[int]]:
    store = LocalStore(serve.home)
    return [local_process.marked(store.node_id(node)) for node in nodes(serve, replica_id)]


def ready(serve: Any, replica_id: int) -> bool:
    return [(r["id"], r["state"]) for r in serve.view("pair")["replicas"]] == [(replica_id, "READY")]


def ended(serve: Any, replica_id: int) -> tuple[str, str]:
    (replica,) = [r for r in serve.view("pair", "--all")["replicas"] if r["id"] == replica_id]
    return replica["end_reason"], replica["message"]


def test_two_nodes_live_and_die_as_one(serve: Any) -> None:
    plan = serve.ok("plan", PAIR, "-o", "json").json()
    assert (plan["launches"][0]["num_nodes"], plan["usd_per_hour"]) == (2, 0.6)
    assert "2x L4:1" in serve.ok("plan", PAIR).out
    serve.ok("up", PAIR, "-y")
    assert len({record.zone for node in nodes(serve, 1) if (record := node.record())}) == 1
    assert "2x L4:1" in serve.ok("status").out
    assert serve.ok("logs", "pair", "1", "--node", "1").out == "node 1 of 2, the head is 127.0.0.1\n"
    assert "has no node 2" in serve("logs", "pair", "1", "--node", "2").err

    # The market takes a machine of the two.
    assert "no node 5" in serve("local", "preempt", "pair/1", "--node", "5").err
    serve.ok("local", "preempt", "pair/1", "--node", "1")
    serve.eventually(lambda: ready(serve, 2))
    assert ended(serve, 1) == ("PREEMPTED", "node 1 of 2 is gone: the spot market took it")
    assert processes(serve, 1) == [[], []]
    story = [json.loads(line) for line in serve.ok("events", "pair", "-o", "json").out.splitlines()]
    assert [line["kind"] for line in story if line["replica_id"] == 1][-2:] == ["NodeLost", "Terminated"]

    # Someone kills the process of one of the two.
    for pid in processes(serve, 2)[1]:
        os.kill(pid, signal.SIGKILL)
    serve.eventually(lambda: ready(serve, 3))
    assert ended(serve, 2) == (
        "RUN_EXITED",
        "node 1: `run` ended by signal SIGKILL: node 1 of 2, the head is 127.0.0.1",
    )
    assert processes(serve, 2) == [[], []]
