"""The label of the leader's Pod, over the fake API: where calls of the Service go when a controller dies, stops, or is frozen."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from provisioners.kubernetes.api import KubeApi
from skyserve_cli.controller.leader_label import (
    AGAIN_S,
    CONTROLLERS,
    LABEL,
    RETRY_S,
    LeaderLabel,
    leader_label,
)
from skyserve_cli.home import POD_NAME
from tests.clouds.kubernetes.kube_controller import Controller, controller
from tests.clouds.kubernetes.kube_world import NAMESPACE


class Member:
    """A controller as far as the label is concerned."""

    def __init__(self, kube: Controller, name: str) -> None:
        self.kube = kube
        self.name = name
        self.leads = False
        self.start()

    def start(self) -> None:
        """Another process in the same Pod."""
        api = KubeApi("prod", None, lambda: self.kube._client(None, None))
        self.label = LeaderLabel(lambda: api, self.name, lambda: self.leads, lambda: self.kube.clock[0])


class Pair:
    def __init__(self, kube: Controller) -> None:
        self.kube = kube
        for name in ("a", "b", "other"):
            labels = {"app": "x"} if name == "other" else CONTROLLERS
            spec = {"containers": [{"name": "main", "image": "i", "command": ["sleep", "1000"]}]}
            body = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": labels},
                "spec": spec,
            }
            kube.world.create("pods", NAMESPACE, body)
        self.a, self.b = Member(kube, "a"), Member(kube, "b")

    def step(self) -> list[str]:
        """Return the Pods that the Service selects."""
        for member in (self.a, self.b):
            member.label.step()
        return self.selected()

    def selected(self) -> list[str]:
        pods = self.kube.world.store.list("pods", NAMESPACE)
        return [one["metadata"]["name"] for one in pods if one["metadata"]["labels"].get(LABEL) == "true"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with controller() as kube:
        yield Pair(kube)


def test_the_leaders_pod_alone_is_selected(pair: Pair) -> None:
    assert pair.step() == []
    pair.a.leads = True
    assert pair.step() == ["a"]
    other = pair.kube.world.store.get("pods", NAMESPACE, "other")
    assert LABEL not in other["metadata"]["labels"]


def test_the_next_leader_takes_the_label_from_one_that_was_killed(pair: Pair) -> None:
    pair.a.leads = True
    assert pair.step() == ["a"]
    pair.b.leads = True  # the process in Pod a was killed, and has written nothing
    pair.b.label.step()
    assert pair.selected() == ["b"]
    pair.a.leads = False
    pair.a.start()
    assert pair.step() == ["b"]


def test_one_that_was_frozen_takes_nothing_back(pair: Pair) -> None:
    pair.a.leads = True
    pair.step()
    pair.b.leads = True
    pair.b.label.step()
    pair.a.label.step()  # it still believes that it leads
    assert pair.selected() == ["b"]
    pair.kube.advance(AGAIN_S + 1.0)
    pair.a.leads = False
    assert pair.step() == ["b"]


def test_the_same_pod_goes_on_after_its_process_was_started_again(pair: Pair) -> None:
    pair.a.leads = True
    pair.step()
    pair.a.start()
    assert pair.step() == ["a"]


def test_nothing_is_called_while_nothing_changes_and_a_label_that_was_removed_comes_back(pair: Pair) -> None:
    pair.a.leads = True
    pair.step()
    before = dict(pair.kube.world.counts)
    pair.step()
    assert pair.kube.world.counts == before
    pair.kube.world.store.patch("pods", NAMESPACE, "a", {"metadata": {"labels": {LABEL: None}}})
    pair.kube.advance(AGAIN_S + 1.0)
    assert pair.step() == ["a"]


def test_an_api_that_does_not_respond_is_tried_again_and_logged_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.a.leads = True
    pair.kube.world.troubles.denied = {("patch", "pods")}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert pair.step() == []
            pair.kube.advance(RETRY_S + 0.1)
    assert sum("the Pod a cannot be labelled" in one.message for one in caplog.records) == 1
    assert 'cannot patch resource "pods"' in caplog.text
    pair.kube.world.troubles.denied = set()
    pair.kube.advance(RETRY_S + 0.1)
    assert pair.step() == ["a"]


def test_a_controller_that_stops_gives_the_label_up(pair: Pair) -> None:
    pair.a.leads = True
    pair.a.label.start()
    pair.a.label.stop()
    assert pair.selected() == []


def test_outside_a_pod_there_is_no_label() -> None:
    assert leader_label({}, lambda: True) is None
    assert leader_label({POD_NAME: "a"}, lambda: True) is not None
