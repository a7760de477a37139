"""Sidecars that a mutating webhook of a real API server injects: how our container ends is not confused with how the sidecar does."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from provisioners.kubernetes.cloud import KubernetesProvisioner
from tests.clouds.kubernetes import kube_sidecars
from tests.clouds.kubernetes.kube_controller import OWNER
from tests.clouds.kubernetes.kube_sidecars import CASES, CODES, Case
from tests.kubernetes_real.cluster import until
from tests.kubernetes_real.spaces import Space, await_state, insist, listed
from tests.kubernetes_real.webhook import webhook

pytestmark = pytest.mark.timeout(420)
_SINCE = 29


@pytest.mark.parametrize("native", [False, True], ids=["injected", "native"])
def test_the_end_of_our_container_is_seen_beside_a_sidecar(
    space: Space, native: bool, tmp_path: Path
) -> None:
    if native and space.world.plane.minor < _SINCE:
        pytest.skip(f"before 1.{_SINCE} the API drops restartPolicy of init containers")
    cloud = space.controller()
    cloud.listing(OWNER)
    with webhook(space, partial(kube_sidecars.inject, folder=tmp_path, native=native)):
        for code in CODES:
            live(space, cloud, [one for one in CASES if one.main == code], tmp_path)


def live(space: Space, cloud: KubernetesProvisioner, cases: list[Case], folder: Path) -> None:
    def has_ended(token: str) -> bool:
        return kube_sidecars.ended(space.api.get("pods", space.name, token))

    for number, case in enumerate(cases):
        order = space.order(cloud, case.token, replica_id=number, **case.changes(folder))
        insist(partial(cloud.launch, order))
    kube_sidecars.play(
        cases,
        folder,
        lambda token: listed(cloud)[token],
        lambda token, state: await_state(cloud, token, state),
        has_ended,
        lambda holds: until(holds, "the sidecar does not end"),
    )
    for one in listed(cloud).values():
        if not one.state.is_gone:
            insist(partial(cloud.terminate, one))
    space.await_nothing()
