"""All services in brief: what load balancers counted is read every ten seconds, and a service that goes meanwhile is no error."""

from __future__ import annotations

from typing import Any

from skyserve_cli.controller.dashboard.page_routes import TRAFFIC_EVERY_S, TRAFFIC_S, FleetView
from skyserve_cli.state.values import NoSuchServiceError


class World:
    def __init__(self) -> None:
        self.at = 5000.0
        self.names = ["chat", "code"]
        self.read: list[tuple[str, float]] = []
        self.gone: set[str] = set()

    def now(self) -> float:
        return self.at

    def services(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "ready": 1, "replicas": [{"id": 1}], "load_balancers": []} for name in self.names
        ]

    def traffic(self, name: str, since: float) -> dict[str, Any] | None:
        if name in self.gone:
            raise NoSuchServiceError(name)
        self.read.append((name, since))
        return {"requests": len(self.read)} if name == "chat" else None


def test_services_have_no_replicas_and_their_traffic() -> None:
    world = World()
    view = FleetView(world.services, world.traffic, world)
    assert view.content() == {
        "traffic_s": TRAFFIC_S,
        "services": [
            {"name": "chat", "ready": 1, "traffic": {"requests": 1}},
            {"name": "code", "ready": 1, "traffic": None},
        ],
    }
    assert world.read == [("chat", 5000.0 - TRAFFIC_S), ("code", 5000.0 - TRAFFIC_S)]


def test_traffic_is_read_again_after_a_while_and_of_new_services_at_once() -> None:
    world = World()
    view = FleetView(world.services, world.traffic, world)
    view.content()
    world.names = ["chat", "code", "new"]
    world.at += TRAFFIC_EVERY_S - 0.1
    view.content()
    assert [name for name, _ in world.read] == ["chat", "code", "new"]
    world.at += 0.2
    view.content()
    assert [name for name, _ in world.read] == ["chat", "code", "new"] * 2
    world.at -= 1000.0  # the clock was set back
    view.content()
    assert [name for name, _ in world.read] == ["chat", "code", "new"] * 3


def test_a_service_that_has_just_gone_has_no_traffic() -> None:
    world = World()
    world.gone = {"chat"}
    shown = FleetView(world.services, world.traffic, world).content()["services"]
    assert [one["traffic"] for one in shown] == [None, None]
