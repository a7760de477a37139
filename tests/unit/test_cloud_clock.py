"""The offset between a cloud's clock and ours: what it is measured by, and that the three official SDKs give it."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from provisioners.cloud_clock import ClockSource, CloudClock
from tests.clouds.aws.aws_bench import ORDER, aws_bench
from tests.clouds.azure.azure_harness import OWNER, azure
from tests.clouds.azure.azure_server import AzureServer
from tests.clouds.azure.azure_world import World as AzureWorld
from tests.clouds.gcp.gcp_controller import controller

NOW = 1_800_000_000.0


def header(at: float) -> str:
    return formatdate(at, usegmt=True)


@pytest.mark.parametrize(
    ("cloud_is_ahead_s", "offset_s", "warns"),
    [
        (0.0, 0.0, False),
        (2.0, 0.0, False),
        (4.0, 4.0, False),
        (60.0, 60.0, True),
        (-60.0, -60.0, True),
        pytest.param(5e7, 0.0, False, id="an absurd header"),
    ],
)
def test_the_offset(cloud_is_ahead_s: float, offset_s: float, warns: bool) -> None:
    clock = CloudClock(lambda: NOW + 0.5)
    clock.set_from_header(header(NOW + cloud_is_ahead_s))
    assert clock.offset_s == offset_s
    assert clock.ours(NOW + 120.0) == NOW + 120.0 - offset_s
    assert bool(clock.warning()) is warns


def test_the_warning_says_what_to_do() -> None:
    clock = CloudClock(lambda: NOW)
    clock.set_from_header(header(NOW + 60))
    assert clock.warning().startswith("this host's clock is 60 s behind the cloud's; set it by NTP")
    clock.set_from_header(header(NOW - 60))
    assert "60 s ahead of the cloud's" in clock.warning()


def test_an_offset_stays_the_same_while_headers_only_round() -> None:
    now = NOW
    clock = CloudClock(lambda: now)
    offsets = set()
    for step in range(500):
        now = NOW + step * 0.37
        clock.set_from_header(header(int(now + 60)))
        offsets.add(clock.offset_s)
    assert len(offsets) == 1
    clock.set_from_header(header(now))  # our clock was set
    assert clock.offset_s == 0.0


@pytest.mark.parametrize("date", [None, "", "soon", "Mon, 99 Foo 2026"])
def test_what_is_no_date_says_nothing(date: str | None) -> None:
    clock = CloudClock(lambda: NOW)
    clock.set_from_header(date)
    assert clock.offset_s == 0.0


def test_ec2_tells_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with aws_bench(monkeypatch) as bench:
        machines = bench.fresh()
        machines.machines(ORDER.owner)
        assert isinstance(machines, ClockSource)
        assert machines.cloud_clock.offset_s == 0.0
        bench.world.clock_off_s = 90.0
        machines.machines(ORDER.owner)
        assert machines.cloud_clock.offset_s == pytest.approx(90.0, abs=1.0)


def test_azure_tells_its_time() -> None:
    world = AzureWorld(clock_off_s=-75.0)
    with AzureServer(world).running() as server:
        machines = azure(server)
        machines.machines(OWNER)
        assert isinstance(machines, ClockSource)
        assert machines.cloud_clock.offset_s == pytest.approx(-75.0, abs=1.0)


def test_google_cloud_tells_its_time() -> None:
    with controller() as gcp:
        gcp.world.clock_off_s = 40.0
        gcp.machines.machines("x")
        assert isinstance(gcp.machines, ClockSource)
        assert gcp.machines.cloud_clock.offset_s == pytest.approx(40.0, abs=1.0)
