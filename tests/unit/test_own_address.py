"""How a host finds out from where it reaches machines; no network is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from provisioners.own_address import FIND_EVERY_S, KEPT_S, OwnAddresses, current

PUBLIC, MOVED, HOME = "8.8.4.4", "9.9.9.9", "192.168.1.5"
URL = "https://address.example"


class Net:
    """Where routes lead, what URLs respond with, and what was asked."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.route: str | None = HOME
        self.responses: dict[str, str] = {}
        self.asked: list[str] = []

    def now(self) -> float:
        return self.time

    def local(self, towards: str) -> str | None:
        return "10.0.0.2" if towards.startswith("10.") else self.route

    def read(self, url: str, headers: Mapping[str, str], method: str, timeout_s: float) -> str:
        self.asked.append(url)
        for start, response in self.responses.items():
            if url.startswith(start):
                return response
        raise OSError("nobody there")

    def own(self, path: Path | None = None, url: str | None = URL) -> OwnAddresses:
        return OwnAddresses(path, url, self.now, read=self.read, local=self.local)


def test_a_public_address_of_our_own_needs_no_question() -> None:
    net = Net()
    net.route = PUBLIC
    assert net.own().public() == {PUBLIC}
    assert net.asked == []


@pytest.mark.parametrize(
    "path",
    ["/latest/meta-data/public-ipv4", "/computeMetadata/v1/instance", "/metadata/instance/network"],
    ids=["aws", "gcp", "azure"],
)
def test_a_machine_of_a_cloud_asks_its_metadata_service_and_nobody_else(path: str) -> None:
    net = Net()
    net.responses = {"http://169.254.169.254/latest/api/token": "t", f"http://169.254.169.254{path}": PUBLIC}
    assert net.own().public() == {PUBLIC}
    assert not any(url.startswith(URL) for url in net.asked)


def test_the_service_is_asked_last_and_seldom_and_never_if_it_is_not_to_be() -> None:
    net = Net()
    net.responses = {URL: f"{PUBLIC}\n"}
    own = net.own()
    for _ in range(5):
        assert own.public() == {PUBLIC}
        net.time += FIND_EVERY_S / 10
    assert net.asked.count(URL) == 1
    assert net.own(url=None).public() == frozenset()


def test_while_machines_report_nobody_is_asked() -> None:
    net = Net()
    own = net.own()
    own.public()
    before = len(net.asked)
    for _ in range(20):
        own.saw(PUBLIC)
        net.time += 60.0
        assert own.public() == {PUBLIC}
    assert len(net.asked) == before


def test_another_network_is_noticed_at_once_and_the_old_address_is_dropped_later() -> None:
    net = Net()
    net.responses = {URL: PUBLIC}
    own = net.own()
    assert own.public() == {PUBLIC}
    net.time, net.route, net.responses = net.time + 1.0, "172.20.0.7", {URL: MOVED}
    assert own.public() == {PUBLIC, MOVED}
    net.time += KEPT_S + 1
    own.saw(MOVED)
    assert own.public() == {MOVED}


def test_what_machines_saw_outlives_the_process(tmp_path: Path) -> None:
    net, path = Net(), tmp_path / "own.json"
    net.own(path).saw(PUBLIC)
    net.time += 1e6
    assert net.own(path).public() == {PUBLIC}
    path.write_text("[not what it was")
    assert net.own(path).public() == frozenset()


def test_inside_a_network_the_routes_to_the_machines_tell() -> None:
    net = Net()
    own = net.own()
    assert own.private(["10.1.2.3"]) == {"10.0.0.2", HOME}
    own.saw("10.9.9.9")  # an address translation on the way
    assert own.private([]) == {HOME, "10.9.9.9"}
    assert own.public() == frozenset()


@pytest.mark.parametrize("response", ["", "<html>", "10.0.0.1", "999.1.1.1", "8.8.4.4 8.8.8.8"])
def test_what_is_no_public_address_is_not_believed(response: str) -> None:
    net = Net()
    net.responses = {"http": response}
    assert net.own().public() == frozenset()


def test_several_ways_out_are_all_kept() -> None:
    assert current({"a": 100.0, "b": 100.0 - KEPT_S, "c": 99.0 - KEPT_S}) == {"a", "b"}
    assert current({}) == frozenset()
