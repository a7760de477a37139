"""One real cluster for all tests of this folder, in each process of pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from provisioners.contract.subject import Subject
from tests.kubernetes_real.cluster import control_plane, why_not
from tests.kubernetes_real.contract_real import RealSubject, Regions
from tests.kubernetes_real.spaces import RealWorld, Space, real_world

pytest.register_assert_rewrite("provisioners.contract.suite", "provisioners.contract.troubles")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them are long, and one reason covers all where there is no server."""
    why = why_not()
    for item in items:
        if item.nodeid.startswith("tests/kubernetes_real/"):
            item.add_marker(pytest.mark.long)
            if why is not None:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RealWorld]:
    folder = tmp_path_factory.mktemp("control-plane")
    with control_plane(folder) as plane, real_world(plane, folder / "nodes") as made:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\nkube-apiserver {plane.release}, started with its logs in {folder}")
        yield made
        plane.check()


@pytest.fixture(autouse=True)
def release(world: RealWorld, record_property: Callable[[str, object], None]) -> str:
    """The server's version: in the output of each test, and in reports."""
    record_property("kube-apiserver", world.plane.release)
    print(f"kube-apiserver {world.plane.release}")
    return world.plane.release


@pytest.fixture
def space(world: RealWorld) -> Iterator[Space]:
    with world.space() as made:
        yield made


@pytest.fixture(scope="session")
def regions(world: RealWorld) -> Iterator[Regions]:
    made = Regions(world)
    yield made
    made.close()


@pytest.fixture
def subject(regions: Regions) -> Iterator[Subject]:
    made = RealSubject(regions)
    yield made
    made.close()
