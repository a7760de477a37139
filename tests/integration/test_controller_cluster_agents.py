"""Agents that a cloud runs itself, as real processes: each has the table, what they report is one load, and trouble is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lb.config.schema import Limits, Readiness, Table, Target
from policies.model import CapacityType, ProbeFailed, ProbePassed, Zone
from provisioners.port.agents import AgentProcess, AgentRelease
from provisioners.port.base import Instance, InstanceState
from provisioners.port.errors import TransientError
from skyserve_cli.controller.balancers.agent_supervisor import SILENT_AFTER_S
from skyserve_cli.controller.balancers.cluster_supervisor import release_of
from skyserve_cli.controller.balancers.regional_fleet import RegionalFleet, admin_token
from skyserve_cli.controller.reconcile.ports import RegionalOrder
from tests.integration.lb_harness import RunningAgent, World, until, world

SECRET = b"s" * 32
INSTANCE = Instance(
    "uid",
    "lb-1",
    "owner",
    "default",
    7,
    Zone("kubernetes", "prod", "zone-a"),
    CapacityType.ON_DEMAND,
    InstanceState.RUNNING,
)


@dataclass
class Cloud:
    """An `AgentSource`, and a clock."""

    processes: list[AgentProcess] = field(default_factory=list)
    releases: list[AgentRelease] = field(default_factory=list)
    error: TransientError | None = None
    time: float = 1_800_000_000.0
    woken: int = 0
    version: str = "agent:1"

    def now(self) -> float:
        return self.time

    def wake(self) -> None:
        self.woken += 1

    def agent_version(self) -> str:
        return self.version

    def run_agent(self, instance: Instance, release: AgentRelease) -> Sequence[AgentProcess]:
        assert instance == INSTANCE
        if not self.releases or self.releases[-1] != release:
            self.releases.append(release)
        if self.error is not None:
            raise self.error
        return list(self.processes)


def order(url: str, revision: str = "1", **more: object) -> RegionalOrder:
    target = Target("3", url, state=Readiness.READY)
    table = Table("default", revision, (target,), "round_robin", Limits(hold_s=5.0))
    return RegionalOrder("default", 7, INSTANCE, 8000, table, **more)  # type: ignore[arg-type]


@pytest.fixture
async def w(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as it:
        yield it


@pytest.fixture
async def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
async def fleet(cloud: Cloud) -> AsyncIterator[RegionalFleet]:
    loop = asyncio.get_running_loop()
    made = RegionalFleet(lambda _: cloud, SECRET, cloud, loop, cloud.wake)  # type: ignore[arg-type, return-value]
    await made.start()
    yield made
    await made.close()


async def agent(w: World) -> RunningAgent:
    return await w.agent(token=admin_token(SECRET, "lb-1"), clean_exit=False)


def process(number: int, running: RunningAgent | None, release: str, **more: object) -> AgentProcess:
    return AgentProcess(f"uid-{number}", release, None if running is None else running.admin, **more)  # type: ignore[arg-type]


@pytest.mark.long
async def test_both_processes_of_a_roll_out_have_the_table_and_report_their_part(
    w: World, cloud: Cloud, fleet: RegionalFleet
) -> None:
    target, old = await w.target("a"), await agent(w)
    cloud.processes = [process(1, old, "")]
    fleet.ensure([order(target.url)])
    await until(lambda: done(fleet.view("default", 7).synced))
    await until(lambda: done(fleet.drain() == [("default", ProbePassed(7))]))
    assert await old.text() == (200, "a")
    assert fleet.view("default", 7).build is not None
    (release,) = cloud.releases
    assert release.arguments == (
        "--service", "default", "--region", "prod", "--host", "0.0.0.0", "--port", "8000",
    )  # fmt: skip
    assert not fleet.view("default", 7).newest

    new = await agent(w)
    cloud.processes = [process(1, old, "", is_leaving=True), process(2, new, release.name)]
    await until(lambda: done(fleet.view("default", 7).newest))
    assert await new.text() == (200, "a")
    await until(lambda: done(fleet.loads("default")[0].requests == 2))
    assert fleet.view("default", 7).version == "agent:1"
    fleet.ensure([order(target.url, "2", passing=True)])
    await until(lambda: revision(new, "2", fleet))
    await until(lambda: revision(old, "2", fleet))
    assert fleet.admin_ports("default")[7].url == new.admin

    cloud.processes = [process(2, new, release.name)]
    await until(lambda: done(fleet.loads("default")[0].requests == 1))
    assert fleet.drain() == []


@pytest.mark.long
async def test_an_agent_that_does_not_start_says_why_and_one_that_is_silent_fails_its_probe(
    w: World, cloud: Cloud, fleet: RegionalFleet
) -> None:
    target = await w.target("a")
    cloud.processes = [process(1, None, "", trouble="0/3 nodes are available")]
    fleet.ensure([order(target.url)])
    await until(lambda: done(fleet.view("default", 7).trouble == "0/3 nodes are available"))
    assert fleet.drain() == []
    running = await agent(w)
    cloud.processes = [process(1, running, "")]
    await until(lambda: done(fleet.view("default", 7).synced))
    await until(lambda: done(fleet.drain() == [("default", ProbePassed(7))]))
    fleet.ensure([order(target.url, passing=True)])
    cloud.error = TransientError("the cluster prod does not respond", cloud="kubernetes")
    await until(lambda: done(bool(fleet.view("default", 7).trouble)))
    assert fleet.drain() == []  # a while is nothing
    cloud.time += SILENT_AFTER_S + 1.0
    assert fleet.drain() == [("default", ProbeFailed(7, "the cluster prod does not respond"))]
    assert await running.text() == (200, "a")  # which goes on by the table that it has
    cloud.error = None
    fleet.ensure([order(target.url, passing=False)])
    await until(lambda: done(fleet.drain() == [("default", ProbePassed(7))]))


async def test_an_agent_that_was_started_again_gets_its_table_again(
    w: World, cloud: Cloud, fleet: RegionalFleet
) -> None:
    target, running = await w.target("a"), await agent(w)
    cloud.processes = [process(1, running, "")]
    fleet.ensure([order(target.url)])
    await until(lambda: done(fleet.view("default", 7).synced))
    await running_push(running)
    await until(lambda: revision(running, "1", fleet))


def test_another_certificate_or_image_is_another_release(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    certificate.write_bytes(b"one")
    key.write_bytes(b"key")
    wanted = order("http://127.0.0.1:1", tls=(str(certificate), str(key)), peers_port=8443)
    first = release_of(wanted, "agent:1", (b"ca", b"own"))
    assert first == release_of(wanted, "agent:1", (b"ca", b"own"))
    assert first.ports == (8000, 8443)
    assert set(first.files) == {"tls-cert.pem", "tls-key.pem", "peers-ca.pem", "peers-own.pem"}
    assert "key" not in repr(first).replace("tls-key.pem", "").replace("--tls-keyfile", "")
    certificate.write_bytes(b"two")
    assert release_of(wanted, "agent:1", (b"ca", b"own")).name != first.name
    certificate.write_bytes(b"one")
    assert release_of(wanted, "agent:2", (b"ca", b"own")).name != first.name


async def done(value: object) -> object:
    return value


async def revision(running: RunningAgent, wanted: str, fleet: RegionalFleet) -> bool:
    headers = {"Authorization": f"Bearer {fleet.admin_token('lb-1')}"}
    async with running.http.get(f"{running.admin}/-/targets", headers=headers) as response:
        return bool((await response.json())["revision"] == wanted)


async def running_push(running: RunningAgent) -> None:
    """A table that the controller does not know: as of an agent that started with another one."""
    headers = {"Authorization": f"Bearer {admin_token(SECRET, 'lb-1')}"}
    table = {"service": "default", "revision": "of someone else", "targets": []}
    async with running.http.put(f"{running.admin}/-/targets", json=table, headers=headers) as response:
        assert response.status == 200
