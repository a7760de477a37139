"""Publishing names: a wanted name is published once, failures are tried again, and deleting is given up in the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from provisioners.port.dns import Endpoint
from provisioners.port.errors import AuthError
from skyserve_cli.controller.balancers import dns as names
from skyserve_cli.controller.balancers.dns import ThreadDns
from skyserve_cli.controller.reconcile.ports import NameOrder

EAST, X = Endpoint("192.0.2.1", "own-chat-1", 8000, "http"), Endpoint("192.0.2.2", "own-chat-2", 8000, "http")
ORDER = NameOrder("chat", "example.com.", "chat.example.com.", (("aws", "east", EAST), ("gcp", "x", X)))
NOTHING = NameOrder("chat", "example.com.", "chat.example.com.")


class World:
    """A clock that a test moves, and someone who publishes, or refuses to."""

    def __init__(self) -> None:
        self.time = 0.0
        self.refuses = False
        self.told: list[tuple[str, dict[str, list[Endpoint]]]] = []
        self.tries = 0
        self.woken = threading.Event()
        self.names = ThreadDns(
            lambda: self, lambda cloud, region: f"{cloud}-{region}", "own", self, self.woken.set
        )

    def now(self) -> float:
        return self.time

    def publish(
        self, zone: str, name: str, owner: str, mark: str, endpoints: Mapping[str, Sequence[Endpoint]]
    ) -> None:
        self.tries += 1
        if self.refuses:
            raise AuthError("aws route53:ChangeResourceRecordSets is missing", cloud="aws")
        self.told.append((mark, {region: list(found) for region, found in endpoints.items()}))

    def until_settled(self, order: NameOrder) -> None:
        """Time goes by."""
        for _ in range(400):
            if self.names.is_settled(order):
                return
            self.time += 20.0
            self.names.ensure([order])
            time.sleep(0.01)
        raise AssertionError(f"{order} never settled; {self.told}")


def test_a_name_is_published_once_and_again_when_it_means_something_else() -> None:
    world = World()
    assert not world.names.is_settled(ORDER)
    world.until_settled(ORDER)
    world.until_settled(NOTHING)
    mark = "skyserve-own-chat-"
    assert world.told == [(mark, {"aws-east": [EAST], "gcp-x": [X]}), (mark, {})]
    assert not world.names.is_settled(ORDER)


def test_what_is_refused_is_tried_again_and_told() -> None:
    world = World()
    world.refuses = True
    world.names.ensure([ORDER])
    assert world.woken.wait(10)
    assert "route53:ChangeResourceRecordSets" in world.names.trouble("chat")
    assert not world.names.is_settled(ORDER)
    world.refuses = False
    world.until_settled(ORDER)
    assert world.names.trouble("chat") == ""
    assert world.tries > len(world.told) == 1


def test_a_name_that_cannot_be_deleted_does_not_keep_a_service_up() -> None:
    world = World()
    world.refuses = True
    world.until_settled(NOTHING)
    assert world.tries >= names.DELETE_TRIES
    assert world.told == []
